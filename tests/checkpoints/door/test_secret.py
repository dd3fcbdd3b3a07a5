"""The secret of a door: made once, for its owner alone."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from nosync.checkpoints.door.secret import is_same, read_or_make_secret
from nosync.lsm.errors import CorruptionError, StorageError
from nosync.lsm.platform.env import Env


def test_made_once(tmp_path: Path) -> None:
    secret = read_or_make_secret(tmp_path, Env())
    assert read_or_make_secret(tmp_path, Env()) == secret
    assert len(secret) == 48
    assert stat.S_IMODE((tmp_path / "checkpoint-secret").stat().st_mode) == 0o600
    assert list((tmp_path / "tmp").iterdir()) == []


class Quicker(Env):
    """Lets another process make the secret first."""

    def link(self, source: Path, target: Path) -> None:
        target.write_text("ab" * 20)
        super().link(source, target)


def test_the_first_one_counts(tmp_path: Path) -> None:
    assert read_or_make_secret(tmp_path, Quicker()) == "ab" * 20


@pytest.mark.parametrize("text", ["", "short", "../../etc/passwd", "g" * 48, "a" * 31, "a" * 200])
def test_what_is_no_secret(tmp_path: Path, text: str) -> None:
    (tmp_path / "checkpoint-secret").write_text(text)
    with pytest.raises(CorruptionError, match="remove it, and another is made"):
        read_or_make_secret(tmp_path, Env())


def test_a_link_is_no_secret(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("ab" * 20)
    (tmp_path / "checkpoint-secret").symlink_to(tmp_path / "elsewhere")
    with pytest.raises((StorageError, CorruptionError)):
        read_or_make_secret(tmp_path, Env())


def test_comparing() -> None:
    assert is_same(b"ab" * 20, "ab" * 20)
    for said in (b"", b"ab" * 19, b"ab" * 21, b"AB" * 20, "ä".encode() * 20):
        assert not is_same(said, "ab" * 20)


def test_a_secret_that_others_could_read_is_closed_to_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    secret, path = read_or_make_secret(tmp_path, Env()), tmp_path / "checkpoint-secret"
    path.chmod(0o644)
    assert read_or_make_secret(tmp_path, Env()) == secret
    assert path.stat().st_mode & 0o777 == 0o600
    assert "could be read by others" in caplog.text
    caplog.clear()
    read_or_make_secret(tmp_path, Env())
    assert not caplog.text
