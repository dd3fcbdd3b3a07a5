"""What nothing needs any more goes after a grace, and what is needed never does."""

from __future__ import annotations

import pytest

from nosync.lsm.errors import RemoteError
from nosync.lsm.platform.env import Env
from nosync.replication.remote.bucket import MissingObjectError
from nosync.replication.remote.fetch import Fetcher, fetch_all
from nosync.replication.remote.names import LogPosition, NodeNames, position_of
from nosync.replication.remote.restore import restore
from nosync.replication.remote.view import read_view
from nosync.testing.simulated_bucket import Objects, SimulatedBucket
from tests.conftest import OpenStore
from tests.helpers.remotes import NAMES, QUIET, Copies, epochs, rows_of


class Clock(Env):
    """A clock that the test moves."""

    now_s = 1000.0

    def monotonic_s(self) -> float:
        return self.now_s


def test_garbage_goes_after_the_grace(open_store: OpenStore, tmp_path: object) -> None:
    clock, objects = Clock(), Objects()
    store = open_store(settings=QUIET, retain=0, env=clock)
    copies = Copies(store, SimulatedBucket(objects), grace_s=100.0)
    for t in range(40):
        epochs(store, range(t, t + 1))
        copies.step()
    store.compact()
    copies.push()
    view = read_view(SimulatedBucket(objects))  # a reader that takes its time
    for t in range(40, 60):
        epochs(store, range(t, t + 1))
        store.compact()
        clock.now_s += 4.0
        copies.step()
    fetch_all(Fetcher(SimulatedBucket(objects)), view.files.values(), lambda placed, data: None)
    for t in range(60, 100):
        clock.now_s += 200.0
        epochs(store, range(t, t + 1))
        copies.push()
    contents, there = copies.contents(), objects.by_name
    indexes = sorted(at for name in there if name.endswith(".index") and (at := position_of(name)) is not None)
    assert len(indexes) == 2, "one is there should the newest be damaged"
    old = {name for n in range(1, indexes[0].number + 1) if (name := NAMES.pack(LogPosition(1, n))) in there}
    assert old <= contents.in_use().keys()
    assert len(old) < indexes[0].number / 2
    with pytest.raises(MissingObjectError):
        fetch_all(Fetcher(SimulatedBucket(objects)), view.files.values(), lambda placed, data: None)
    assert copies.level.status().safe_point == 99
    root = store.directory.root.parent / "restored"
    restore(SimulatedBucket(objects), root)
    assert rows_of(open_store("restored", settings=QUIET)) == rows_of(store)


def test_a_pack_of_which_little_is_used_is_written_anew(open_store: OpenStore) -> None:
    clock, objects = Clock(), Objects()
    store = open_store(settings=QUIET, retain=0, env=clock)
    copies = Copies(store, SimulatedBucket(objects), grace_s=10.0)
    epochs(store, range(30))
    copies.push()
    first = copies.contents().at
    name = NodeNames("embedded").pack(first)
    assert name in copies.contents().in_use()
    for t in range(30, 90):
        epochs(store, range(t, t + 1))
        store.compact()
        store.node.archive_manifests()  # type: ignore[attr-defined]
        clock.now_s += 30.0
        copies.push()
    assert name not in objects.by_name
    assert copies.level.status().safe_point == 89


def test_parts_that_no_pack_names_go(open_store: OpenStore) -> None:
    clock, objects = Clock(), Objects()
    store = open_store(settings=QUIET, env=clock)
    copies = Copies(store, SimulatedBucket(objects), grace_s=10.0)
    objects.by_name["nodes/embedded/objects/00000001-000000000009/000000"] = b"of a writer that died"
    objects.by_name["nodes/other/objects/00000001-000000000001/000000"] = b"of another node"
    copies.push()
    clock.now_s += 11.0
    copies.push()
    assert not [name for name in objects.by_name if name.startswith("nodes/embedded/objects/")]
    assert "nodes/other/objects/00000001-000000000001/000000" in objects.by_name


def test_who_was_taken_over_deletes_nothing(open_store: OpenStore) -> None:
    clock, objects = Clock(), Objects()
    store = open_store(settings=QUIET, retain=0, env=clock)
    copies = Copies(store, SimulatedBucket(objects), grace_s=10.0)
    epochs(store, range(20))
    copies.push()
    store.compact()
    epochs(store, range(20, 21))
    copies.push()
    root = store.directory.root.parent / "new"
    restore(SimulatedBucket(objects), root)
    new = Copies(open_store("new", settings=QUIET), SimulatedBucket(objects))
    new.push()
    there = set(objects.by_name)
    clock.now_s += 1000.0
    copies.step()
    clock.now_s += 1000.0
    copies.step()
    assert there <= set(objects.by_name)


def test_a_permission_to_delete_that_went_is_shown_and_copies_go_on(open_store: OpenStore) -> None:
    class Keeping(SimulatedBucket):
        def delete(self, names: object) -> None:
            if any(not name.startswith("probe/") for name in names):  # type: ignore[attr-defined]
                raise RemoteError("the permission s3:DeleteObject is missing")
            super().delete(names)  # type: ignore[arg-type]

    clock, objects = Clock(), Objects()
    store = open_store(settings=QUIET, retain=0, env=clock)
    copies = Copies(store, Keeping(objects), grace_s=10.0)
    for t in range(30):
        epochs(store, range(t, t + 1))
        store.compact()
        clock.now_s += 30.0
        copies.step()
    assert copies.level.status().safe_point == 29
    assert "s3:DeleteObject is missing" in copies.level.status().problem
