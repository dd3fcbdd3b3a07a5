"""What is said of a daemon with which no session comes about is what is wrong with it."""

from __future__ import annotations

import datetime
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import nosync
from nosync.cli.status import _show_now
from nosync.replication.daemon.config import DaemonConfig
from nosync.replication.daemon.daemon import Daemon
from nosync.replication.transport.certs import make_certificates
from nosync.replication.transport.channel import Certificates
from nosync.replication.transport.client import DaemonClient
from nosync.replication.transport.handshake import look
from nosync.testing.daemon_cluster import eventually, free_ports


@contextmanager
def silent() -> Iterator[str]:
    """Takes connections, as the kernel does for a process that is frozen, and says nothing."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def ago(days: int) -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=days)


def authority(tmp_path: Path) -> Path:
    """Certificates of one authority: those of n1 and n2 are good, `old` and n3 have expired."""
    make_certificates(tmp_path / "tls", ["n3", "old"], now=ago(900))
    (tmp_path / "tls" / "ca.pem").rename(tmp_path / "old-ca.pem")
    (tmp_path / "tls" / "ca.key").unlink()
    make_certificates(tmp_path / "tls", ["n1", "n2"])
    both = (tmp_path / "tls" / "ca.pem").read_text() + (tmp_path / "old-ca.pem").read_text()
    (tmp_path / "tls" / "ca.pem").write_text(both)
    return tmp_path / "tls"


@pytest.mark.parametrize("is_secure", [False, True])
def test_a_frozen_daemon_is_no_matter_of_certificates(tmp_path: Path, is_secure: bool) -> None:
    tls = authority(tmp_path)
    with silent() as address:
        client = DaemonClient(address, Certificates.of_directory(tls, "n1") if is_secure else None, "n2")
        with pytest.raises(nosync.ReplicationError, match="says nothing: its process is stopped") as raised:
            client.status(timeout_s=2.0)
        assert "certificate" not in str(raised.value)
        client.close()


def test_each_reason_is_named(tmp_path: Path) -> None:
    tls = authority(tmp_path)
    make_certificates(tmp_path / "other", ["n1"])
    (port,) = free_ports(1)
    daemon = Daemon(DaemonConfig("n2", tmp_path / "d", f"127.0.0.1:{port}", {}, replicas=1, tls=tls))
    daemon.start()
    address = daemon.servers.address
    try:

        def said(directory: Path, identity: str, node: str = "n2") -> str:
            found = look(address, Certificates.of_directory(directory, identity).as_client(), node)
            return "" if found is None else found.text

        assert said(tls, "n1") == ""
        assert "does not accept the certificate that is shown here, which has expired" in said(tls, "old")
        assert "not of one authority" in said(tmp_path / "other", "n1")
        assert "the daemon there is not node n7" in said(tls, "n1", "n7")
        without = look(address, None, "n2")
        assert without is not None
        assert "without certificates" in without.text
    finally:
        daemon.stop()
    assert look(address, None, "n2") is None, "nobody is there"


@pytest.mark.parametrize("ours", ["n1", "n4"])
def test_a_peer_whose_certificate_has_expired_is_refused_and_not_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ours: str
) -> None:
    """On both sides: the one whose id comes first dials, and the other one is told nothing by gRPC."""
    tls = authority(tmp_path)
    names = {ours: "n1", "n3": "n3"}
    ports = dict(zip(names, free_ports(2), strict=True))
    for end in ("pem", "key"):
        if ours != "n1":
            (tls / f"{ours}.{end}").write_bytes((tls / f"n2.{end}").read_bytes())
    monkeypatch.setattr(Certificates, "check_as_peers_do", lambda *_: None)
    daemons = []
    try:
        for node in names:
            peers = {other: f"127.0.0.1:{ports[other]}" for other in names if other != node}
            config = DaemonConfig(node, tmp_path / node, f"127.0.0.1:{ports[node]}", peers, replicas=2, tls=tls)
            daemons.append(Daemon(config))
            daemons[-1].start()
        first, second = daemons
        eventually("its peer is refused", lambda: first.status().peers[0].state == "refused")
        assert "has a certificate that has expired" in first.status().peers[0].why
        eventually("it is refused by its peer", lambda: second.status().peers[0].state == "refused")
    finally:
        for daemon in daemons:
            daemon.stop()


def test_problems_stand_in_one_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = Daemon(DaemonConfig("n1", tmp_path / "d", "127.0.0.1:0", {}, replicas=1))
    daemon.start()
    try:
        daemon.node.problems["planted"] = "of the daemon"
        _show_now(tmp_path / "d", as_json=True)
        found = json.loads(capsys.readouterr().out)
        assert found["problems"] == {"planted": "of the daemon"}
        assert "problems" not in found["daemon"]
        _show_now(tmp_path / "d", as_json=False)
        assert capsys.readouterr().err.count("of the daemon") == 1
    finally:
        daemon.stop()
