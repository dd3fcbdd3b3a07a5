"""Files of kept checkpoints are verified as all others are: the catalog has their digests."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest

import nosync
from nosync.cli import main
from nosync.lsm.node.node import Node
from nosync.lsm.store.backup import backup
from tests.conftest import OpenStore

FILE, OTHER = PurePosixPath("checkpoints/words/state/0/0/1.delta"), PurePosixPath("checkpoints/words/offsets/0")


@pytest.fixture
def store(open_store: OpenStore) -> nosync.Store:
    made = open_store(settings=nosync.StoreSettings(background=False))
    for path, data in ((FILE, b"state" * 1000), (OTHER, b"")):
        (made.directory.root / path).parent.mkdir(parents=True)
        (made.directory.root / path).write_bytes(data)
    assert isinstance(made.node, Node)
    made.node.parts.opaque.step()
    return made


def test_whole_files_are_counted(store: nosync.Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (store.verify().errors, store.verify().checkpoint_files) == ((), 2)
    assert backup(store.directory.root, tmp_path / "copy").checkpoint_files == 2
    store.close()
    main(["verify", str(store.directory.root)])
    assert "and 2 files of kept checkpoints" in capsys.readouterr().out


@pytest.mark.parametrize("how", ["flipped", "emptied", "deleted"])
def test_what_is_wrong_with_one_is_said(
    store: nosync.Store, how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = store.directory.root / FILE
    data = bytearray(path.read_bytes())
    if how == "flipped":
        data[777] ^= 1
    path.unlink() if how == "deleted" else path.write_bytes(b"" if how == "emptied" else data)
    (error,) = store.verify().errors
    assert error.startswith(f"{path}: ")
    assert "is gone" in error or "when it became durable: remove it, and peers" in error
    assert store.verify(untrusted=True).ok, "whose catalog is not asked"
    if how != "deleted":
        with pytest.raises(nosync.CorruptionError, match="the copy is not whole: .*1.delta"):
            backup(store.directory.root, tmp_path / "copy")
    store.close()
    with pytest.raises(SystemExit):
        main(["verify", str(store.directory.root)])
    assert "1.delta" in capsys.readouterr().err


def test_what_nobody_needs_any_more_is_not_missed(store: nosync.Store) -> None:
    assert isinstance(store.node, Node)
    store.node.parts.opaque.drop([FILE])
    assert (store.verify().errors, store.verify().checkpoint_files) == ((), 1)
