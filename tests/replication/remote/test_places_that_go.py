"""Places of copies that are not there for a while, or are emptied: what was put elsewhere is no copy."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path

import pytest

import nosync
from nosync.lsm.errors import RemoteError
from nosync.lsm.store.opening import open_store as open_directory
from nosync.replication.remote import patient
from nosync.replication.remote.bucket import UnavailableError
from nosync.replication.remote.cloud import open_bucket
from nosync.replication.remote.fence import GoneError, check_claim, take_claim
from nosync.replication.remote.names import LogPosition
from nosync.replication.remote.restore import restore
from nosync.replication.remote.stub_env import StubEnv
from nosync.testing.simulated_bucket import Objects, SimulatedBucket
from tests.checkpoints.fake_query import FakeQuery
from tests.conftest import OpenStore
from tests.helpers.remotes import NAMES, QUIET, Copies, epochs, open_quiet, rows_of


class Mount:
    """A directory that is unmounted and mounted: an empty one has its name meanwhile."""

    def __init__(self, root: Path, *, leaves: str = "") -> None:
        """`leaves`: what is below the mount point on the disk of the host."""
        self.point, self._away, self._below, self._leaves = root / "mnt", root / "disk", root / "below", leaves
        self.point.mkdir()
        self.url = f"file://{self.point}/copies"

    def unmount(self) -> None:
        self.point.rename(self._away)
        (self.point / self._leaves).mkdir(parents=True)

    def mount(self) -> None:
        self.point.rename(self._below)
        self._away.rename(self.point)

    def was_written_below(self) -> bool:
        return any(path.is_file() for path in self._below.rglob("*"))


@pytest.mark.parametrize("leaves", ["", "copies"])
def test_a_directory_that_is_unmounted_for_a_while(open_store: OpenStore, tmp_path: Path, leaves: str) -> None:
    mount, store = Mount(tmp_path, leaves=leaves), open_quiet(open_store)
    copies = Copies(store, open_bucket(mount.url))
    epochs(store, range(3))
    copies.push()
    mount.unmount()
    for t in range(3, 6):
        epochs(store, range(t, t + 1))
        copies.level.step_now()
        status = copies.level.status()
        assert status.safe_point == 2
        assert "mount it" in status.problem
    mount.mount()
    for _ in range(3):
        copies.level.step_now()
    assert copies.level.status().safe_point == 5
    assert not mount.was_written_below() or leaves
    assert restore(open_bucket(mount.url, to_read=True), tmp_path / "restored").epoch == 5
    with open_store("restored", settings=QUIET) as restored:
        assert rows_of(restored) == rows_of(store)


def test_a_directory_that_is_not_mounted_when_the_store_opens(open_store: OpenStore, tmp_path: Path) -> None:
    mount = Mount(tmp_path)
    with open_quiet(open_store) as store:
        epochs(store, range(3))
        Copies(store, open_bucket(mount.url)).push()
    mount.unmount()
    store = open_quiet(open_store)
    copies = Copies(store, open_bucket(mount.url))
    epochs(store, range(3, 5))
    copies.level.step_now()
    assert copies.level.status().safe_point is None
    assert "are gone" in copies.level.status().problem
    mount.mount()
    for _ in range(3):
        copies.level.step_now()
    assert (copies.level.status().safe_point, copies.level.status().problem) == (4, "")


@pytest.mark.parametrize("then", ["goes on", "opens again"])
def test_a_prefix_that_was_emptied_has_no_copies(open_store: OpenStore, then: str) -> None:
    objects = Objects()
    store = open_quiet(open_store)
    copies = Copies(store, SimulatedBucket(objects))
    epochs(store, range(3))
    copies.push()
    objects.by_name.clear()
    if then == "opens again":
        store.close()
        store = open_quiet(open_store)
        copies = Copies(store, SimulatedBucket(objects))
    epochs(store, range(3, 5))
    for _ in range(3):
        copies.level.step_now()
    status = copies.level.status()
    assert status.safe_point == (2 if then == "goes on" else None)
    assert "give another one" in status.problem
    elsewhere = SimulatedBucket()
    elsewhere.url = "memory://elsewhere"
    other = Copies(store, elsewhere)
    other.push()
    assert other.level.status().safe_point == 4


def test_a_claim_that_is_gone_fences_and_its_number_is_not_used_again(open_store: OpenStore) -> None:
    objects = Objects()
    bucket, store = SimulatedBucket(objects), open_quiet(open_store)
    copies = Copies(store, bucket)
    epochs(store, range(3))
    copies.push()
    assert copies.level._uploader is not None
    mine, marker = copies.level._uploader.writer.claim, copies.level._source.marker
    check_claim(bucket, NAMES, mine)
    del objects.by_name[NAMES.claim(mine.number)]  # by a rule that deletes what is old
    with pytest.raises(GoneError, match="are gone"):
        check_claim(bucket, NAMES, mine)
    assert NAMES.pack(LogPosition(mine.number, 1)) in objects.by_name
    again = take_claim(bucket, NAMES, marker, mine.incarnation, "t", "host")
    assert again.number == mine.number + 1
    with pytest.raises(RemoteError):
        check_claim(bucket, NAMES, mine)


def test_an_object_counts_when_its_directory_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket, synced, fails = open_bucket(f"file://{tmp_path}/bucket"), [], [1]
    sync = os.fsync

    def fsync(fd: int) -> None:
        is_directory = stat.S_ISDIR(os.fstat(fd).st_mode)
        synced.append(is_directory)
        if is_directory and fails:
            fails.pop()
            raise OSError(errno.EIO, "Input/output error")
        sync(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(UnavailableError, match="Input/output error"):
        bucket.put_new("nodes/n/packs/1.pack", b"x")
    synced.clear()
    assert not bucket.put_new("nodes/n/packs/1.pack", b"x")
    assert synced == [False, True, True, True, True]


def test_a_file_system_without_hard_links_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(source: object, target: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    bucket = open_bucket(f"file://{tmp_path}/bucket")
    monkeypatch.setattr(os, "link", link)
    with pytest.raises(RemoteError, match="has no hard links"):
        bucket.put_new("a", b"x")
    assert not any(path.is_file() for path in (tmp_path / "bucket").rglob("*"))


def test_what_the_first_bucket_does_not_give_is_not_called_copied(
    open_store: OpenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patient, "_PAUSE_S", 0.0)
    objects, away = Objects(), [True]
    with open_quiet(open_store) as store:
        epochs(store, range(4))
        Copies(store, SimulatedBucket(objects)).push()
    restore(SimulatedBucket(objects), tmp_path / "lazy", lazy=True)
    first = SimulatedBucket(objects, lambda call, name: "before" if away else "")
    with open_directory(tmp_path / "lazy", settings=QUIET, env=StubEnv(tmp_path / "lazy", first)) as lazy:
        copies = Copies(lazy, SimulatedBucket())
        assert not copies.level.push(0.2)
        assert "not copied yet" in copies.level.status().problem
        away.clear()
        copies.push()
        assert (copies.level.status().safe_point, copies.level.status().problem) == (3, "")


def test_the_copies_of_a_checkpoint_stay_when_the_disk_with_it_is_lost(open_store: OpenStore, tmp_path: Path) -> None:
    """Peers fill the node that comes in its place, and none of them keeps the checkpoint."""
    objects = Objects()
    with open_quiet(open_store) as store:
        epochs(store, range(3))
        shutil.copytree(store.directory.root, tmp_path / "peer")
        query = FakeQuery(tmp_path / "ck", "hdfs")
        query.run(4)
        with nosync.checkpoints.watch(query.root, store=store.directory.root, name="words"):
            pass
        store.sync()
        Copies(store, SimulatedBucket(objects), "n1").push()
    shutil.rmtree(store.directory.root)
    shutil.rmtree(tmp_path / "peer" / "catalog")
    with open_store("peer", settings=QUIET) as filled:
        copies = Copies(filled, SimulatedBucket(objects), "n1")
        for t in range(3, 6):
            epochs(filled, range(t, t + 1))
            copies.push()
    report = restore(SimulatedBucket(objects), tmp_path / "restored")
    assert report.epoch == 5
    kept = [path for path in (tmp_path / "restored" / "checkpoints" / "words").rglob("*") if path.is_file()]
    assert len(kept) > 10


def test_a_copy_without_an_interval_does_not_spin(open_store: OpenStore) -> None:
    assert Copies(open_quiet(open_store), SimulatedBucket(), flush_s=0.0).level._tick_s >= 0.01
