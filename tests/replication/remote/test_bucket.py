"""What every object store does, the faulty one of the simulation included."""

from __future__ import annotations

import pytest

from nosync.lsm.errors import CorruptionError, RemoteError
from nosync.replication.remote.bucket import Bucket, MissingObjectError, ObjectInfo
from nosync.replication.remote.cloud import CloudBucket, open_bucket
from nosync.replication.remote.probe import probe
from nosync.testing.simulated_bucket import SimulatedBucket


def test_an_object_is_put_once(bucket: Bucket) -> None:
    assert bucket.put_new("a/1", b"one")
    assert not bucket.put_new("a/1", b"two")
    assert bucket.get("a/1") == b"one"
    assert bucket.put_new("a/2", memoryview(bytearray(b"0123456789")))
    assert bucket.put_new("a/3", bytearray())
    assert bucket.get("a/3") == b""


def test_ranges(bucket: Bucket) -> None:
    bucket.put_new("a", b"0123456789")
    assert bucket.get_range("a", 2, 5) == b"234"
    assert bucket.get_range("a", 5, 5) == b""
    assert bucket.get_end("a", 3) == b"789"
    assert bucket.get_end("a", 30) == b"0123456789"
    bucket.put_new("none", b"")
    assert bucket.get_end("none", 3) == b""
    for name, begin in (("a", 8), ("a", 20), ("none", 0)):
        with pytest.raises(CorruptionError, match=f"{name} has no bytes {begin} to {begin + 4}"):
            bucket.get_range(name, begin, begin + 4)


def test_what_is_not_there(bucket: Bucket) -> None:
    for read in (bucket.get, lambda name: bucket.get_range(name, 0, 1), lambda name: bucket.get_end(name, 1)):
        with pytest.raises(MissingObjectError, match="a/9"):
            read("a/9")
    bucket.delete(["a/9"])
    bucket.delete([])


def test_the_end_of_an_object_where_no_range_counts_from_there() -> None:
    """Azure has no such ranges."""
    bucket = open_bucket("memory://ends")
    assert isinstance(bucket, CloudBucket)
    bucket._scheme = "az"
    bucket.put_new("a", b"0123456789")
    assert [bucket.get_end("a", n) for n in (1, 10, 99)] == [b"9", b"0123456789", b"0123456789"]
    with pytest.raises(MissingObjectError, match="b"):
        bucket.get_end("b", 1)


def test_listings_are_in_order(bucket: Bucket) -> None:
    for name in ("b/2", "b/10", "a/1", "b/c/3", "bb/4"):
        bucket.put_new(name, b"x" * len(name))
    assert bucket.list("b/") == [ObjectInfo("b/10", 4), ObjectInfo("b/2", 3), ObjectInfo("b/c/3", 5)]
    assert bucket.list("d/") == []
    assert bucket.directories("b/") == ["c"]
    assert bucket.directories("d/") == []


def test_deleting(bucket: Bucket) -> None:
    for name in ("a/1", "a/2", "a/3"):
        bucket.put_new(name, b"x")
    bucket.delete(["a/1", "a/9", "a/3"])
    assert [one.name for one in bucket.list("a/")] == ["a/2"]
    assert bucket.put_new("a/1", b"again")


def test_the_probe_leaves_nothing(bucket: Bucket) -> None:
    probe(bucket, "0123")
    probe(bucket, "0123")
    assert bucket.list("probe/") == []


def test_a_store_that_ignores_conditional_writes_is_refused() -> None:
    with pytest.raises(RemoteError, match="ignores conditional writes"):
        probe(SimulatedBucket(ignores_conditions=True), "0123")


@pytest.mark.parametrize("call", ["put", "get", "list", "delete"])
def test_each_permission_is_tried_at_the_beginning(call: str) -> None:
    with pytest.raises(RemoteError, match=f"the permission to {call} is missing"):
        probe(SimulatedBucket(forbidden=[call]), "0123")


def test_a_listing_that_lags() -> None:
    bucket = SimulatedBucket(list_lag=lambda: 1)
    bucket.put_new("a/1", b"x")
    bucket.put_new("a/2", b"x")
    assert [one.name for one in bucket.list("a/")] == ["a/1"]
    assert bucket.get("a/2") == b"x"
