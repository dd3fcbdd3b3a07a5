"""A store that is lost comes back out of a bucket: whole, as of its newest remotely safe epoch or an earlier one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pytest

import nosync
from nosync.lsm.errors import CompactedError, CorruptionError, InvalidInputError, RemoteError
from nosync.lsm.platform.layout import RESTORING
from nosync.lsm.store.repair import Repair
from nosync.replication.remote.bucket import Bucket, UnavailableError
from nosync.replication.remote.copying import copy_directory
from nosync.replication.remote.restore import restore
from nosync.replication.remote.settings import RemoteSettings
from nosync.replication.remote.status import bucket_status
from nosync.testing.simulated_bucket import Fault, Objects, SimulatedBucket
from tests.conftest import OpenStore
from tests.helpers.remotes import QUIET, Copies, epochs, files_below, rows_of

SETTINGS = RemoteSettings("memory://test", flush_bytes=3000, large_bytes=2000)


def is_of_store(name: str) -> bool:
    return name.startswith(("layers/", "manifests/", "branches/", "pins/", "jobs/", "sinks/", "checkpoints/", "NOSYNC"))


@pytest.fixture
def made(open_store: OpenStore, bucket: Bucket) -> tuple[nosync.Store, Bucket]:
    """A store of ten epochs with a branch and a pin, copied."""
    store = open_store("original", settings=QUIET)
    copies = Copies(store, bucket, flush_bytes=3000, large_bytes=2000)
    rows = pa.table({"k": [f"big{i}" for i in range(500)], "n": list(range(500))})
    store.append("big", t=0, rows=rows, key=["k"])
    for t in range(8):
        if t:
            store.append("big", t=t, rows=rows.slice(0, 0), key=["k"])
        store.append("counts", t=t, rows=pa.table({"k": [f"a{t}", "all"], "n": [t, t]}), key=["k"])
        store.seal(t)
        store.sync()
        copies.step()
    store.pin("five", 5)
    store.rewind(6, keep_as="before")
    store.append("big", t=7, rows=rows.slice(0, 0), key=["k"])
    store.append("counts", t=7, rows=pa.table({"k": ["b7", "all"], "n": [70, 70]}), key=["k"])
    store.seal(7)
    store.sync()
    copies.push()
    return store, bucket


def test_a_restored_directory_reads_as_the_original_and_goes_on(
    made: tuple[nosync.Store, Bucket], tmp_path: Path, open_store: OpenStore
) -> None:
    store, bucket = made
    seen: list[tuple[int, int]] = []
    report = restore(bucket, tmp_path / "new", progress=lambda done, of: seen.append((done, of)))
    assert (report.epoch, report.branches) == (7, {"main": 7, "before": 7})
    assert seen[-1][0] == seen[-1][1] == report.bytes
    assert seen == sorted(seen)
    new = open_store("new", settings=QUIET)
    for t in range(8):
        for branch in ("main", "before"):
            assert rows_of(new, as_of=t, branch=branch) == rows_of(store, as_of=t, branch=branch)
            assert rows_of(new, "big", as_of=t, branch=branch) == rows_of(store, "big", as_of=t, branch=branch)
    assert new.pins() == {"five": 5}
    assert new.missing() == []
    assert new.verify().ok
    assert (new.last_sealed(), new.safe_point()) == (7, 7)
    new.append("big", t=8, rows=pa.table({"k": ["new"], "n": [1]}), key=["k"])
    new.append("counts", t=8, rows=pa.table({"k": ["new"], "n": [1]}), key=["k"])
    new.seal(8)
    assert rows_of(new)["new"] == 1
    copies = Copies(new, bucket)  # and its copies go on in the same place
    new.sync()
    copies.push()
    assert bucket_status(bucket).branches == {"main": 8, "before": 7}


def test_every_file_is_the_original_one(made: tuple[nosync.Store, Bucket], tmp_path: Path) -> None:
    store, bucket = made
    restore(bucket, tmp_path / "new")
    new, original = files_below(tmp_path / "new", is_of_store), files_below(store.directory.root, is_of_store)
    assert b"restored-" in new.pop("branches/2.json")  # it goes on on a timeline of its own
    assert new.items() <= original.items() | {("NOSYNC", new["NOSYNC"])}
    assert {name for name in original if not name.startswith("layers/")} == {
        n for n in new if not n.startswith("layers/")
    }
    assert not (tmp_path / "new" / RESTORING).exists()


@pytest.mark.parametrize("as_of", [0, 3, 6])
def test_as_of_an_earlier_epoch(
    made: tuple[nosync.Store, Bucket], tmp_path: Path, open_store: OpenStore, as_of: int
) -> None:
    store, bucket = made
    report = restore(bucket, tmp_path / "new", as_of=as_of)
    assert report.epoch == as_of
    new = open_store("new", settings=QUIET)
    assert new.last_sealed() == as_of
    assert rows_of(new) == rows_of(store, as_of=as_of)
    assert rows_of(new, branch="before") == rows_of(store, branch="before")
    assert new.pins() == ({"five": 5} if as_of >= 5 else {})
    assert new.missing() == []
    assert new.status().problems == {}
    new.append("big", t=as_of + 1, rows=pa.table({"k": ["new"], "n": [1]}), key=["k"])
    new.append("counts", t=as_of + 1, rows=pa.table({"k": ["new"], "n": [1]}), key=["k"])
    new.seal(as_of + 1)
    assert rows_of(new) == {**rows_of(store, as_of=as_of), "new": 1}
    copies = Copies(new, bucket)
    copies.step()
    assert "it is of an earlier time" in copies.level.status().problem


def test_a_branch_is_main(made: tuple[nosync.Store, Bucket], tmp_path: Path, open_store: OpenStore) -> None:
    store, bucket = made
    restore(bucket, tmp_path / "new", branch="before")
    new = open_store("new", settings=QUIET)
    assert rows_of(new) == rows_of(store, branch="before")
    assert list(new.branches()) == ["main"]
    with pytest.raises(InvalidInputError, match="no branch 'nowhere'"):
        restore(bucket, tmp_path / "other", branch="nowhere")


@pytest.mark.parametrize("as_of", [8, 100, -1])
def test_an_epoch_that_is_not_there(made: tuple[nosync.Store, Bucket], tmp_path: Path, as_of: int) -> None:
    with pytest.raises(InvalidInputError):
        restore(made[1], tmp_path / "new", as_of=as_of)
    assert not (tmp_path / "new" / "NOSYNC").exists()


def test_history_that_was_merged_away_is_said(open_store: OpenStore, tmp_path: Path) -> None:
    store, bucket = open_store(settings=QUIET, retain=0), SimulatedBucket()
    epochs(store, range(6))
    store.compact()
    Copies(store, bucket).push()
    with pytest.raises(CompactedError, match="as of 2: .* has 5 to 5"):
        restore(bucket, tmp_path / "new", as_of=2)


def test_only_what_is_remotely_safe_is_restored(open_store: OpenStore, tmp_path: Path) -> None:
    store, bucket = open_store(settings=QUIET), SimulatedBucket()
    copies = Copies(store, bucket)
    epochs(store, range(3))
    copies.push()
    epochs(store, range(3, 5), stages=("counts",))
    path = store.directory.root / "layers/counts/raw/0/3-4-0.layer"
    path.rename(tmp_path / "aside")  # so that only a part of what came since goes
    copies.step()
    restore(bucket, tmp_path / "new")
    new = open_store("new", settings=QUIET)
    assert new.last_sealed() == 2
    assert rows_of(new) == rows_of(store, as_of=2)
    epochs(new, range(3, 4), mark="again")
    assert rows_of(new)["again3"] == 3


def test_one_that_is_interrupted_goes_on(open_store: OpenStore, tmp_path: Path) -> None:
    objects = Objects()
    store = open_store("original", settings=QUIET)
    copies = Copies(store, SimulatedBucket(objects), flush_bytes=3000)
    for t in range(20):
        epochs(store, range(t, t + 1))
        copies.step()
    copies.push()
    left = [8]

    def fault(call: str, name: str) -> Fault:
        if call == "get" and "/packs/" in name:
            left[0] -= 1
        return ""

    class Dying(SimulatedBucket):
        def get_range(self, name: str, begin: int, end: int) -> bytes:
            if left[0] <= 0:
                raise KeyboardInterrupt
            return super().get_range(name, begin, end)

    left[0] = 30
    with pytest.raises(KeyboardInterrupt):
        restore(Dying(objects, fault), tmp_path / "new")
    with pytest.raises(nosync.NotAStoreError):
        nosync.open(tmp_path / "new", read_only=True)
    with pytest.raises(InvalidInputError, match="an interrupted restore of"):
        restore(SimulatedBucket(objects), tmp_path / "new", as_of=3)
    kept = files_below(tmp_path / "new", lambda name: name.startswith("layers/"))
    for name in list(kept)[:1]:  # one was torn by a power cut
        (tmp_path / "new" / name).write_bytes(kept[name][:50])
    report = restore(SimulatedBucket(objects), tmp_path / "new")
    assert report.epoch == 19
    assert rows_of(open_store("new", settings=QUIET)) == rows_of(store)


def test_what_is_there_is_not_fetched_again(open_store: OpenStore, tmp_path: Path) -> None:
    store, bucket = open_store("original", settings=QUIET), SimulatedBucket()
    epochs(store, range(10))
    Copies(store, bucket).push()
    restore(bucket, tmp_path / "new")
    first = restore(bucket, tmp_path / "other")
    shutil.copytree(tmp_path / "other" / "layers", tmp_path / "third" / "layers")
    from nosync.lsm.platform.env import Env
    from nosync.lsm.platform.json_file import replace_small

    plan = {"url": bucket.url, "store": first.store_id, "as_of": None, "branch": None}
    (tmp_path / "third" / "tmp").mkdir()
    replace_small(tmp_path / "third", tmp_path / "third" / RESTORING, plan, Env())
    again = restore(bucket, tmp_path / "third")
    assert again.bytes == first.bytes
    assert again.fetched_bytes < first.fetched_bytes - first.bytes * 0.9


def test_a_flipped_bit_in_the_bucket_is_named(open_store: OpenStore, tmp_path: Path) -> None:
    objects = Objects()
    store, bucket = open_store("original", settings=QUIET), SimulatedBucket(objects)
    epochs(store, range(4))
    copies = Copies(store, bucket)
    copies.push()
    (name,) = [name for name in objects.by_name if "/packs/" in name]
    data = bytearray(objects.by_name[name])
    data[copies.contents().places["layers/counts/raw/0/2-3-0.layer"].offset + 200] ^= 1
    objects.by_name[name] = bytes(data)
    with pytest.raises(CorruptionError, match=rf"{name}: layers/counts/raw/0/2-3-0\.layer"):
        restore(bucket, tmp_path / "new")
    with pytest.raises(nosync.NotAStoreError):
        nosync.open(tmp_path / "new", read_only=True)


def test_a_store_that_answers_late_is_asked_again(open_store: OpenStore, tmp_path: Path) -> None:
    objects, calls = Objects(), [0]
    store = open_store("original", settings=QUIET)
    epochs(store, range(4))
    Copies(store, SimulatedBucket(objects)).push()

    class Late(SimulatedBucket):
        def get_range(self, name: str, begin: int, end: int) -> bytes:
            calls[0] += 1
            if calls[0] % 2:
                raise UnavailableError("the store answers 503")
            return super().get_range(name, begin, end)

    assert restore(Late(objects), tmp_path / "new").epoch == 3


@pytest.mark.parametrize("what", ["store", "file", "full"])
def test_a_directory_that_is_something_else_is_left_alone(open_store: OpenStore, tmp_path: Path, what: str) -> None:
    store, bucket = open_store("original", settings=QUIET), SimulatedBucket()
    epochs(store, range(2))
    Copies(store, bucket).push()
    target = tmp_path / "original" if what == "store" else tmp_path / what
    if what == "file":
        target.write_text("x")
    if what == "full":
        target.mkdir()
        (target / "notes.txt").write_text("x")
    with pytest.raises(InvalidInputError, match=str(target)):
        restore(bucket, target)


def test_a_bucket_without_copies(tmp_path: Path, open_store: OpenStore) -> None:
    with pytest.raises(RemoteError, match="no copies of a store"):
        restore(SimulatedBucket(), tmp_path / "new")


@pytest.mark.parametrize("lazy", [False, True])
def test_kept_checkpoints_come_too(open_store: OpenStore, tmp_path: Path, lazy: bool) -> None:
    store, bucket = open_store("original", settings=QUIET), SimulatedBucket()
    epochs(store, range(2))
    for name in ("checkpoints/q/offsets/0", "checkpoints/q/commits/0", "checkpoints/q/state/0/0/1.delta"):
        path = store.directory.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"of Spark " + name.encode())
    Copies(store, bucket).push()
    restore(bucket, tmp_path / "new", lazy=lazy)
    assert (
        tmp_path / "new/checkpoints/q/state/0/0/1.delta"
    ).read_bytes() == b"of Spark checkpoints/q/state/0/0/1.delta"
    assert bucket_status(bucket).checkpoints == ["q"]


# --- one pass over a directory --------------------------------------------------------------------------------------------


def test_a_backup_is_incremental(open_store: OpenStore, bucket: Bucket, tmp_path: Path) -> None:
    store = open_store("original", settings=QUIET)
    epochs(store, range(8))
    first = copy_directory(store.directory.root, bucket, SETTINGS)
    assert first.epoch == 7
    second = copy_directory(store.directory.root, bucket, SETTINGS)
    assert (second.epoch, second.packs) == (7, 0)
    epochs(store, range(8, 9))
    third = copy_directory(store.directory.root, bucket, SETTINGS)
    assert third.epoch == 8
    assert 0 < third.sent_bytes < first.sent_bytes
    restore(bucket, tmp_path / "new")
    assert rows_of(open_store("new", settings=QUIET)) == rows_of(store)


def test_a_backup_of_a_store_that_is_not_whole_says_so(open_store: OpenStore) -> None:
    store, bucket = open_store("original", settings=QUIET), SimulatedBucket()
    epochs(store, range(4))
    path = store.directory.root / "layers/counts/raw/0/2-3-0.layer"
    data = bytearray(path.read_bytes())
    data[300] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptionError, match=r"up to epoch 1, and is sealed up to 3: .*2-3-0\.layer"):
        copy_directory(store.directory.root, bucket, SETTINGS)


def test_a_backup_beside_a_store_that_copies_by_itself(open_store: OpenStore) -> None:
    store, bucket = open_store("original", settings=QUIET), SimulatedBucket()
    copies = Copies(store, bucket)
    epochs(store, range(3))
    copies.push()
    copy_directory(store.directory.root, bucket, SETTINGS)
    epochs(store, range(3, 5))
    copies.step()
    assert "taken over" in copies.level.status().problem
    assert copies.level.status().safe_point == 2
    copies.push()  # it takes its log back, for the other one has ended
    assert copies.level.status().safe_point == 4
    assert copies.contents().at.claim == 3


def test_status_of_a_bucket(made: tuple[nosync.Store, Bucket]) -> None:
    store, bucket = made
    found = bucket_status(bucket)
    assert found.branches == {"main": 7, "before": 7}
    assert found.pins == {"five": 5}
    store.unpin("five")
    store.sync()
    Copies(store, bucket).push()
    again = bucket_status(bucket)
    assert again.pins == {}
    assert again.nodes["embedded"].claim == 2
    assert again.used_bytes <= again.stored_bytes


def test_an_interrupted_restore_is_no_store_that_lost_its_marker(open_store: OpenStore, tmp_path: Path) -> None:
    store, bucket = open_store("original", settings=QUIET), SimulatedBucket()
    epochs(store, range(10))
    Copies(store, bucket).push()

    def interrupt(done: int, of: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        restore(bucket, tmp_path / "new", as_of=4, progress=interrupt)
    for call in (lambda: nosync.open(tmp_path / "new"), lambda: Repair(tmp_path / "new")):
        with pytest.raises(
            nosync.NosyncError, match="a restore from copies that was interrupted: say nosync restore again"
        ):
            call()
    assert restore(bucket, tmp_path / "new", as_of=4).epoch == 4
    nosync.open(tmp_path / "new").close()
