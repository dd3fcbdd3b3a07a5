"""What nothing needs any more goes after a grace, and what is needed never does."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest

from nosync.lsm.errors import RemoteError
from nosync.lsm.platform.env import Env
from nosync.replication.remote import copying
from nosync.replication.remote.bucket import MissingObjectError
from nosync.replication.remote.fetch import Fetcher, fetch_all
from nosync.replication.remote.names import LogPosition, NodeNames, position_of
from nosync.replication.remote.restore import restore
from nosync.replication.remote.settings import RemoteSettings
from nosync.replication.remote.view import read_view
from nosync.testing.simulated_bucket import Objects, SimulatedBucket
from tests.conftest import OpenStore
from tests.helpers.remotes import NAMES, QUIET, Copies, epochs, rows_of


class Clock(Env):
    """A clock that the test moves."""

    now_s, wall_s = 1000.0, 1e9

    def monotonic_s(self) -> float:
        return self.now_s

    def utc_us(self) -> int:
        return int(self.wall_s * 1e6)


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


def test_processes_that_end_before_the_grace_count_on(open_store: OpenStore) -> None:
    """As a backup each day, and a job of cron."""
    clock, objects = Clock(), Objects()
    sizes = []
    for day in range(8):
        with open_store(settings=QUIET, retain=0, env=clock) as store:
            rows = pa.table({"k": list(range(2000)), "n": [day] * 2000})
            store.append("counts", t=day, rows=rows, key=["k"])
            store.seal(day)
            store.compact()
            store.sync()
            copies = Copies(store, SimulatedBucket(objects), grace_s=100.0, close_s=5.0)
            copies.push()
        clock.now_s += 60.0
        clock.wall_s += 60.0
        sizes.append(sum(map(len, objects.by_name.values())))
    assert max(sizes[4:]) <= 1.3 * sizes[3]
    assert len([name for name in objects.by_name if "/unneeded/" in name]) == 1
    root = store.directory.root.parent / "restored"
    assert restore(SimulatedBucket(objects), root).epoch == 7


def test_what_another_process_said_deletes_nothing_that_is_needed(open_store: OpenStore) -> None:
    clock, objects = Clock(), Objects()
    store = open_store(settings=QUIET, env=clock)
    epochs(store, range(5))
    Copies(store, SimulatedBucket(objects)).push()
    there = dict.fromkeys(objects.by_name, 1000000000.0)
    for text in (json.dumps({"said_s": 0.0, "unneeded_s": there}), "{", "[]", '{"said_s": "x"}'):
        objects.by_name[f"{NAMES.unneeded}00000009-000000000000.json"] = text.encode()
        copies = Copies(store, SimulatedBucket(objects), grace_s=1.0)
        copies.push()
        clock.now_s += 10.0
        copies.level._collect_s = float("-inf")
        copies.step()
        read_view(SimulatedBucket(objects))
    root = store.directory.root.parent / "restored"
    restore(SimulatedBucket(objects), root)
    assert rows_of(open_store("restored", settings=QUIET)) == rows_of(store)


def test_a_backup_deletes_what_the_one_before_left(open_store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, objects = Clock(), Objects()
    monkeypatch.setattr(copying, "Env", lambda: clock)
    settings, sizes = RemoteSettings("memory://test", grace_s=100.0), []
    for day in range(8):
        with open_store(settings=QUIET, retain=0) as store:
            rows = pa.table({"k": list(range(2000)), "n": [day] * 2000})
            store.append("counts", t=day, rows=rows, key=["k"])
            store.seal(day)
            store.compact()
        copying.copy_directory(store.directory.root, SimulatedBucket(objects), settings)
        clock.now_s, clock.wall_s = 0.0, clock.wall_s + 86_400.0  # another process, another day
        sizes.append(sum(map(len, objects.by_name.values())))
    assert max(sizes[4:]) <= 1.3 * sizes[3]
    assert restore(SimulatedBucket(objects), store.directory.root.parent / "restored").epoch == 7
