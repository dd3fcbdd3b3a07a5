"""Who may write to a bucket: a restart, another store, a copy of an earlier time, and one that was taken over."""

from __future__ import annotations

from pathlib import Path

import pytest

from nosync.lsm.errors import RemoteError
from nosync.replication.remote.bucket import Bucket
from nosync.testing.simulated_bucket import Objects, SimulatedBucket
from tests.conftest import OpenStore
from tests.helpers.remotes import Copies, epochs, open_quiet


def test_a_restart_goes_on_and_puts_nothing_again(open_store: OpenStore) -> None:
    store, objects = open_quiet(open_store), Objects()
    copies = Copies(store, SimulatedBucket(objects))
    epochs(store, range(6))
    copies.push()
    held = {placed.version for placed in copies.contents().files()}
    store.close()
    store = open_quiet(open_store)
    before = objects.put_bytes
    again = Copies(store, SimulatedBucket(objects))
    assert again.level.status().safe_point is None  # it has not looked yet
    again.push()
    assert again.level.status().safe_point == 5
    assert {placed.version for placed in again.contents().files()} >= held
    assert objects.put_bytes - before < 4000  # a claim, an index and the probe
    assert again.contents().at.claim == 2


def test_another_store_is_refused(open_store: OpenStore, bucket: Bucket) -> None:
    Copies(open_quiet(open_store, "one"), bucket)
    with pytest.raises(RemoteError, match="give each store a prefix of its own"):
        Copies(open_quiet(open_store, "two"), bucket)


def test_a_copy_of_an_earlier_time_is_refused(open_store: OpenStore, bucket: Bucket, tmp_path: Path) -> None:
    import shutil

    store = open_quiet(open_store)
    copies = Copies(store, bucket)
    epochs(store, range(3))
    copies.push()
    shutil.copytree(store.directory.root, tmp_path / "old", ignore=shutil.ignore_patterns("catalog", "LOCK"))
    epochs(store, range(3, 6))
    copies.push()
    old = Copies(open_quiet(open_store, "old"), bucket)
    old.step()
    assert "it is of an earlier time" in old.level.status().problem
    assert copies.contents().reached.epochs == {"main": 5}


def test_the_one_that_was_taken_over_stops_and_both_are_named(open_store: OpenStore, tmp_path: Path) -> None:
    import shutil

    bucket = SimulatedBucket()
    store = open_quiet(open_store)
    copies = Copies(store, bucket)
    epochs(store, range(3))
    copies.push()
    shutil.copytree(store.directory.root, tmp_path / "new", ignore=shutil.ignore_patterns("catalog", "LOCK"))
    new_store = open_quiet(open_store, "new")
    new = Copies(new_store, bucket)
    new.push()
    epochs(store, range(3, 4))
    copies.step()
    problem = copies.level.status().problem
    assert copies.level._is_ended
    assert store.node.incarnation in problem  # type: ignore[attr-defined]
    assert new_store.node.incarnation in problem  # type: ignore[attr-defined]
    assert copies.level.status().safe_point == 2
    epochs(new_store, range(3, 5), mark="new")
    new.push()
    assert new.contents().reached.epochs == {"main": 4}
    with pytest.raises(RemoteError, match="taken over"):
        copies.level.push(1.0)
