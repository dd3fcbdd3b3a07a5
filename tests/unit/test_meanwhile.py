"""What is given up, let go of or pinned while a merge, or a look at the directory, is under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pytest

import nosync
from nosync.lsm.directory import LayerDirectory, create_store
from nosync.lsm.env import Env
from nosync.lsm.errors import StorageError
from nosync.lsm.layer import Description, LayerId, Shard, TraceId
from nosync.lsm.ledger import Ledger
from nosync.lsm.merge import Merge
from nosync.lsm.node import Node
from nosync.lsm.pins import Pin, publish_pin
from nosync.lsm.settings import StoreSettings
from nosync.lsm.timestamp import Time, pack
from nosync.lsm.writer import arrange
from tests.conftest import OpenStore

EPOCHS = 8


def filled(store: nosync.Store, epochs: range = range(EPOCHS)) -> nosync.Store:
    for t in epochs:
        store.append("c", t=t, rows=pa.table({"k": [1, 2], "v": [t, t]}), key=["k"])
        store.seal(t)
    store.sync()
    return store


def slow_merges(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Merges take two seconds from now on, unless they are abandoned. Is set by the first one that begins."""
    begun, steps = threading.Event(), Merge.steps

    def slowly(self: Merge) -> Iterator[Any]:
        begun.set()
        for _ in range(400):
            time.sleep(0.005)
            yield
        yield from steps(self)

    monkeypatch.setattr(Merge, "steps", slowly)
    return begun


def descriptions(store: nosync.Store) -> list[Description]:
    (trace,) = store.directory.traces("c")
    return store.directory.descriptions(trace)


def test_a_merge_that_runs_while_layers_are_given_up_does_not_bring_them_back(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(open_store())
    begun = slow_merges(monkeypatch)
    merging = threading.Thread(target=store.node.merge_once)
    merging.start()
    assert begun.wait(30)
    store.node.give_up([], [PurePosixPath("manifests/main/3.json")])
    merging.join()
    store.node.settle()
    assert all(d.upper <= pack(3) for d in descriptions(store))
    assert store.last_sealed() == 2
    assert set(store.read("c").column("v").to_pylist()) == {2}


def test_a_merge_that_runs_while_a_line_is_dropped_leaves_nothing_of_it(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(open_store())
    begun = slow_merges(monkeypatch)
    merging = threading.Thread(target=store.node.merge_once)
    merging.start()
    assert begun.wait(30)
    store.rewind(1, keep_as="")
    merging.join()
    store.node.settle()
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
        store.node.forget([layer.id for layer in self.layers[1:]])

    monkeypatch.setattr(Merge, "steps", then_forgotten)
    assert store.node.merge_once()
    monkeypatch.undo()
    store.node.settle()
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
        patched.setattr(store.node, "_edit", failing)
        assert not store.node.merge_once()
    store.node.settle()
    store.node.collect_garbage()
    there = descriptions(store)
    assert len(there) < EPOCHS
    assert sum(d.upper - d.lower for d in there) == EPOCHS * pack(1)  # none lies in another
    assert {id.description for id in store.node.durable_ids()} == set(there)
    assert set(store.read("c").column("v").to_pylist()) == {EPOCHS - 1}


def test_pins_are_read_before_history_is_let_go_of_for_epochs_that_others_sealed(tmp_path: Path) -> None:
    """A job beside a daemon pins an epoch, and goes on; the daemon sees the epochs first, or the pin."""
    asked: list[int] = []

    class Asking(Env):
        """While pins are listed, another thread asks from where on history is kept."""

        def list_dir(self, path: Path) -> list[str]:
            if path.name == "pins" and is_asked:
                is_asked.clear()
                asking.start()
                asking.join(0.3)
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
            Ledger(beside).seal(t, [id], "main", None, None)

    seal(range(8))
    node.learn()
    publish_pin(directory.root, Pin(4, "p"), Env())
    seal(range(8, 14))
    is_asked.append(True)
    node.learn()
    asking.join()
    assert asked == [pack(4)]
    node.abandon()
