"""Files that the node makes ahead: one process takes each, and nothing is written to a file that is something else,
too.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path

import pyarrow as pa
import pytest

import nosync
from nosync.lsm.platform.env import Env
from nosync.lsm.platform.file_pool import FEWEST, FilePool, new_file
from nosync.lsm.platform.layout import MADE, MAKING, READY
from nosync.testing import FaultyEnv, crash
from nosync.testing.daemon_cluster import eventually
from tests.conftest import OpenStore
from tests.helpers.stores import filled, snapshot, words


def made_in(root: Path) -> list[Path]:
    return sorted((root / READY / MADE).iterdir())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory with some that are ready."""
    (tmp_path / "tmp").mkdir()
    FilePool(tmp_path, Env()).fill()
    return tmp_path


def write(root: Path, text: bytes, name: str = "mine") -> Path:
    with new_file(root, root / "tmp" / name, Env()) as file:
        file.write(text)
    return root / "tmp" / name


def test_what_is_published_beside_a_node_goes_to_files_made_ahead(open_store: OpenStore) -> None:
    store = open_store(settings=nosync.StoreSettings())
    store.append("counts", t=0, rows=words(a=1), key=["word"])
    store.seal(0)
    store.sync()  # the node itself takes some for what it writes after a seal
    root = store.directory.root
    eventually("all are ready", lambda: len(made_in(root)) == FEWEST)
    ready = {path.stat().st_ino for path in made_in(root)}
    store.append("counts", t=1, rows=words(a=2))
    (layer,) = [layer.path for layer in store.layers() if layer.lower == 1]
    assert Path(layer).stat().st_ino in ready
    store.sync()
    eventually("all are ready again", lambda: len(made_in(root)) == FEWEST)
    ready = {path.stat().st_ino for path in made_in(root)}
    store.seal(1)
    assert (root / "manifests" / "main" / "1.json").stat().st_ino in ready
    assert store.verify().ok


def test_what_the_node_itself_takes_is_made_again(open_store: OpenStore) -> None:
    store = open_store(settings=nosync.StoreSettings(scan_interval_s=0.05))
    store.append("counts", t=0, rows=words(a=1), key=["word"])
    store.seal(0)
    store.sync()  # the node itself takes some for what it writes after a seal
    root = store.directory.root
    eventually("all are ready", lambda: len(made_in(root)) == FEWEST)
    made_in(root)[0].unlink()  # as if it had written when an epoch was sealed, long after it made the last one
    eventually("all are ready again", lambda: len(made_in(root)) == FEWEST)


def test_publishing_makes_no_file_where_one_is_ready(open_store: OpenStore) -> None:
    env = FaultyEnv()
    store = filled(open_store, env=env)
    FilePool(store.directory.root, env).fill()
    before = len(made_in(store.directory.root))
    env.calls.clear()
    store.append("counts", t=4, rows=words(x=1))
    assert [operation for operation, _ in env.calls] == ["replace", "open_to_write", "link", "unlink"]
    assert len(made_in(store.directory.root)) == before - 1


