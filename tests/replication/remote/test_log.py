"""The log of a node: what readers see of it, and what a writer may count as held."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from blake3 import blake3

from nosync.lsm.errors import CorruptionError, RemoteError
from nosync.lsm.platform.store_marker import Marker
from nosync.replication.protocol.file_names import FileName, FileVersion
from nosync.replication.remote.bucket import UnavailableError
from nosync.replication.remote.fence import RemoteTakenError, take_claim
from nosync.replication.remote.log import LogWriter, nodes_of, read_log
from nosync.replication.remote.names import LogPosition, NodeNames
from nosync.replication.remote.pack import PackBuilder, Reached, Step
from nosync.testing.simulated_bucket import Fault, Objects, SimulatedBucket

MARKER, NAMES = Marker("store", 128), NodeNames("embedded")


def begin(bucket: SimulatedBucket, incarnation: str = "a") -> LogWriter:
    claim = take_claim(bucket, NAMES, MARKER, incarnation, "t", "host")
    writer = LogWriter(bucket, NAMES, MARKER, claim, read_log(bucket, NAMES, "store", claim.number - 1))
    writer.write_index()
    return writer


def write(writer: LogWriter, t: int) -> None:
    data = b"epoch %d" % t
    builder = PackBuilder()
    builder.add(FileVersion(FileName(f"manifests/main/{t}.json"), blake3(data).hexdigest(), len(data)), data)
    writer.write(builder, Step(writer.contents.at.next, builder.placed(writer.next_pack()), [], Reached({"main": t})))


def epochs_in(bucket: SimulatedBucket, until_claim: int | None = None) -> list[int]:
    found = read_log(bucket, NAMES, "store", until_claim)
    assert found is not None
    return sorted(int(name.removeprefix("manifests/main/").removesuffix(".json")) for name in found.places)


def test_a_log_is_read_as_it_was_written() -> None:
    bucket = SimulatedBucket()
    assert read_log(bucket, NAMES, "store") is None
    assert nodes_of(bucket) == []
    writer = begin(bucket)
    assert epochs_in(bucket) == []
    for t in range(5):
        write(writer, t)
        assert epochs_in(bucket) == list(range(t + 1))
        assert writer.acknowledged == Reached({"main": t})
    writer.write_index()
    write(writer, 5)
    assert epochs_in(bucket) == list(range(6))
    assert nodes_of(bucket) == ["embedded"]


def test_who_takes_over_goes_on_after_all_that_was_acknowledged() -> None:
    bucket = SimulatedBucket()
    old = begin(bucket)
    write(old, 0)
    new = begin(bucket, "b")
    assert epochs_in(bucket) == [0]
    with pytest.raises(RemoteTakenError):
        write(old, 1)
    assert old.acknowledged == Reached({"main": 0})
    assert epochs_in(bucket) == [0]  # what it put is ignored
    write(new, 1)
    assert epochs_in(bucket) == [0, 1]
    assert new.contents.at == LogPosition(2, 1)


def test_a_claim_under_which_nothing_was_written_is_passed_over() -> None:
    bucket = SimulatedBucket()
    write(begin(bucket), 0)
    take_claim(bucket, NAMES, MARKER, "a", "t", "host")  # and dies
    assert epochs_in(bucket, until_claim=2) == [0]
    write(begin(bucket), 1)
    assert epochs_in(bucket) == [0, 1]


def test_a_listing_that_lags_hides_nothing_from_who_takes_over() -> None:
    objects = Objects()
    writer = begin(SimulatedBucket(objects))
    for t in range(4):
        write(writer, t)
    lagging = SimulatedBucket(objects, list_lag=lambda: 6)
    assert lagging.list(NAMES.indexes) == []
    write(begin(lagging, "b"), 4)
    assert epochs_in(SimulatedBucket(objects)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("fault", ["before", "after"])
def test_what_was_not_answered_is_put_again_with_the_same_bytes(fault: Fault) -> None:
    faults: list[Fault] = []
    bucket = SimulatedBucket(fault=lambda call, name: faults.pop() if faults and call == "put" else "")
    writer = begin(bucket)
    write(writer, 0)
    faults.append(fault)
    with pytest.raises(UnavailableError):
        write(writer, 1)
    assert writer.is_pending
    assert writer.acknowledged == Reached({"main": 0})
    writer.settle()
    assert writer.acknowledged == Reached({"main": 1})
    assert epochs_in(bucket) == [0, 1]


def test_other_bytes_under_the_name_are_no_acknowledgement() -> None:
    bucket = SimulatedBucket()
    writer = begin(bucket)
    bucket.put_new(writer.next_pack(), b"other")
    with pytest.raises(RemoteError, match="with other bytes than this writer's"):
        write(writer, 0)
    assert writer.acknowledged == Reached()


def test_a_large_file_that_was_interrupted_goes_on() -> None:
    left = [3]

    def fault(call: str, name: str) -> Fault:
        if call == "put" and "/objects/" in name:
            left[0] -= 1
            return "before" if left[0] == 0 else ""
        return ""

    objects = Objects()
    bucket = SimulatedBucket(objects, fault)
    writer = begin(bucket)
    data = bytes(range(100))
    version = FileVersion(FileName("layers/c/raw/0/0-1-0.layer"), blake3(data).hexdigest(), 100)
    with pytest.raises(UnavailableError):
        writer.put_large(version, memoryview(data), 10, 100)
    before = objects.calls["put"]
    assert writer.put_large(version, memoryview(data), 10, 25) is None, "three parts of ten went"
    assert writer.has_begun(version)
    placed = writer.put_large(version, memoryview(data), 10, 100)
    assert placed is not None
    assert objects.calls["put"] - before == 8
    parts = bucket.list(f"{placed.place.object}/")
    assert b"".join(bucket.get(part.name) for part in parts) == data
    assert writer.objects_begun() == set()


def damaged(data: bytes) -> bytes:
    changed = bytearray(data)
    changed[-70] ^= 4
    return bytes(changed)


def test_a_damaged_index_is_named() -> None:
    objects = Objects()
    bucket = SimulatedBucket(objects)
    write(begin(bucket), 0)
    name = NAMES.index(LogPosition(1, 0))
    objects.by_name[name] = damaged(objects.by_name[name])
    with pytest.raises(CorruptionError, match=name):
        read_log(bucket, NAMES, "store")


def test_where_an_index_is_damaged_the_one_before_is_taken() -> None:
    objects = Objects()
    bucket = SimulatedBucket(objects)
    writer = begin(bucket)
    write(writer, 0)
    write(writer, 1)
    writer.write_index()
    write(writer, 2)
    held = set(writer.contents.files())
    name = NAMES.index(writer.index_at)
    objects.by_name[name] = damaged(objects.by_name[name])
    found = read_log(bucket, NAMES, "store")
    assert found is not None
    assert name in found.damage
    assert set(found.files()) == held


@pytest.mark.parametrize("change", [damaged, lambda data: b"", lambda data: b"of a stranger", lambda data: data[:-1]])
def test_what_was_held_before_a_damaged_pack_still_is(change: Callable[[bytes], bytes]) -> None:
    objects = Objects()
    bucket = SimulatedBucket(objects)
    writer = begin(bucket)
    for t in range(3):
        write(writer, t)
    name = NAMES.pack(LogPosition(1, 2))
    objects.by_name[name] = change(objects.by_name[name])
    found = read_log(bucket, NAMES, "store")
    assert found is not None
    assert (found.reached.epochs, list(found.places)) == ({"main": 0}, ["manifests/main/0.json"])
    assert name in found.damage
    again = begin(bucket)  # a writer goes on from there, and says what is held then
    write(again, 1)
    assert epochs_in(bucket) == [0, 1]
