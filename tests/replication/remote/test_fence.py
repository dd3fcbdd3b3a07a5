"""One store for a prefix, and one writer for the log of a node."""

from __future__ import annotations

import threading

import pytest

from nosync.lsm.errors import CorruptionError, FormatVersionError, RemoteError
from nosync.lsm.platform.store_marker import Marker
from nosync.replication.remote.bucket import Bucket
from nosync.replication.remote.fence import (
    Claim,
    RemoteTakenError,
    check_claim,
    claim_store,
    newest_claim,
    read_store,
    take_claim,
)
from nosync.replication.remote.names import NodeNames
from nosync.testing.simulated_bucket import Objects, SimulatedBucket

MARKER = Marker("store-1", 128)
NAMES = NodeNames("embedded")


def take(bucket: Bucket, incarnation: str, token: str = "t") -> Claim:
    return take_claim(bucket, NAMES, MARKER, incarnation, token, "host")


def test_a_prefix_is_of_one_store(bucket: Bucket) -> None:
    with pytest.raises(RemoteError, match="no copies of a store are there"):
        read_store(bucket)
    claim_store(bucket, MARKER)
    claim_store(bucket, MARKER)
    assert read_store(bucket) == MARKER
    with pytest.raises(RemoteTakenError, match=r"copies of store store-1 \(128 .*this is store store-2"):
        claim_store(bucket, Marker("store-2", 128))
    assert read_store(bucket) == MARKER


def test_a_newer_format_and_a_damaged_one() -> None:
    bucket = SimulatedBucket()
    bucket.put_new("NOSYNC.json", b'{"nosync_remote": 2, "store_id": "x", "key_groups": 1}')
    with pytest.raises(FormatVersionError, match="remote format 2"):
        read_store(bucket)
    for text in (b"", b"[]", b'{"nosync_remote": 1}', b'{"nosync_remote": 1, "store_id": "x", "key_groups": "y"}'):
        other = SimulatedBucket()
        other.put_new("NOSYNC.json", text)
        with pytest.raises(CorruptionError, match=r"NOSYNC\.json: is not which store"):
            read_store(other)


def test_the_same_directory_takes_its_log_again(bucket: Bucket) -> None:
    first = take(bucket, "a")
    check_claim(bucket, NAMES, first)
    second = take(bucket, "a")
    assert (first.number, second.number) == (1, 2)
    assert newest_claim(bucket, NAMES) == second
    check_claim(bucket, NAMES, second)
    with pytest.raises(RemoteTakenError, match=r"taken over by incarnation a \(on host, claim 2\)"):
        check_claim(bucket, NAMES, first)


def test_an_old_incarnation_is_refused_and_both_are_named(bucket: Bucket) -> None:
    take(bucket, "old")
    restored = take(bucket, "restored")
    with pytest.raises(RemoteTakenError, match=r"incarnation restored .*this is incarnation old"):
        take(bucket, "old")
    assert newest_claim(bucket, NAMES) == restored
    take(bucket, "again")
    for incarnation in ("old", "restored"):
        with pytest.raises(RemoteTakenError):
            take(bucket, incarnation)
    assert take(bucket, "again").number == 4


def test_nodes_have_logs_of_their_own(bucket: Bucket) -> None:
    take(bucket, "a")
    other = NodeNames("n2")
    assert newest_claim(bucket, other) is None
    assert take_claim(bucket, other, MARKER, "b", "t", "host").number == 1
    assert take(bucket, "a").number == 2


def test_a_claim_that_no_listing_shows_yet_is_found() -> None:
    objects = Objects()
    for incarnation in ("a", "b", "c"):
        take(SimulatedBucket(objects), incarnation)
    lagging = SimulatedBucket(objects, list_lag=lambda: 2)
    found = newest_claim(lagging, NAMES)
    assert found is not None
    assert (found.number, found.incarnation) == (3, "c")
    with pytest.raises(RemoteTakenError):
        take(lagging, "a")


def test_of_several_that_claim_at_once_each_gets_a_number_of_its_own() -> None:
    objects, taken = Objects(), []

    def claim(i: int) -> None:
        taken.append(take(SimulatedBucket(objects), f"i{i}").number)

    threads = [threading.Thread(target=claim, args=(i,)) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("text", [b"", b"{", b'{"number": 2}'])
def test_a_claim_that_is_damaged_is_a_number_that_is_taken(text: bytes) -> None:
    objects = Objects()
    bucket = SimulatedBucket(objects)
    take(bucket, "a")
    first = take(bucket, "b")
    objects.by_name[NAMES.claim(3)] = text
    with pytest.raises(RemoteTakenError) as caught:
        check_claim(bucket, NAMES, first)
    assert caught.value.by_this_directory, "so it is tried again"
    with pytest.raises(RemoteTakenError):
        take(bucket, "a")
    again = take(bucket, "b")
    assert (again.number, again.earlier) == (4, ("a",))
    check_claim(bucket, NAMES, again)
    assert take(bucket, "c").earlier == ("a", "b")
