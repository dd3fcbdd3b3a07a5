"""One pass of copying a store that goes on, and restores of what is not as the log says."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pyarrow as pa
import pytest

import nosync
from nosync.replication.remote import restore as restoring
from nosync.replication.remote.bucket_store import connect_bucket
from nosync.replication.remote.cloud import open_bucket
from nosync.replication.remote.copying import copy_directory
from nosync.replication.remote.restore import restore
from nosync.replication.remote.settings import RemoteSettings
from nosync.replication.remote.status import bucket_status
from nosync.testing.simulated_bucket import Objects, SimulatedBucket
from tests.checkpoints.fake_query import FakeQuery
from tests.helpers.remotes import QUIET, Copies, epochs, rows_of

SETTINGS = RemoteSettings("memory://x", flush_bytes=2000)


class GoesOn:
    """A store that seals epochs and merges them while its packs are put."""

    def __init__(self, root: Path, retain: int | None, more: int) -> None:
        self.store = nosync.open(root, settings=dataclasses.replace(QUIET, retain=retain))
        epochs(self.store, range(10))
        self.store.compact()
        self.next, self.end, self.is_busy = 10, 10 + more, False

    def before(self, call: str, name: str) -> str:
        if call == "put" and "/packs/" in name and self.next < self.end and not self.is_busy:
            self.is_busy = True
            epochs(self.store, range(self.next, self.next + 3))
            self.next += 3
            self.store.compact()
            self.store.node.archive_manifests()
            self.store.sync()
            self.is_busy = False
        return ""


@pytest.mark.parametrize("retain", [None, 1])
@pytest.mark.parametrize("more", [3, 30])
def test_a_store_that_goes_on_is_copied_as_of_an_epoch(tmp_path: Path, retain: int | None, more: int) -> None:
    busy = GoesOn(tmp_path / "s", retain, more)
    bucket = SimulatedBucket(Objects(), busy.before)
    with busy.store:
        report = copy_directory(tmp_path / "s", bucket, SETTINGS)
        assert report.epoch is not None
        assert report.epoch >= 9
        assert restore(bucket, tmp_path / "x").epoch == report.epoch
        with nosync.open(tmp_path / "x", settings=QUIET) as found:
            last = report.epoch
            assert rows_of(found) == {**{f"a{t}": t for t in range(last + 1)}, "all": last}
        while busy.next < busy.end:
            busy.before("put", "/packs/")
        assert copy_directory(tmp_path / "s", bucket, SETTINGS).epoch == busy.next - 1
        again = copy_directory(tmp_path / "s", bucket, SETTINGS)
        assert (again.epoch, again.packs) == (busy.next - 1, 0)


def test_what_is_in_the_bucket_already_is_said(tmp_path: Path) -> None:
    """Everything was put by somebody who did not know that it is an epoch: nothing has to go, and the epoch is remotely safe."""
    bucket = SimulatedBucket(Objects())
    with nosync.open(tmp_path / "s", settings=QUIET) as store:
        epochs(store, range(3))
        copies = Copies(store, bucket)
        copies.push()
        uploader = copies.level._uploader
        assert uploader is not None
        uploader.writer.contents.reached = uploader.writer.acknowledged = type(uploader.writer.acknowledged)()
        copies.level._uploader.look_at_all()
        uploader.gather()
        assert uploader.has_something
        copies.push()
        assert copies.level.status().safe_point == 2


def test_a_pack_that_is_gone_is_told(tmp_path: Path) -> None:
    objects = Objects()
    bucket = SimulatedBucket(objects)
    with nosync.open(tmp_path / "s", settings=QUIET) as store:
        copies = Copies(store, bucket)
        for t in range(6):
            epochs(store, range(t, t + 1))
            copies.push()
        packs = sorted(name for name in objects.by_name if "/packs/" in name)
        del objects.by_name[packs[2]]
        report = restore(bucket, tmp_path / "x")
        assert report.epoch == 1
        assert report.problems == (f"memory://simulated/{packs[2]} is gone; what was put after it is not seen",)
        assert bucket_status(bucket).problems == report.problems
        with connect_bucket(bucket, None) as reader:
            assert reader.last_sealed() == 1
            assert list(reader.status().problems) == list(report.problems)


def test_a_restore_that_is_said_again_has_no_checkpoint_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In between, another query got the name."""
    bucket = SimulatedBucket(Objects())
    with nosync.open(tmp_path / "s", settings=QUIET) as store:
        copies = Copies(store, bucket)

        def keep(root: Path, batches: int, t: int) -> None:
            query = FakeQuery(root, "hdfs", snapshot_every=100)
            query.run(batches)
            shutil.rmtree(tmp_path / "s/checkpoints/words", ignore_errors=True)
            with nosync.checkpoints.watch(query.root, store=tmp_path / "s", name="words"):
                pass
            epochs(store, range(t, t + 1))
            for _ in range(2):
                copies.push()

        keep(tmp_path / "a", 6, 0)
        with monkeypatch.context() as patch:
            patch.setattr(restoring, "write_marker", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                restore(bucket, tmp_path / "x")
        keep(tmp_path / "b", 2, 1)
        for name in ("x", "fresh"):
            restore(bucket, tmp_path / name)
            status = nosync.checkpoint("words", store=tmp_path / name).status()
            assert [one.batch for one in status.batches] == [0, 1]


def test_a_pin_of_an_epoch_that_is_another_one_is_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bucket = SimulatedBucket(Objects())
    with nosync.open(tmp_path / "s", settings=QUIET) as store:
        epochs(store, range(8), "old")
        store.pin("early", 2)
        store.rewind(3, keep_as="kept")
        epochs(store, range(4, 8), "new")
        store.pin("release", 6)
        store.sync()
        Copies(store, bucket).push()
    restore(bucket, tmp_path / "x", branch="kept")
    with nosync.open(tmp_path / "x", settings=QUIET) as found:
        assert found.pins() == {"early": 2}
        assert "old6" in rows_of(found)
    assert "pin release is dropped: epoch 6 of main" in caplog.text


def test_copies_in_the_store_itself_are_refused(tmp_path: Path) -> None:
    root = tmp_path / "s"
    with nosync.open(root) as store:
        store.append("c", t=0, rows=pa.table({"k": [1]}), key=["k"])
        store.seal(0)
    for url in (f"file://{root}", f"file://{root}/copies", f"file://{root}/layers"):
        with pytest.raises(nosync.InvalidInputError, match="lies in the store that is to be copied"):
            copy_directory(root, open_bucket(url), RemoteSettings(url))
        with pytest.raises(nosync.InvalidInputError, match="lies in the store"):
            nosync.open(root, remote=url)
    with nosync.open(root) as store:
        assert store.verify().errors == ()
