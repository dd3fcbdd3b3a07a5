"""A store that is restored lazily: it opens at once, reads what is asked for, goes on, and is whole in the end."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import nosync
from nosync.lsm.errors import CorruptionError, StorageError
from nosync.lsm.model.timestamp import pack
from nosync.lsm.node.node import Node
from nosync.lsm.platform.env import Env
from nosync.lsm.store.backup import backup as back_up
from nosync.lsm.store.opening import open_store as open_directory
from nosync.replication.client.location import StoreLocation
from nosync.replication.client.location import open_directory as open_for_task
from nosync.replication.remote import hydration
from nosync.replication.remote.cloud import open_bucket
from nosync.replication.remote.hydration import Hydration, fetch_rest
from nosync.replication.remote.restore import restore
from nosync.replication.remote.status import bucket_status
from nosync.replication.remote.stub_env import StubEnv
from nosync.replication.remote.stubs import env_of, is_lazy, stub_names, stub_path
from nosync.testing.daemon_cluster import eventually
from nosync.testing.simulated_bucket import Fault, Objects, SimulatedBucket, no_fault
from tests.conftest import OpenStore
from tests.helpers.killed import Dies, KilledAt
from tests.helpers.remotes import QUIET, Copies, epochs, rows_of

BIG_ROWS = 20_000
KEPT = ("counts", "big")


class Restored:
    """A store whose copies are in a bucket, and a directory that is to be restored from there."""

    def __init__(self, store: nosync.Store, target: Path) -> None:
        self.objects = Objects()
        self.store, self.target, self.fault = store, target, no_fault
        self.bucket = SimulatedBucket(self.objects, self._faults)
        self.copies = Copies(store, self.bucket, flush_bytes=40_000, large_bytes=20_000)

    def _faults(self, call: str, name: str) -> Fault:
        return self.fault(call, name)

    def push(self) -> None:
        self.copies.push()

    def restore(self, **options: object) -> None:
        self.report = restore(self.bucket, self.target, lazy=True, **options)  # type: ignore[arg-type]

    def open(self, **options: object) -> nosync.Store:
        env = StubEnv(self.target, self.bucket)
        return open_directory(self.target, settings=QUIET, env=env, **options)  # type: ignore[arg-type]

    def names(self) -> set[str]:
        """Returns the layers that are still in the bucket."""
        return {str(name) for name in stub_names(self.target) if not (self.target / name).exists()}


def big(first: int = 0, rows: int = BIG_ROWS) -> pa.Table:
    return pa.table({"k": [f"big{first + i}" for i in range(rows)], "n": np.arange(rows)})


@pytest.fixture
def made(open_store: OpenStore, tmp_path: Path) -> Restored:
    store = open_store("original", settings=QUIET)
    one = Restored(store, tmp_path / "new")
    store.append("big", t=0, rows=big(), key=["k"])
    for t in range(6):
        if t:
            store.append("big", t=t, rows=big(0, 10), key=["k"])
        store.append("counts", t=t, rows=pa.table({"k": [f"a{t}", "all"], "n": [t, t]}), key=["k"])
        store.seal(t)
    store.pin("three", 3)
    store.sync()
    one.push()
    return one


def test_it_opens_without_its_layers_and_reads_what_the_original_does(made: Restored) -> None:
    made.restore()
    assert (made.report.epoch, made.report.lazy_layers) == (5, 12)
    assert made.report.fetched_bytes < made.report.bytes / 10
    assert not list((made.target / "layers").rglob("*.layer"))
    with made.open() as store:
        assert (store.last_sealed(), store.safe_point(), store.missing()) == (5, 5, [])
        assert len(made.names()) == 12
        assert rows_of(store) == rows_of(made.store)
        assert not any(name.startswith("layers/counts") for name in made.names())
        for t in range(6):
            assert rows_of(store, as_of=t) == rows_of(made.store, as_of=t)
        assert rows_of(store, "big") == rows_of(made.store, "big")
        assert store.pins() == {"three": 3}
        assert store.status().problems == {}


def test_of_a_large_layer_the_blocks_are_fetched_that_are_read(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store("original", settings=replace(QUIET, block_rows=1024))
    one = Restored(store, tmp_path / "new")
    for t in range(2):
        store.append("big", t=t, rows=big(t * BIG_ROWS // 2, BIG_ROWS // 2), key=["k"])
        store.seal(t)
    store.compact()
    one.push()
    one.restore()
    with one.open() as lazy:
        env = lazy.directory.env
        assert isinstance(env, StubEnv)
        found = lazy.lookup("big", pa.table({"k": ["big12345"]}))
        assert found["n"].to_pylist() == [2345]
        assert 0 < env.fetcher.bytes < one.report.lazy_bytes / 5
        assert one.names()
        assert rows_of(lazy, "big") == rows_of(store, "big")
        assert env.fetcher.bytes < one.report.lazy_bytes * 1.05  # no block came twice


def test_it_goes_on_before_its_layers_came_and_copies_go_on_too(made: Restored) -> None:
    made.restore()
    with made.open() as store:
        assert isinstance(store.node, Node)
        copies = Copies(store, made.bucket, flush_bytes=40_000, large_bytes=20_000)
        epochs(store, range(6, 9), stages=KEPT, mark="new")
        copies.push()
        assert bucket_status(made.bucket).branches["main"] == 8
        assert (store.safe_point(), rows_of(store)["new8"]) == (8, 8)
        assert made.names()  # it did not wait for them
        store.node.merge_once()
        copies.push()
        expected = {t: rows_of(store, as_of=t) for t in range(9)}
    shutil.rmtree(made.target)
    restore(made.bucket, made.target)
    with made.open() as store:
        assert {t: rows_of(store, as_of=t) for t in range(9)} == expected


def hydrate(store: nosync.Store) -> None:
    assert isinstance(store.node, Node)
    rest = Hydration(store.node)
    rest._run()


def test_in_the_end_it_is_a_store_as_any_other(made: Restored) -> None:
    made.restore()
    with made.open() as store:
        hydrate(store)
        store.sync()
        assert made.names() == set()
        assert not (made.target / "stubs").exists()
        assert not (made.target / "stubs.json").exists()
        made.fault = lambda call, name: "before"  # the bucket is not asked any more
        store.compact()
        assert rows_of(store, "big") == rows_of(made.store, "big")
        assert {layer.rows for layer in store.layers() if layer.stage == "big"} == {BIG_ROWS + 50}
    assert type(env_of(made.target)) is Env
    assert json.loads((made.target / "NOSYNC").read_text())["nosync_store"] == 1
    with nosync.open(made.target, settings=QUIET) as store:
        assert store.verify().ok
        assert rows_of(store) == rows_of(made.store)


def test_the_newest_come_first(made: Restored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hydration, "_THREADS", 1)
    made.restore()
    seen: list[str] = []
    with made.open() as store:
        assert isinstance(store.node, Node)
        rest = Hydration(store.node)
        came = rest._came
        monkeypatch.setattr(rest, "_came", lambda name: (seen.append(str(name)), came(name)))
        rest._run()
    assert len(seen) == 12
    assert seen[-1].endswith("/0-1-0.layer")


@pytest.mark.parametrize("number", range(0, 60, 3))
def test_one_that_ends_in_the_middle_goes_on(made: Restored, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process dies at any change of the disk."""
    made.restore()
    with monkeypatch.context() as patch:
        patch.setattr(hydration, "Env", lambda: KilledAt(number))
        with suppress(Dies):
            fetch_rest(made.target, made.bucket, lambda done, of: None)
    with made.open() as store:
        assert store.missing() == []
        assert rows_of(store, "big") == rows_of(made.store, "big")
        assert rows_of(store) == rows_of(made.store)
        assert store.safe_point() == 5
    fetch_rest(made.target, made.bucket, lambda done, of: None)
    with nosync.open(made.target, settings=QUIET) as store:
        assert store.verify().ok


