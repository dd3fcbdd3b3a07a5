"""What is discarded, released or pinned while a merge, or a look at the directory, is under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pytest

import nosync
from nosync.lsm.compaction.merge import Merge
from nosync.lsm.errors import StorageError
from nosync.lsm.facts.pins import Pin, Pins
from nosync.lsm.layers.writer import arrange
from nosync.lsm.manifests.sealing import Sealer
from nosync.lsm.model.layer import Description, LayerId, Shard, TraceId
from nosync.lsm.model.timestamp import Time, pack
from nosync.lsm.node.node import Node
from nosync.lsm.platform.env import Env
from nosync.lsm.platform.store_marker import create_store
from nosync.lsm.settings import StoreSettings
from nosync.lsm.trace.directory import LayerDirectory
from nosync.testing import FaultyEnv
from tests.conftest import OpenStore

EPOCHS = 8


def filled(store: nosync.Store, epochs: range = range(EPOCHS)) -> nosync.Store:
    for t in epochs:
        store.append("c", t=t, rows=pa.table({"k": [1, 2], "v": [t, t]}), key=["k"])
        store.seal(t)
    store.sync()
    return store


def merging(store: nosync.Store, monkeypatch: pytest.MonkeyPatch) -> threading.Thread:
    """Begins a merge, which takes two seconds more unless it is abandoned."""
    begun, steps = threading.Event(), Merge.steps

    def slowly(self: Merge) -> Iterator[Any]:
        begun.set()
        for _ in range(400):
            time.sleep(0.005)  # not a wait: the merge is slow, so that it cannot end before what is done meanwhile
            yield
        yield from steps(self)

    monkeypatch.setattr(Merge, "steps", slowly)
    thread = threading.Thread(target=store.node.merge_once)
    thread.start()
    assert begun.wait(30)
    return thread


def descriptions(store: nosync.Store) -> list[Description]:
    (trace,) = store.directory.traces("c")
    return store.directory.descriptions(trace)


def test_a_merge_that_runs_while_layers_are_discarded_does_not_bring_them_back(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(open_store())
    merge = merging(store, monkeypatch)
    store.node.discard([], [PurePosixPath("manifests/main/3.json")])
    merge.join()
    store.node.make_durable_now()
    assert all(d.upper <= pack(3) for d in descriptions(store))
    assert store.last_sealed() == 2
    assert set(store.read("c").column("v").to_pylist()) == {2}


def test_a_merge_that_runs_while_a_line_is_dropped_leaves_nothing_of_it(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(open_store())
    merge = merging(store, monkeypatch)
    store.rewind(1, keep_as="")
    merge.join()
    store.node.make_durable_now()
    store.node.collect_garbage()
    assert all(d.upper <= pack(2) for d in descriptions(store))


def test_a_merge_of_layers_that_went_meanwhile_goes_as_well(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(open_store())
    steps = Merge.steps

    def then_forgotten(self: Merge) -> Iterator[Any]:
        yield from steps(self)
        store.node.scan()  # its file is there already, and does not count before it stands for others
        store.node.parts.garbage.forget([layer.id for layer in self.layers[1:]])

    monkeypatch.setattr(Merge, "steps", then_forgotten)
    assert store.node.merge_once()
    monkeypatch.undo()
    store.node.make_durable_now()
    store.node.collect_garbage()
    assert all(d.upper == Time(d.lower + pack(1)) for d in descriptions(store))
    assert {id.description for id in store.node.durable_ids()} == set(descriptions(store))


def test_a_merge_whose_edit_of_the_catalog_failed_stands_for_its_inputs_when_it_is_found(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(open_store())

    def failing(*_: object) -> None:
        raise StorageError("no space is left")

    with monkeypatch.context() as patched:
        patched.setattr(store.node.parts.layers, "apply", failing)
        assert not store.node.merge_once()
    store.node.make_durable_now()
    store.node.collect_garbage()
    there = descriptions(store)
    assert len(there) < EPOCHS
    assert sum(d.upper - d.lower for d in there) == EPOCHS * pack(1)  # none lies in another
    assert {id.description for id in store.node.durable_ids()} == set(there)
    assert set(store.read("c").column("v").to_pylist()) == {EPOCHS - 1}


def test_traces_are_looked_at_once_and_in_order_however_many_there_are(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    for t in range(6):
        for shard in range(30):
            store.append("c", shard=shard, t=t, rows=pa.table({"k": [1], "v": [t]}), key=["k"])
        store.seal(t)
    store.sync()
    compared: list[int] = []
    monkeypatch.setattr(TraceId, "__lt__", lambda a, b: compared.append(1) or a.shard < b.shard)  # type: ignore[func-returns-value]
    merged = 0
    while store.node.merge_once():
        merged += 1
    assert merged >= 30
    assert len(compared) < 30 * 30  # and not each time for each of them


def test_where_keys_of_a_trace_may_begin(open_store: OpenStore) -> None:
    """Against the definition, for stages whose callers place keys, and after another number of shards."""
    store = open_store()
    begins = {("a", 0): 0, ("a", 1): 1, ("b", 0): 2, ("b", 2): 3}
    for t in range(4):
        for (stage, shard), first in begins.items():
            if t >= first:
                store.append(stage, shard=shard, t=t, rows=pa.table({"k": [1]}), key=["k"])
        store.seal(t)
    lines = store.node.timelines
    known = lines._known
    counted = [TraceId("a", "f", Shard(0, 2)), TraceId("a", "g", Shard(1, 3))]
    for t, trace in enumerate(counted):
        known._origins[trace] = {pack(t + 3)}
    known._first_origins = None
    for trace in [*known._origins, TraceId("c", "f", Shard(0)), TraceId("b", "f", Shard(7))]:
        of_stage = {other: at for other, at in known._origins.items() if other.stage == trace.stage}
        shared = [
            min(at)
            for other, at in of_stage.items()
            if trace.shard.count or other.shard.count or trace.shard == other.shard
        ]
        assert lines.first_origin(trace) == min(shared, default=None)


def test_the_data_directory_is_synced_as_well(open_store: OpenStore) -> None:
    """A first branch makes a directory of its own, whose entry in the data directory must last."""
    env = FaultyEnv()
    store = filled(open_store(env=env))
    env.calls.clear()
    store.node.note_files([PurePosixPath("manifests/main/0.json")])
    store.node.small.sync([PurePosixPath("manifests/main/0.json")])
    assert ("sync_dir", store.directory.root) in env.calls


class Peers:
    """A listener that says what the test tells it: up to which epoch a peer is safe, and of which manifests there are
    copies.
    """

    def __init__(self, safe: int, compared: int) -> None:
        self.safe, self.compared = safe, compared

    def safe_elsewhere(self, _line: str) -> int:
        return self.safe

    def copies_of_file(self, path: PurePosixPath) -> int:
        return 2 if int(path.stem) <= self.compared else 0

    def copies(self, _entry: object) -> int:
        return 0

    def held_files(self, _paths: object) -> None:
        """Nothing comes of it."""


def test_what_is_safe_elsewhere_counts_up_to_where_manifests_were_compared(open_store: OpenStore) -> None:
    store = filled(open_store(), range(7))
    peers = Peers(safe=9, compared=4)
    store.node.safe_points.something_changed()
    store.node.announcer.listen(peers)  # type: ignore[assignment]
    assert store.safe_point() == 4  # the peer may have sealed other epochs 5 and 6
    peers.compared = 6
    assert store.safe_point() == 6
    peers.safe = 2
    assert store.safe_point() == 6  # told once, it holds
    store.node.announcer.listen(None)


def test_pins_are_read_before_history_is_released_for_epochs_that_others_sealed(tmp_path: Path) -> None:
    """A job beside a daemon pins an epoch, and goes on; the daemon sees the epochs first, or the pin."""
    asked: list[int] = []

    class Asking(Env):
        """While pins are listed, another thread asks from where on history is kept."""

        def list_dir(self, path: Path) -> list[str]:
            if path.name == "pins" and is_asked:
                is_asked.clear()
                asking.start()
                asking.join(0.3)  # not a wait: nothing is answered before the list is there
            return super().list_dir(path)

    is_asked: list[bool] = []
    directory = LayerDirectory(tmp_path / "store", 16, Asking())
    settings = StoreSettings(background=False, retain=3)
    marker = create_store(directory.root, 16, directory.env, store_id="s")
    node = Node(directory, marker, settings, replicated=True)
    asking = threading.Thread(target=lambda: asked.append(node.since()))
    beside = LayerDirectory(directory.root, 16)
    trace = TraceId("c", "raw", Shard(0))

    def seal(epochs: range) -> None:
        for t in epochs:
            id = LayerId(trace, Description.of_epoch(t))
            beside.publish(id, arrange(pa.table({"k": [1]}), ["k"], whose="c"))
            Sealer(beside, 1).seal(t, [id], "main", None, None)

    seal(range(8))
    node.learn()
    Pins(directory.root, Env()).publish(Pin(4, "p"))
    seal(range(8, 14))
    is_asked.append(True)
    node.learn()
    asking.join()
    assert asked == [pack(4)]
    node.abandon()
