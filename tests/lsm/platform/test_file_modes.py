"""Who may read what is made in a data directory: its owner and their group, whatever the umask of who made it."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import nosync
from nosync.lsm.errors import NosyncError
from nosync.lsm.platform.env import Env
from nosync.lsm.platform.file_pool import FilePool, new_file
from nosync.lsm.platform.layout import LOCK, MADE, PLACE_FILE, READY
from nosync.replication.daemon.config import DaemonConfig
from nosync.replication.daemon.daemon import Daemon
from nosync.replication.transport.daemon_files import ADDRESS_FILE
from nosync.replication.transport.sockets import SOCKET_FILE
from nosync.testing.daemon_cluster import eventually
from tests.conftest import OpenStore


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def wrong_in(root: Path) -> dict[str, str]:
    """Names with another mode than they should have. In the catalog RocksDB makes the files, which nobody else gets at."""
    found = {}
    for path in (root, *root.rglob("*")):
        if path.parent.name == "catalog":
            continue
        with contextlib.suppress(FileNotFoundError):  # files that are made ahead move on when they are ready
            expected = 0o750 if path.is_dir() else 0o640
            if mode_of(path) != expected:
                found[str(path.relative_to(root))] = oct(mode_of(path))
    return found


def test_data_directories_and_files(umask: int, open_store: OpenStore) -> None:
    store = open_store(settings=nosync.StoreSettings())
    for t in range(6):
        store.append("words", t=t, rows=pa.table({"k": range(9), "v": [t] * 9}), key=["k"])
        store.seal(t)
    store.pin("p", 1)
    store.node.create_branch("b", "main", 1)
    store.compact()
    store.sync()
    root = store.directory.root
    eventually("files are made ahead", lambda: any((root / READY / MADE).iterdir()))
    assert {path.name for path in root.iterdir()} >= {
        "catalog",
        "layers",
        "manifests",
        "pins",
        "branches",
        "NOSYNC",
        LOCK,
    }
    assert wrong_in(root) == {}


def test_a_daemons_directory(umask: int, tmp_path: Path) -> None:
    daemon = Daemon(DaemonConfig("n1", tmp_path / "data", "127.0.0.1:0", replicas=1))
    daemon.start()
    try:
        assert {path.name for path in daemon.config.data.iterdir()} >= {ADDRESS_FILE, PLACE_FILE}
        socket = daemon.config.data / SOCKET_FILE
        assert mode_of(socket) == 0o600, "the owner's alone"
        assert {name: mode for name, mode in wrong_in(daemon.config.data).items() if name != SOCKET_FILE} == {}
    finally:
        daemon.stop()


def test_a_directory_that_is_there_keeps_the_mode_its_owner_gave_it(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o2770)
    nosync.open(tmp_path / "shared").close()
    assert mode_of(tmp_path / "shared") == 0o2770
    assert mode_of(tmp_path / "shared" / "layers") == 0o2770, "what is made in it is of the same group, which may write"


def test_files_that_an_earlier_version_made_ahead_are_mended(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    FilePool(tmp_path, Env()).fill()
    for path in (tmp_path / READY / MADE).iterdir():
        path.chmod(0o644)
    with new_file(tmp_path, tmp_path / "tmp" / "x", Env()) as file:
        file.write(b"text")
    assert mode_of(tmp_path / "tmp" / "x") == 0o640


def test_publishing_into_a_file_made_ahead_sets_no_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    before = os.umask(0o077)
    try:
        FilePool(tmp_path, Env()).fill()
        monkeypatch.setattr(os, "fchmod", lambda *_: pytest.fail("the mode was set when it was made"))
        new_file(tmp_path, tmp_path / "tmp" / "x", Env()).close()
    finally:
        os.umask(before)


@pytest.mark.parametrize("kind", ["link", "fifo", "directory"])
def test_a_lock_that_is_no_regular_file_is_refused(open_store: OpenStore, tmp_path: Path, kind: str) -> None:
    """A link was followed, and its target truncated."""
    open_store().close()
    lock, target = tmp_path / "store" / LOCK, tmp_path / "precious"
    target.write_text("mine")
    lock.unlink()
    if kind == "link":
        lock.symlink_to(target)
    elif kind == "fifo":
        os.mkfifo(lock)
    else:
        lock.mkdir()
    with pytest.raises(NosyncError, match=r"LOCK.*no regular file"):
        open_store()
    assert target.read_text() == "mine"


def test_what_a_daemon_says_of_itself_is_written_through_no_link(tmp_path: Path) -> None:
    data, target = tmp_path / "data", tmp_path / "precious"
    nosync.open(data).close()
    target.write_text("mine")
    for name in ("daemon.new", "daemon.json", "place.new"):
        (data / name).symlink_to(target)
    daemon = Daemon(DaemonConfig("n1", data, "127.0.0.1:0", replicas=1))
    daemon.start()
    daemon.stop()
    assert target.read_text() == "mine"
