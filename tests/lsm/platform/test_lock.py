"""Who holds a directory, for how long, and what the others are told."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import operator
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import nosync
from nosync.lsm.manifests.catalog import Catalog
from nosync.lsm.node.node import Node
from nosync.lsm.platform import lock
from nosync.lsm.platform.lock import DirectoryLock
from nosync.replication.daemon import startup
from nosync.replication.daemon.config import DaemonConfig
from nosync.replication.daemon.daemon import Daemon

FORK = multiprocessing.get_context("fork")
ROWS = pa.table({"word": ["a"], "n": [1]})


def filled(root: Path, **options: Any) -> nosync.Store:
    store = nosync.open(root, **options)
    store.append("counts", t=0, rows=ROWS, key=["word"])
    store.seal(0)
    return store


def in_child(work: Callable[[], object]) -> str:
    """What a forked process says of it."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writing, str(work()).encode())
        except BaseException as error:  # noqa: BLE001 - it is what the child says
            os.write(writing, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as out:
        said = out.read().decode()
    os.waitpid(child, 0)
    return said


def opened_elsewhere(root: Path) -> str:
    """What another process gets that opens the directory: its error, or nothing."""
    code = "import sys, nosync\ntry: nosync.open(sys.argv[1], alone=True).close()\nexcept nosync.NosyncError as e: print(e)"
    done = subprocess.run([sys.executable, "-c", code, str(root)], check=True, capture_output=True, text=True)
    return done.stdout


def test_a_child_that_lives_on_does_not_keep_what_its_parent_closed(tmp_path: Path) -> None:
    store = filled(tmp_path / "s")
    go, gone = FORK.Event(), FORK.Event()

    def stay() -> None:
        gone.set()
        go.wait(60)

    child = FORK.Process(target=stay)
    child.start()
    try:
        assert gone.wait(60)
        store.close()
        assert opened_elsewhere(tmp_path / "s") == ""
        nosync.open(tmp_path / "s").close()
    finally:
        go.set()
        child.join()


def test_a_child_that_lives_on_does_not_keep_what_its_parent_died_with(tmp_path: Path) -> None:
    code = (
        "import os, sys, nosync\n"
        "nosync.open(sys.argv[1])\n"
        "if not os.fork(): print('here', flush=True); sys.stdin.read()\n"
        "os._exit(0)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "s")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdin is not None
        assert parent.stdout.readline() == b"here\n"
        assert parent.wait(60) == 0
        nosync.open(tmp_path / "s").close()
        parent.stdin.close()


def test_a_child_reads_and_leaves_the_rest_to_its_parent(tmp_path: Path) -> None:
    with filled(tmp_path / "s") as store:
        assert in_child(lambda: store.read("counts").num_rows) == "1"
        said = in_child(lambda: store.append("counts", t=1, rows=ROWS))
        assert said.startswith(
            f"StorageError: the store {tmp_path / 's'} is open in process {os.getpid()}, of which this"
        )
        assert in_child(store.close) == "None"
        assert f"process {os.getpid()}" in in_child(lambda: nosync.open(tmp_path / "s"))
        assert f"process {os.getpid()}" in opened_elsewhere(tmp_path / "s"), "a child that closed it gave nothing back"
        store.append("counts", t=1, rows=ROWS)
        store.seal(1)
    assert opened_elsewhere(tmp_path / "s") == ""


def test_a_catalog_that_cannot_be_closed_gives_the_directory_back(tmp_path: Path) -> None:
    """A full disk, as far as a limit on the size of files is one."""
    store = filled(tmp_path / "s")
    store.sync()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(nosync.StorageError, match="cannot close the catalog .*: File too large; it is not damaged"):
            store.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert opened_elsewhere(tmp_path / "s") == ""
    with nosync.open(tmp_path / "s") as again:
        assert again.read("counts").num_rows == 1


@pytest.mark.parametrize("part", ["parts.threads.stop", "parts.compactor.close", "_catalog.close"])
@pytest.mark.parametrize("end", ["close", "abandon"])
def test_whatever_fails_at_the_end_the_directory_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, end: str
) -> None:
    store = filled(tmp_path / "s")
    assert isinstance(store.node, Node)
    owner, _, name = part.rpartition(".")
    of = operator.attrgetter(owner)(store.node)
    whole = getattr(of, name)

    def fails() -> None:
        whole()
        raise OSError(errno.ENOSPC, "planted")

    monkeypatch.setattr(of, name, fails)
    with pytest.raises(OSError, match="planted"):
        getattr(store.node, end)()
    assert opened_elsewhere(tmp_path / "s") == ""


def test_a_second_one_in_a_process_is_told_what_to_do(tmp_path: Path) -> None:
    with nosync.open(tmp_path / "s") as store:  # this line is named
        line = sys._getframe().f_lineno - 1
        with pytest.raises(nosync.StoreLockedError) as raised:
            nosync.open(tmp_path / "s")
        assert f"is open in process {os.getpid()}, which is this one (at {__file__}:{line})" in str(raised.value)
        assert "go on with that store, or close it first" in str(raised.value)
        store.append("counts", t=0, rows=ROWS, key=["word"])
    nosync.open(tmp_path / "s").close()


def test_one_that_nothing_refers_to_is_closed_for_the_next(tmp_path: Path) -> None:
    """As where a cell of a notebook did not keep it, or was run again."""
    (tmp_path / "link").symlink_to(tmp_path / "s")
    filled(tmp_path / "s")
    store = nosync.open(tmp_path / "link")
    assert store.read("counts").num_rows == 1
    itself: list[object] = [store]
    itself.append(itself)  # garbage that only a collection finds
    del store, itself
    with nosync.open(tmp_path / "s") as store:
        assert store.last_sealed() == 0


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    nosync.open(tmp_path / "s").close()
    there = len(os.listdir("/proc/self/fd"))

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", refuse)
        with pytest.raises(nosync.StorageError, match=rf"cannot lock .*LOCK: {os.strerror(number)}; .*locks \(flock\)"):
            nosync.open(tmp_path / "s")
    assert len(os.listdir("/proc/self/fd")) == there
    nosync.open(tmp_path / "s").close()


def test_a_lock_whose_holder_cannot_be_written_is_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(lock.os, "pwrite", refuse)
        with pytest.raises(nosync.StorageError, match="the disk is full"):
            DirectoryLock(tmp_path)
    DirectoryLock(tmp_path).release()


def test_a_daemon_that_cannot_begin_gives_the_directory_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    config = DaemonConfig("n1", tmp_path / "s", "127.0.0.1:0", replicas=1)
    with monkeypatch.context() as patched:
        patched.setattr(startup, "temporary_path", refuse)
        with pytest.raises(nosync.StorageError, match="No space"):
            Daemon(config)
    assert opened_elsewhere(tmp_path / "s") == ""
    daemon = Daemon(config)
    daemon.start()
    monkeypatch.setattr(daemon.servers, "stop", refuse)
    with pytest.raises(OSError, match="No space"):
        daemon.stop()
    assert opened_elsewhere(tmp_path / "s") == ""


def test_a_process_without_descriptors_is_not_told_that_the_catalog_is_open(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "catalog")
    catalog.close()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    free = [number for number in range(3, max(used) + 12) if number not in used][:8]
    seen = set()
    for limit in free:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
        try:
            Catalog(tmp_path / "catalog").close()
        except nosync.NosyncError as error:
            seen.add((type(error), "raise `ulimit -n`" in str(error)))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert seen == {(nosync.StorageError, True)}


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("IO error: lock hold by current process, acquire time 1: /s/catalog/LOCK: No locks available", "Locked"),
        ("IO error: While lock file: /s/catalog/LOCK: Resource temporarily unavailable", "Locked"),
        ("IO error: While lock file: /s/catalog/LOCK: Permission denied", "Locked"),
        ("IO error: While lock file: /s/catalog/LOCK: No locks available", "Storage"),
        ("IO error: While lock file: /s/catalog/LOCK: Operation not supported", "Storage"),
        ("IO error: while open a file for lock: /s/catalog/LOCK: Permission denied", "Storage"),
        ("IO error: while open a file for lock: /s/catalog/LOCK: Too many open files", "Storage"),
        ("IO error: while open a file for lock: /s/catalog/LOCK: Too many open files in system", "Storage"),
        ("IO error: while open a file for lock: /s/catalog/LOCK: Is a directory", "Catalog"),
    ],
)
def test_what_rocksdb_says_of_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, error: str) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise Exception(said)

    monkeypatch.setattr("nosync.lsm.manifests.catalog.Rdict", refuse)
    expected = {"Locked": nosync.StoreLockedError, "Storage": nosync.StorageError, "Catalog": nosync.CatalogError}[
        error
    ]
    with pytest.raises(expected) as raised:
        Catalog(tmp_path / "catalog")
    assert ("open already" in str(raised.value)) == (error == "Locked")


@pytest.mark.parametrize("kind", ["link", "fifo", "directory"])
def test_a_lock_file_that_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    """Its target was truncated and overwritten once."""
    nosync.open(tmp_path / "s").close()
    lock, target = tmp_path / "s" / "LOCK", tmp_path / "precious"
    target.write_text("mine")
    lock.unlink()
    if kind == "link":
        lock.symlink_to(target)
    elif kind == "fifo":
        os.mkfifo(lock)
    else:
        lock.mkdir()
    with pytest.raises(nosync.StorageError, match="cannot lock .*and no regular file"):
        nosync.open(tmp_path / "s")
    assert target.read_text() == "mine"
