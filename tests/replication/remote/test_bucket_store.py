"""A store that is read from its copies: as it is beside the files, by few bytes."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest

import nosync
from nosync.lsm.errors import CorruptionError, InvalidInputError, RemoteError, StorageError
from nosync.replication.remote import bucket_env, patient
from nosync.replication.remote.bucket import Bucket
from nosync.replication.remote.bucket_store import BucketStore, connect_bucket
from nosync.testing.simulated_bucket import Fault, Objects, SimulatedBucket
from tests.conftest import OpenStore
from tests.helpers.clocks import SECOND_US, Clock
from tests.helpers.remotes import NAMES, QUIET, Copies, epochs, rows_of


@pytest.fixture(autouse=True)
def always_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is new in the bucket is seen at once."""
    monkeypatch.setattr(bucket_env, "LOOK_EVERY_S", 0.0)


def test_it_reads_as_the_original(open_store: OpenStore, bucket: Bucket) -> None:
    store = open_store(settings=QUIET)
    copies = Copies(store, bucket, large_bytes=3000)
    rows = pa.table({"k": [f"big{i}" for i in range(500)], "n": list(range(500))})
    store.append("big", t=0, rows=rows, key=["k"])
    for t in range(8):
        if t:
            store.append("big", t=t, rows=rows.slice(0, 1), key=["k"])
        store.append("counts", t=t, rows=pa.table({"k": [f"a{t}", "all"], "n": [t, t]}), key=["k"])
        store.seal(t)
    store.pin("three", 3)
    store.rewind(5, keep_as="before")
    store.append("big", t=6, rows=rows.slice(1, 1), key=["k"])
    store.append("counts", t=6, rows=pa.table({"k": ["b6"], "n": [60]}), key=["k"])
    store.seal(6)
    store.sync()
    copies.push()
    with connect_bucket(bucket, None) as reader:
        assert reader.last_sealed() == 6
        assert reader.safe_point() == 6
        assert reader.pins() == {"three": 3}
        assert sorted(reader.branches()) == ["before", "main"]
        assert reader.stages() == store.stages()
        for stage in ("counts", "big"):
            for t in range(7):
                assert rows_of(reader, stage, as_of=t) == rows_of(store, stage, as_of=t)
            assert rows_of(reader, stage, branch="before") == rows_of(store, stage, branch="before")
            assert reader.changes(stage, 2, 6).equals(store.changes(stage, 2, 6))
        keys = pa.table({"k": ["big7", "big400", "nobody"]})
        assert reader.lookup("big", keys).equals(store.lookup("big", keys))
        assert reader.diff("counts", "main", "before").equals(store.diff("counts", "main", "before"))
        status = reader.status()
        assert (status.last_sealed, status.safe_point, status.missing) == (6, 6, 0)
        assert status.path == bucket.url
        assert status.problems == {}


def test_a_look_that_fails_half_way_loses_nothing(open_store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patient, "_PAUSE_S", 0.0)
    failing = set[str]()

    def fault(call: str, name: str) -> Fault:
        return "before" if name in failing else ""

    store, bucket = open_store(settings=QUIET), SimulatedBucket(fault=fault)
    copies = Copies(store, bucket)
    epochs(store, range(3))
    copies.push()
    with connect_bucket(bucket, None) as reader:
        for t in (3, 4):
            epochs(store, range(t, t + 1))
            copies.push()
        failing.add(NAMES.pack(copies.contents().at))
        with pytest.raises(RemoteError, match="503"):  # after it read the pack before
            reader.last_sealed()
        failing.clear()
        assert reader.last_sealed() == 4


def test_what_comes_is_seen_and_what_is_not_whole_is_not(open_store: OpenStore) -> None:
    store, bucket = open_store(settings=QUIET), SimulatedBucket()
    copies = Copies(store, bucket)
    epochs(store, range(3))
    copies.push()
    with connect_bucket(bucket, None) as reader:
        assert reader.last_sealed() == 2
        epochs(store, range(3, 12))
        assert reader.last_sealed() == 2
        store.node.archive_manifests()  # type: ignore[attr-defined]
        copies.push()
        assert reader.last_sealed() == 11
        assert rows_of(reader) == rows_of(store)


def test_a_reader_over_a_garbage_collection(open_store: OpenStore) -> None:
    from tests.replication.remote.test_garbage import Clock

    clock, objects = Clock(), Objects()
    store = open_store(settings=QUIET, retain=0, env=clock)
    copies = Copies(store, SimulatedBucket(objects), grace_s=1.0)
    epochs(store, range(20))
    copies.push()
    with connect_bucket(SimulatedBucket(objects), None) as reader:
        assert reader.last_sealed() == 19
        for t in range(20, 40):
            epochs(store, range(t, t + 1))
            store.compact()
            clock.now_s += 10.0
            copies.push()
        assert rows_of(reader) == rows_of(store)