def test_a_file_that_was_torn_by_a_power_cut_is_fetched_again(made: Restored) -> None:
    made.restore()
    with made.open() as store:
        rows_of(store)  # they have names now, and were not synced
    torn = made.target / "layers/counts/raw/0/3-4-0.layer"
    assert stub_path(made.target, "layers/counts/raw/0/3-4-0.layer").exists()
    torn.write_bytes(b"")
    with made.open() as store:
        assert (store.safe_point(), store.missing()) == (5, [])
        assert rows_of(store, as_of=3) == rows_of(made.store, as_of=3)


def test_what_the_writer_merged_and_collected_meanwhile_is_found(made: Restored) -> None:
    """A bucket may have a writer that goes on, so objects go."""
    made.restore()
    made.store.unpin("three")
    epochs(made.store, range(6, 8), stages=KEPT)
    made.store.compact()
    made.push()
    packs = [name for name in made.objects.by_name if "/packs/" in name or "/objects/" in name]
    used = {place.object for place in made.copies.contents().places.values()}
    for name in packs:  # what a collection does once the grace is over
        if name.rpartition("/")[0] not in used and name not in used and "/index/" not in name:
            made.objects.by_name.pop(name)
    expected = rows_of(made.store, as_of=5), rows_of(made.store, "big", as_of=5)
    with made.open() as store:
        assert (rows_of(store), rows_of(store, "big")) == expected
        hydrate(store)
        assert (rows_of(store), rows_of(store, "big")) == expected
        assert store.missing() == []