def test_where_none_is_ready_the_file_is_made(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    assert write(tmp_path, b"text").read_bytes() == b"text"


def test_each_is_taken_once(root: Path) -> None:
    """Eight that publish at once, and a node that makes more meanwhile."""
    ready = FilePool(root, Env())
    files, each = 8, 100

    def take(who: int) -> None:
        for i in range(each):
            write(root, f"{who} {i}".encode(), f"{who}-{i}")

    threads = [threading.Thread(target=take, args=(who,)) for who in range(files)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        ready.fill()
    written = {path.name: path for path in (root / "tmp").iterdir()}
    assert len(written) == files * each
    assert all(path.read_text() == name.replace("-", " ") for name, path in written.items())
    assert len({path.stat().st_ino for path in written.values()}) == files * each


def test_twice_as_many_are_made_whenever_all_were_taken(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    ready = FilePool(tmp_path, Env())
    ready.fill()
    first = len(made_in(tmp_path))
    assert first > 1
    write(tmp_path, b"one")
    ready.fill()
    assert len(made_in(tmp_path)) == first
    for i in range(first):
        write(tmp_path, b"all", str(i))
    ready.fill()
    assert len(made_in(tmp_path)) == 2 * first


def test_one_that_is_not_empty_is_not_written_to(root: Path) -> None:
    """What is shorter than it would end in the rest of it."""
    for path in made_in(root):
        path.write_bytes(b"something much longer")
    assert write(root, b"short").read_bytes() == b"short"
    assert not made_in(root)


def test_one_that_has_another_name_is_not_written_to(root: Path, tmp_path: Path) -> None:
    others = [tmp_path / path.name for path in made_in(root)]
    for other in others:
        os.link(root / READY / MADE / other.name, other)
    assert write(root, b"mine").read_bytes() == b"mine"
    assert [other.read_bytes() for other in others] == [b""] * FEWEST


def test_where_they_cannot_be_written_to_files_are_made(open_store: OpenStore) -> None:
    env = FaultyEnv()
    store = filled(open_store, env=env)
    FilePool(store.directory.root, env).fill()
    env.fail("open_to_write", errno.EACCES, times=10**9)
    store.append("counts", t=4, rows=words(x=1))
    store.seal(4)
    assert store.verify().ok
    assert not list((store.directory.root / "tmp").iterdir())


def test_where_they_cannot_be_listed_files_are_made(open_store: OpenStore) -> None:
    env = FaultyEnv()
    store = filled(open_store, env=env)
    FilePool(store.directory.root, env).fill()
    env.fail("list_dir", errno.EACCES, times=10**9, matches=lambda path: path.name == MADE)
    store.append("counts", t=4, rows=words(x=1))
    store.seal(4)
    assert store.verify().ok


def test_what_a_node_left_half_made_goes(root: Path) -> None:
    left = root / READY / MAKING / "left"
    left.touch()
    FilePool(root, Env()).fill()
    assert not left.exists()


def test_two_copies_of_a_store_do_not_write_to_one_file(open_store: OpenStore, tmp_path: Path) -> None:
    """A copy made of hard links (`cp -al`) has the same files ready."""
    first = filled(open_store)
    FilePool(first.directory.root, Env()).fill()
    first.close()
    shutil.copytree(tmp_path / "store", tmp_path / "copy", copy_function=os.link)
    (tmp_path / "copy" / "LOCK").unlink()  # or one of the two could be open
    first, second = open_store(), open_store("copy")
    for i in range(len(made_in(tmp_path / "store"))):
        first.append("counts", t=4 + i, rows=words(x=i, y=i))
        second.append("counts", t=4 + i, rows=words(z=-i))
        first.seal(4 + i)
        second.seal(4 + i)
    assert first.verify().ok
    assert second.verify().ok


def test_a_name_that_a_power_cut_brings_back_is_of_a_file_that_is_published(open_store: OpenStore) -> None:
    env = FaultyEnv()
    store = filled(open_store, env=env)
    FilePool(store.directory.root, env).fill()
    store.append("counts", t=4, rows=words(x=1))
    store.seal(4)
    store.sync()
    before = snapshot(store)
    root = store.directory.root
    known = set(made_in(root))
    crash(store)
    env.lose_power(root, lambda n: n - 1)
    back = set(made_in(root)) - known
    assert back
    again = open_store(env=env)
    assert snapshot(again) == before
    t = 5
    while back & set(made_in(root)):
        again.append("counts", t=t, rows=words(x=t))
        again.seal(t)
        t += 1
    assert again.verify().ok
    assert snapshot(again)[:5] == before


def test_a_disk_that_has_no_room_for_more_is_told_of(open_store: OpenStore) -> None:
    env = FaultyEnv()
    store = open_store(env=env, settings=nosync.StoreSettings())
    env.fail("create", errno.ENOSPC, times=10**9, matches=lambda path: READY in path.parts)
    store.append("counts", t=0, rows=words(a=1), key=["word"])
    store.seal(0)
    eventually("it is said", lambda: any("disk is full" in text for text in store.status().problems.values()))
    ready = store.directory.root / READY
    ready.rename(ready.parent.with_name("gone"))  # at once: the node goes on making directories while these are removed
    env.faults.clear()
    eventually("all is well by itself", lambda: not store.status().problems)
    assert len(made_in(store.directory.root)) == FEWEST


@pytest.mark.parametrize("are_ready", [False, True])
def test_a_directory_for_what_is_being_written_may_be_cleaned_away(open_store: OpenStore, are_ready: bool) -> None:
    """As a cleaner of old files does: who writes makes it again, and makes no store where one was moved away."""
    store = open_store(env=Env())
    root = store.directory.root

    def gone() -> None:
        shutil.rmtree(root / "tmp", ignore_errors=True)
        if are_ready:
            FilePool(root, Env()).fill()

    for t in range(3):
        gone()
        store.append("counts", t=t, rows=pa.table({"k": [t]}), key=["k"])
        gone()
        store.seal(t)
    gone()
    store.pin("p", 1)
    gone()
    assert store.compact() == 1
    assert store.read("counts").num_rows == 3
    assert store.verify().errors == ()
    root.rename(root.with_name("away"))
    with pytest.raises(nosync.StorageError, match="No such file"):
        store.append("counts", t=3, rows=pa.table({"k": [3]}))
    assert not root.exists()
    root.with_name("away").rename(root)
