"""Objects that somebody deleted, or cut: found out, told, and put again by the node that has what was in them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from nosync.lsm.errors import CorruptionError, RemoteError
from nosync.lsm.platform.env import Env
from nosync.replication.remote.copying import copy_directory
from nosync.replication.remote.node_listing import NodeListing
from nosync.replication.remote.presence import find_gone
from nosync.replication.remote.restore import restore
from nosync.replication.remote.settings import RemoteSettings
from nosync.replication.remote.status import bucket_status
from nosync.testing.simulated_bucket import Objects, SimulatedBucket
from tests.conftest import OpenStore
from tests.helpers.remotes import NAMES, QUIET, Copies, epochs, rows_of

LARGE_BYTES = 2000


class Clock(Env):
    """A clock that the test moves."""

    now_s = 1000.0

    def monotonic_s(self) -> float:
        return self.now_s


def filled(open_store: OpenStore, objects: Objects, clock: Clock, name: str = "store") -> Copies:
    """A store of which the bucket has packs before and after an index, and layers in parts of their own."""
    store = open_store(name, settings=QUIET, env=clock)
    copies = Copies(store, SimulatedBucket(objects), large_bytes=LARGE_BYTES, grace_s=100.0)
    for t in range(24):
        epochs(store, range(t, t + 1), stages=("counts", "others"))
        if t == 12:
            store.node.create_branch("side", "main", 10)  # type: ignore[attr-defined]
            store.pin("early", 3)
        if t == 18:
            store.compact()
        copies.push()
        if t == 20:
            clock.now_s += 1000.0
            copies.step()
            assert copies.level._uploader is not None
            assert copies.level._uploader.writer.index_at == copies.contents().at
    return copies


def names_of(open_store: OpenStore) -> list[str]:
    """What a bucket has of such a store, but for claims."""
    objects = Objects()
    filled(open_store, objects, Clock(), "looked-at").store.close()
    return [name for name in sorted(objects.by_name) if "/claims/" not in name and "/unneeded/" not in name]


@pytest.mark.parametrize("keeps", [None, 0.5, 0.999], ids=["deleted", "cut", "without its end"])
def test_each_object_that_goes_is_put_again(open_store: OpenStore, tmp_path: Path, keeps: float | None) -> None:
    names = names_of(open_store)
    kinds = {name.split("/")[2] if name.startswith("nodes/") else name for name in names}
    assert kinds == {"NOSYNC.json", "index", "objects", "packs"}
    objects, clock = Objects(), Clock()
    copies = filled(open_store, objects, clock)
    before = rows_of(copies.store), rows_of(copies.store, "counts", as_of=3)
    for n, name in enumerate(names):
        if name not in objects.by_name or name == "NOSYNC.json":
            continue
        whole = objects.by_name.pop(name)
        if keeps is not None:
            objects.by_name[name] = whole[: int(len(whole) * keeps)]
        clock.now_s += 1000.0
        copies.step()
        copies.push()
        assert not find_gone(copies.bucket, copies.contents(), NodeListing.of(copies.bucket, NAMES).sizes)
        target = tmp_path / f"restored-{n}"
        report = restore(SimulatedBucket(objects), target)
        assert (report.epoch, report.problems) == (23, ()), name
        restored = open_store(target.name, settings=QUIET)
        assert (rows_of(restored), rows_of(restored, "counts", as_of=3)) == before, name
        restored.close()


def test_what_is_gone_is_not_safe_until_it_is_put_again(open_store: OpenStore) -> None:
    objects, clock = Objects(), Clock()
    copies = filled(open_store, objects, clock)
    assert copies.level.status().safe_point == 23
    held = copies.contents()
    last = held.placed("manifests/main/23.json") or held.placed("manifests/23.json")
    gone = [name for name in objects.by_name if "/objects/" in name] + ([] if last is None else [last.place.object])
    for name in gone:
        del objects.by_name[name]
    is_refusing = True
    copies.bucket._fault = lambda call, name: "before" if call == "put" and is_refusing else ""  # type: ignore[attr-defined]
    clock.now_s += 1000.0
    copies.step()
    assert (copies.level.status().safe_point or -1) < 23
    is_refusing = False
    clock.now_s += 1000.0
    copies.push()
    assert copies.level.status().safe_point == 23
    assert bucket_status(copies.bucket).problems == ()


def test_a_listing_that_lags_is_not_believed(open_store: OpenStore) -> None:
    objects, clock = Objects(), Clock()
    copies = filled(open_store, objects, clock)
    packs = copies.level.status().packs
    copies.bucket._list_lag = lambda: 8  # type: ignore[attr-defined]
    clock.now_s += 1000.0
    copies.step()
    assert copies.level.status().packs == packs


def test_status_and_backup_say_what_is_gone(open_store: OpenStore, tmp_path: Path) -> None:
    objects, clock = Objects(), Clock()
    copies = filled(open_store, objects, clock)
    root, bucket = copies.store.directory.root, copies.bucket
    copies.store.close()
    name = next(name for name in sorted(objects.by_name) if "/packs/" in name and name in copies.contents().in_use())
    del objects.by_name[name]
    (problem,) = bucket_status(bucket).problems
    assert f"memory://simulated/{name} is gone" in problem
    assert "lifecycle rule" in problem
    with pytest.raises(RemoteError, match=name):
        restore(bucket, tmp_path / "restored")
    report = copy_directory(root, bucket, RemoteSettings("memory://simulated"))
    assert report.epoch == 23
    assert name in report.gone[0]
    assert bucket_status(bucket).problems == ()
    assert restore(bucket, tmp_path / "restored").epoch == 23


def test_which_store_it_is_can_be_put_again(open_store: OpenStore, tmp_path: Path) -> None:
    objects, clock = Objects(), Clock()
    copies = filled(open_store, objects, clock)
    store = copies.store
    objects.by_name["NOSYNC.json"] = b"{"
    with pytest.raises(CorruptionError, match="delete this object alone"):
        bucket_status(copies.bucket)
    del objects.by_name["NOSYNC.json"]
    again = Copies(store, copies.bucket)
    again.push()
    assert restore(copies.bucket, tmp_path / "restored").epoch == 23


@pytest.mark.parametrize("is_lost", [False, True], ids=["it mends", "it is lost"])
def test_what_is_gone_of_one_node_is_put_by_another(open_store: OpenStore, tmp_path: Path, is_lost: bool) -> None:
    objects, clock = Objects(), Clock()
    first = open_store("first", settings=QUIET, env=clock)
    epochs(first, range(10))
    first.close()
    shutil.copytree(first.directory.root, tmp_path / "second")
    stores = [open_store(name, settings=QUIET, env=clock) for name in ("first", "second")]
    one, other = (
        Copies(store, SimulatedBucket(objects), f"n{n}", grace_s=100.0) for n, store in enumerate(stores, start=1)
    )
    one.push()
    for copies, store in ((other, stores[1]), (one, stores[0])):
        epochs(store, range(10, 12))
        copies.push()
    assert one.level.status().safe_point == other.level.status().safe_point == 11
    mine = [name for name in sorted(objects.by_name) if name.startswith("nodes/n1/packs/")]
    for name in mine:
        del objects.by_name[name]
    clock.now_s += 1000.0
    if not is_lost:
        one.step()
        one.push()
    other.step()
    other.push()
    clock.now_s += 1000.0
    other.step()
    other.push()
    report = restore(SimulatedBucket(objects), tmp_path / "restored")
    assert report.epoch == 11
    assert rows_of(open_store("restored", settings=QUIET)) == rows_of(stores[1])
