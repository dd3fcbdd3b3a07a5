"""Keys that `nosync certs` makes and finds: nobody else reads them, and nothing is written through a link."""

from __future__ import annotations

import datetime
import os
import stat
from pathlib import Path

import pytest
from cryptography import x509

from nosync.cli import main
from nosync.lsm.errors import ReplicationError
from nosync.replication.transport.certs import make_certificates


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_an_authority_signs_nothing_that_outlives_it(tmp_path: Path) -> None:
    now = datetime.datetime.now(datetime.UTC)
    make_certificates(tmp_path, ["n1"], now=now - datetime.timedelta(days=800))
    make_certificates(tmp_path, ["n2"])
    ends = [
        x509.load_pem_x509_certificate((tmp_path / name).read_bytes()).not_valid_after_utc
        for name in ("ca.pem", "n1.pem", "n2.pem")
    ]
    assert ends[0] == ends[1] == ends[2]
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ReplicationError, match="the authority has expired on .*Make a new one in an empty directory"):
        make_certificates(tmp_path, ["n1"], now=now + datetime.timedelta(days=26))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077], ids=oct)
def test_modes_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        make_certificates(tmp_path / "tls", ["n1"])
    finally:
        os.umask(before)
    assert {path.name: oct(mode_of(path)) for path in (tmp_path / "tls").iterdir()} == {
        "ca.key": "0o600", "n1.key": "0o600", "ca.pem": "0o644", "n1.pem": "0o644",
    }  # fmt: skip
    assert mode_of(tmp_path / "tls") == 0o700


def test_modes_of_keys_that_exist_are_mended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tls = tmp_path / "tls"
    make_certificates(tls, ["n1", "n2", "n3"])
    for name, mode in {"ca.key": 0o644, "n1.key": 0o666, "n2.key": 0o640, "n3.key": 0o600}.items():
        (tls / name).chmod(mode)
    capsys.readouterr()
    main(["certs", str(tls), "n4"])
    shown = capsys.readouterr().out
    assert {name: oct(mode_of(tls / name)) for name in ("ca.key", "n1.key", "n2.key", "n3.key")} == {
        "ca.key": "0o600", "n1.key": "0o640", "n2.key": "0o640", "n3.key": "0o600",
    }  # fmt: skip
    assert "ca.key was readable by others (mode 644)" in shown
    assert "n1.key was readable by others (mode 666)" in shown
    assert "n2.key was" not in shown


@pytest.mark.parametrize("name", ["n1.key", "n1.pem"])
@pytest.mark.parametrize("is_there", [True, False])
def test_nothing_is_written_through_a_link(tmp_path: Path, name: str, is_there: bool) -> None:
    tls, target = tmp_path / "tls", tmp_path / "target"
    make_certificates(tls, ["n2"])
    if is_there:
        target.write_text("precious")
    (tls / name).symlink_to(target)
    with pytest.raises(ReplicationError, match=rf"{name} is a symbolic link"):
        make_certificates(tls, ["n1"])
    assert (target.read_text() == "precious") if is_there else not target.exists()
    assert not (tls / ("n1.pem" if name == "n1.key" else "n1.key")).exists(), "half a pair is of no use"


def test_an_authority_is_not_written_through_links_to_nowhere(tmp_path: Path) -> None:
    tls = tmp_path / "tls"
    tls.mkdir()
    for name in ("ca.key", "ca.pem"):
        (tls / name).symlink_to(tmp_path / f"stolen-{name}")
    with pytest.raises(ReplicationError, match=r"ca\.key is a symbolic link"):
        make_certificates(tls, ["n1"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tls"]


def test_a_key_is_renewed_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_certificates(tmp_path, ["n1"])
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(Exception, match="No space left"):
        make_certificates(tmp_path, ["n1"])
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