def test_what_is_in_no_object_any_more_is_lost_and_said(made: Restored) -> None:
    made.restore()
    name = "layers/counts/raw/0/3-4-0.layer"
    contents = made.copies.contents().places[name]
    data = bytearray(made.objects.by_name[contents.object])
    data[contents.offset + 200] ^= 1
    made.objects.by_name[contents.object] = bytes(data)
    with made.open() as store:
        with pytest.raises(CorruptionError, match=rf"packs/.*: {name}"):
            rows_of(store, as_of=3)
        assert isinstance(store.node, Node)
        rest = Hydration(store.node)
        rest._closing.wait = lambda pause_s: rest._closing.set()  # type: ignore[assignment, func-returns-value]
        rest._run()
        assert name in store.node.problems["lazy restore"]
        assert made.names() == {name}  # all others came


def test_a_damaged_stub_is_written_anew(made: Restored) -> None:
    made.restore()
    path = stub_path(made.target, "layers/counts/raw/0/3-4-0.layer")
    path.write_bytes(path.read_bytes().replace(b"1", b"2"))
    with made.open() as store:
        assert rows_of(store) == rows_of(made.store)


def test_a_bucket_that_is_away_is_asked_again(made: Restored) -> None:
    made.restore()
    calls = [0]

    def fault(call: str, name: str) -> Fault:
        calls[0] += 1
        return "before" if calls[0] < 20 else ""

    with made.open() as store:
        assert isinstance(store.node, Node)
        made.fault = fault
        rest = Hydration(store.node)
        rest._closing.wait = lambda pause_s: None  # type: ignore[assignment, method-assign]
        rest._run()
        assert made.names() == set()
        assert "lazy restore" not in store.node.problems


def test_who_does_not_see_stubs_is_refused(made: Restored) -> None:
    made.restore()
    assert json.loads((made.target / "NOSYNC").read_text())["nosync_store"] == 2, "earlier versions refuse it"
    for call in (
        lambda: open_directory(made.target, read_only=True),
        lambda: open_directory(made.target),
        lambda: back_up(made.target, made.target.parent / "copy"),
    ):
        with pytest.raises(StorageError, match=r"restored with --lazy.*nosync restore memory://simulated"):
            call()


def test_retention_and_dropped_branches_need_no_bytes(made: Restored) -> None:
    made.restore()
    with made.open(retain=2) as store:
        store.unpin("three")
        epochs(store, range(6, 9), stages=KEPT)
        made.fault = lambda call, name: "before"
        store.rewind(7, keep_as="other")
        store.delete_branch("other")
        assert isinstance(store.node, Node)
        store.node.collect_garbage()


def test_as_of_an_earlier_epoch(made: Restored) -> None:
    made.restore(as_of=2)
    with made.open() as store:
        assert store.last_sealed() == 2
        epochs(store, range(3, 5), stages=KEPT, mark="again")
        hydrate(store)
        assert rows_of(store, as_of=2) == rows_of(made.store, as_of=2)
        assert rows_of(store)["again4"] == 4


# --- as a user does it ------------------------------------------------------------------------------------------------


@pytest.fixture
def url(made: Restored, tmp_path: Path) -> str:
    url = f"file://{tmp_path}/bucket"
    copies = Copies(made.store, open_bucket(url), flush_bytes=40_000, large_bytes=20_000)
    copies.push()
    return url


def test_an_open_store_fetches_the_rest_by_itself(made: Restored, url: str, tmp_path: Path) -> None:
    target = tmp_path / "lazy"
    restore(open_bucket(url), target, lazy=True)
    with nosync.open(target) as store:
        eventually("everything is here", lambda: not is_lazy(target))
        assert rows_of(store, "big") == rows_of(made.store, "big")
        assert store.missing() == []
    assert type(env_of(target)) is Env


def test_a_task_reads_what_is_in_the_bucket(made: Restored, url: str, tmp_path: Path) -> None:
    target = tmp_path / "lazy"
    restore(open_bucket(url), target, lazy=True)
    directory = open_for_task(StoreLocation(str(target), 128))
    (trace,) = directory.traces("counts")
    found = directory.trace(trace, until=pack(6), as_of=pack(5))
    assert len(found.layers) == 6
    assert (target / "layers/counts/raw/0/3-4-0.layer").exists()
    assert stub_path(target, "layers/counts/raw/0/3-4-0.layer").exists()  # its node makes it durable first
