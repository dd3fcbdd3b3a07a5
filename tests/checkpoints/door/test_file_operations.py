"""The files of a checkpoint as its query sees them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import BinaryIO

import pytest

from nosync.checkpoints.door.file_operations import FileOperations
from nosync.checkpoints.door.remote_errors import RemoteError
from nosync.lsm.platform.env import Env


class Checkpoint:
    def __init__(self, root: Path, env: Env | None = None) -> None:
        self.root, self.writing = root / "live", root / "writing"
        self.root.mkdir()
        self.writing.mkdir()
        self.published: list[str] = []
        self.files = FileOperations(self.root, self.writing, env or Env(), self.published.append)

    def create(self, path: str, data: bytes = b"", *, may_overwrite: bool = False) -> None:
        with self.files.create(path, may_overwrite=may_overwrite) as file:
            file.write(data)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return Checkpoint(tmp_path)


def kind(refused: pytest.ExceptionInfo[RemoteError]) -> str:
    return refused.value.java_class.rpartition(".")[2]


def test_a_file_has_its_name_when_it_is_whole(checkpoint: Checkpoint) -> None:
    with checkpoint.files.create("state/0/0/1.delta", may_overwrite=False) as file:
        file.write(b"half")
        assert not (checkpoint.root / "state/0/0/1.delta").exists()
    assert (checkpoint.root / "state/0/0/1.delta").read_bytes() == b"half"
    assert checkpoint.published == ["state/0/0/1.delta"]
    assert list(checkpoint.writing.iterdir()) == []


def test_half_a_file_leaves_nothing(checkpoint: Checkpoint) -> None:
    def die() -> None:
        with checkpoint.files.create("a/b", may_overwrite=True) as file:
            file.write(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        die()
    assert [*checkpoint.root.iterdir(), *checkpoint.writing.iterdir(), *checkpoint.published] == []


def test_a_name_is_given_once(checkpoint: Checkpoint) -> None:
    checkpoint.create("x", b"first")
    with pytest.raises(RemoteError) as refused:
        checkpoint.create("x", b"second")
    assert kind(refused) == "FileAlreadyExistsException"
    checkpoint.create(".x.tmp", b"third")
    with pytest.raises(RemoteError) as refused:
        checkpoint.files.rename(".x.tmp", "x", may_overwrite=False)
    assert kind(refused) == "FileAlreadyExistsException"
    assert (checkpoint.root / "x").read_bytes() == b"first"
    assert (checkpoint.root / ".x.tmp").read_bytes() == b"third"
    assert checkpoint.published == ["x", ".x.tmp"]


def test_overwriting_leaves_the_file_that_others_have_links_to(checkpoint: Checkpoint, tmp_path: Path) -> None:
    checkpoint.create("x", b"first")
    os.link(checkpoint.root / "x", tmp_path / "kept")
    checkpoint.create("x", b"second", may_overwrite=True)
    checkpoint.create(".y", b"third")
    assert (checkpoint.root / "x").read_bytes() == b"second"
    checkpoint.files.rename(".y", "x", may_overwrite=True)
    assert (checkpoint.root / "x").read_bytes() == b"third"
    assert (tmp_path / "kept").read_bytes() == b"first"


def test_renaming_what_is_not_there_or_to_nowhere(checkpoint: Checkpoint) -> None:
    checkpoint.create("x")
    for source, target in (("nothing", "y"), ("x", "no/such/directory")):
        with pytest.raises(RemoteError) as refused:
            checkpoint.files.rename(source, target, may_overwrite=False)
        assert kind(refused) == "FileNotFoundException"
    checkpoint.files.make_dirs("d")
    with pytest.raises(RemoteError, match="is a directory"):
        checkpoint.files.rename("d", "e", may_overwrite=False)
    with pytest.raises(RemoteError):
        checkpoint.files.rename("x", "d", may_overwrite=True)
    assert (checkpoint.root / "x").exists()


def test_statuses_and_lists(checkpoint: Checkpoint) -> None:
    checkpoint.create("d/x", b"12345")
    checkpoint.files.make_dirs("d/e")
    found = {one["pathSuffix"]: (one["type"], one["length"]) for one in checkpoint.files.list("d")}
    assert found == {"x": ("FILE", 5), "e": ("DIRECTORY", 0)}
    assert [one["length"] for one in checkpoint.files.list("d/x")] == [5]
    assert checkpoint.files.status("")["type"] == "DIRECTORY"
    (checkpoint.root / ".door").mkdir()  # what the door has to know of it
    assert [one["pathSuffix"] for one in checkpoint.files.list("")] == ["d"]
    for path in ("nothing", "d/nothing", "no/thing"):
        with pytest.raises(RemoteError) as refused:
            checkpoint.files.status(path)
        assert kind(refused) == "FileNotFoundException"


def test_a_file_is_no_directory(checkpoint: Checkpoint) -> None:
    checkpoint.create("x")
    with pytest.raises(RemoteError) as refused:
        checkpoint.files.make_dirs("x")
    assert kind(refused) == "FileAlreadyExistsException"
    with pytest.raises(RemoteError) as refused:
        checkpoint.create("x/y")
    assert kind(refused) == "ParentNotDirectoryException"
    with pytest.raises(RemoteError) as refused:
        checkpoint.files.open("")
    assert kind(refused) == "AccessControlException"
    assert not checkpoint.files.delete("x/y", is_recursive=True)


def test_removing(checkpoint: Checkpoint) -> None:
    checkpoint.create("d/e/x")
    assert not checkpoint.files.delete("nothing", is_recursive=True)
    with pytest.raises(RemoteError) as refused:
        checkpoint.files.delete("d", is_recursive=False)
    assert kind(refused) == "PathIsNotEmptyDirectoryException"
    assert checkpoint.files.delete("d", is_recursive=True)
    assert list(checkpoint.root.iterdir()) == []


def test_links_are_not_followed(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "x").write_text("secret")
    (checkpoint.root / "link").symlink_to(tmp_path / "outside")
    (checkpoint.root / "file").symlink_to(tmp_path / "outside" / "x")
    os.mkfifo(checkpoint.root / "fifo")
    checkpoint.create("mine")
    for path in ("link", "link/x", "file", "fifo"):
        for operation in (
            checkpoint.files.status,
            checkpoint.files.list,
            checkpoint.files.open,
            lambda path: checkpoint.files.delete(path, is_recursive=True),
            lambda path: checkpoint.files.make_dirs(f"{path}/d"),
            lambda path: checkpoint.create(f"{path}", b"mine", may_overwrite=True),
            lambda path: checkpoint.files.rename("mine", path, may_overwrite=True),
            lambda path: checkpoint.files.rename(path, "mine", may_overwrite=True),
        ):
            with pytest.raises(RemoteError) as refused:
                operation(path)
            assert kind(refused) == "AccessControlException"
    assert (tmp_path / "outside" / "x").read_text() == "secret"
    assert [one["pathSuffix"] for one in checkpoint.files.list("")] == ["mine"]
    (checkpoint.root / "d").mkdir()
    (checkpoint.root / "d" / "link").symlink_to(tmp_path / "outside")
    assert checkpoint.files.delete("d", is_recursive=True)
    assert (tmp_path / "outside" / "x").exists()


class FullDisk(Env):
    def create(self, path: Path) -> BinaryIO:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, FullDisk())
    with pytest.raises(RemoteError, match="the disk is full") as refused:
        checkpoint.create("x")
    assert (kind(refused), refused.value.status) == ("IOException", 500)
