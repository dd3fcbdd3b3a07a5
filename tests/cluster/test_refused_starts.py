"""What a daemon cannot be started with: it is said in one line, by `--check` too, and leaves nothing behind."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

import nosync
from nosync.cli import main
from nosync.replication.transport.certs import make_certificates


def test_an_address_that_cannot_be_had_is_said_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    make_certificates(tmp_path / "tls", ["n1"])
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        for listen, message in (
            (f"127.0.0.1:{port}", "address already in use; another program has this port"),
            ("203.0.113.7:7501", "no interface of this machine has that address"),
        ):
            common = ["daemon", "--node", "n1", "--data", str(tmp_path / "d"), "--replicas", "1"]
            with pytest.raises(SystemExit):
                main([*common, "--listen", listen, "--tls", str(tmp_path / "tls")])
            shown = " ".join(capfd.readouterr().err.split())
            assert message in shown
            assert "add_port.cc" not in shown, "gRPC's own words"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--listen", "banana"], "listen: address 'banana' is not HOST:PORT"),
        (["--listen", "127.0.0.1:99999"], "is not HOST:PORT"),
        (["--listen", "0.0.0.0:7510"], "off loopback both sides need certificates"),
        (["--metrics", "x"], "metrics: address 'x'"),
        (["--peer", "n2=host"], "peers.n2: address 'host'"),
        (["--listen", "127.0.0.1:7510", "--peer", "n2=127.0.0.1:7510"], "an address of its own"),
        (["--listen", "127.0.0.1:7510", "--peer", "n2=localhost:7510"], "an address of its own"),
        (["--peer", "n2=127.0.0.1:0"], "is said to listen on 127.0.0.1:0: say the port"),
        (["--tls", "nope"], "make certificates with nosync certs"),
        (["--peer", "n2=127.0.0.1:1", "--peer", "n2=127.0.0.1:2"], "names node n2 twice"),
        (
            ["--peer", "n2=127.0.0.1:1", "--peer", "n3=127.0.0.1:1"],
            "two peers of node n1 are said to listen on 127.0.0.1:1",
        ),
        (["--archive-epochs", "1"], "--archive-epochs"),
        (
            ["--listen", "127.0.0.1:7510", "--metrics", "127.0.0.1:7510"],
            "--listen and --metrics are both 127.0.0.1:7510",
        ),
        (["--metrics", "127.0.0.1:7511", "--door", "127.0.0.1:7511"], "--metrics and --door are both"),
        (["--door", "0.0.0.0:7603"], "the door on 0.0.0.0:7603 is reached from other hosts, and needs certificates"),
    ],
)
def test_what_a_start_refuses_a_check_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    common = ["daemon", "--node", "n1", "--data", str(tmp_path / "d"), "--replicas", "1", *arguments]
    for more in (["--check"], []):
        with pytest.raises(SystemExit):
            main([*common, *more])
        assert message in " ".join(capsys.readouterr().err.split())


def test_a_store_is_no_daemons_where_its_start_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nosync.open(tmp_path / "s").close()
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        command = ["daemon", "--node", "n1", "--data", str(tmp_path / "s"), "--replicas", "1"]
        with pytest.raises(SystemExit):
            main([*command, "--listen", "127.0.0.1:0", "--metrics", f"127.0.0.1:{port}"])
    assert f"127.0.0.1:{port}" in capsys.readouterr().err
    nosync.open(tmp_path / "s").close()


def test_a_start_that_is_refused_leaves_no_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    common = ["daemon", "--node", "n1", "--replicas", "1", "--data"]
    for data, message in (("foreign", "is not empty (notes.txt"), ("file", "is a file, not a store directory")):
        for more in (["--check"], []):
            with pytest.raises(SystemExit):
                main([*common, str(tmp_path / data), *more])
            assert message in " ".join(capsys.readouterr().err.split())
    with socket.create_server(("127.0.0.1", 0)) as other:
        with pytest.raises(SystemExit):
            main([*common, str(tmp_path / "new"), "--listen", f"127.0.0.1:{other.getsockname()[1]}"])
        assert "another program has this port" in " ".join(capsys.readouterr().err.split())
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "foreign", "notes.txt"]