def test_of_a_large_layer_only_what_is_needed_is_fetched(open_store: OpenStore) -> None:
    store, bucket = open_store(settings=nosync.StoreSettings(background=False, block_rows=2000)), SimulatedBucket()
    rows = pa.table({"k": list(range(100_000)), "n": list(range(100_000))})
    for t in range(2):
        store.append("big", t=t, rows=rows.slice(t * 50_000, 50_000), key=["k"])
        store.seal(t)
    store.sync()
    store.compact()
    Copies(store, bucket, large_bytes=100_000, flush_bytes=100_000).push()
    size = sum(layer.bytes for layer in store.layers())
    with connect_bucket(bucket, None) as reader:
        assert isinstance(reader, BucketStore)
        keys = pa.table({"k": [7, 70_000]})
        assert reader.lookup("big", keys).equals(store.lookup("big", keys))
        assert reader.env.fetcher.bytes < size / 3
        assert reader.read("big").sort_by("k").equals(store.read("big").sort_by("k"))


def test_a_damaged_object_is_named_and_not_read(open_store: OpenStore) -> None:
    objects = Objects()
    store, bucket = open_store(settings=QUIET), SimulatedBucket(objects)
    rows = pa.table({"k": list(range(3000)), "n": list(range(3000))})
    store.append("big", t=0, rows=rows, key=["k"])
    store.append("counts", t=0, rows=rows.slice(0, 5), key=["k"])
    store.seal(0)
    store.sync()
    Copies(store, bucket, large_bytes=5000).push()
    for name in list(objects.by_name):
        if "/objects/" in name and name.endswith("000002"):
            data = bytearray(objects.by_name[name])
            data[50] ^= 1
            objects.by_name[name] = bytes(data)
    with connect_bucket(bucket, None) as reader:
        assert reader.read("counts").num_rows == 5
        with pytest.raises(CorruptionError, match="0-1-0.layer: block 0 of 1 does not match its digest"):
            reader.read("big")


def test_a_cache_is_used_again_and_checked(open_store: OpenStore, tmp_path: Path) -> None:
    store, bucket = open_store(settings=QUIET), SimulatedBucket()
    epochs(store, range(4))
    Copies(store, bucket).push()
    with connect_bucket(bucket, tmp_path / "cache") as reader:
        expected = rows_of(reader)
    path = tmp_path / "cache/layers/counts/raw/0/1-2-0.layer"
    data = bytearray(path.read_bytes())
    data[300] ^= 1
    path.write_bytes(data)
    with connect_bucket(bucket, tmp_path / "cache") as reader:
        assert rows_of(reader) == expected
        assert isinstance(reader, BucketStore)
        assert reader.env.fetcher.requests == 1  # the damaged one
    other = SimulatedBucket()
    Copies(open_store("other", settings=QUIET), other)
    with pytest.raises(RemoteError, match="give another cache="):
        connect_bucket(other, tmp_path / "cache")


def test_it_is_not_written_to(open_store: OpenStore) -> None:
    store, bucket = open_store(settings=QUIET), SimulatedBucket()
    epochs(store, range(2))
    Copies(store, bucket).push()
    with connect_bucket(bucket, None) as reader:
        for change in (
            lambda: epochs(reader, range(2, 3)),
            lambda: reader.rewind(0),
            lambda: reader.pin("x", 1),
            reader.sync,
        ):
            with pytest.raises(StorageError, match="cannot be written there"):
                change()


def test_connect_takes_a_url(tmp_path: Path, s3: str) -> None:
    url = f"{s3}/{tmp_path.name}"
    with nosync.open(tmp_path / "store", remote=url) as store:
        epochs(store, range(3))
        store.sync_remote()
    with nosync.connect(url) as reader:
        assert rows_of(reader)["all"] == 2
        assert repr(reader) == f"<nosync.Store at {url} (connected)>"
    with pytest.raises(InvalidInputError, match="are for daemons"):
        nosync.connect(url, node="n1")
    with pytest.raises(RemoteError, match="no copies of a store"):
        nosync.connect(f"{s3}/nothing-here")


def at(clock: Clock) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=clock.now_us)


def test_a_time_of_which_the_copies_are_behind_is_not_an_earlier_epoch(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects, clock = Objects(), Clock()
    store = open_store(settings=QUIET, env=clock)
    copies = Copies(store, SimulatedBucket(objects), flush_bytes=1)
    epochs(store, range(3))
    copies.push()
    early = at(clock)
    for t in range(3, 6):
        clock.now_us += SECOND_US
        epochs(store, range(t, t + 1))
    late = at(clock)
    assert store.epoch_as_of(late) == 5
    uploader, answers = copies.level._uploader, set()
    assert uploader is not None
    for _ in range(30):  # packs of one file
        with connect_bucket(SimulatedBucket(objects), None) as reader:
            assert reader.epoch_as_of(early) == 2
            with contextlib.suppress(nosync.NotAvailableError):
                answers.add(reader.epoch_as_of(late))
        uploader.look_at_all()
        uploader.gather()
        if not uploader.has_something:
            break
        uploader.flush()
    assert answers <= {2, 5}, "2: before any of the later times is there"
    assert 5 in answers
