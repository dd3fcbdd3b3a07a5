"""While another process carries out a large merge, small ones go on beside it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

import nosync
from nosync.lsm.compaction.merge import Merge
from nosync.lsm.compaction.worker import OUT_OF_THE_WAY, MergeProcess
from nosync.lsm.layers.writer import Published
from nosync.lsm.node import compactor
from nosync.testing.daemon_cluster import eventually
from tests.conftest import OpenStore

LARGE_ROWS, KEYS = 600, 200
FIRST = 5
"""Epochs of all keys: the first four are enough for a large merge, and the newest is left alone."""


class HeldMerge:
    """Stands for the process that merges out of the way, and holds it until `go_on`. `nices`: of all that began."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.go_on, self.nices = threading.Event(), threading.Event(), list[int]()
        run_it = MergeProcess.run

        def run(
            process: MergeProcess, merge: Merge, stop: Callable[[], bool], *, pause_share: float = 0.0
        ) -> Published | None:
            self.nices.append(process._nice)
            self.began.set()
            while not self.go_on.wait(0.002):
                if stop():
                    return None
            return run_it(process, merge, stop)

        monkeypatch.setattr(MergeProcess, "run", run)


def put(store: nosync.Store, stage: str, t: int, rows: int) -> None:
    store.append(stage, t=t, rows=pa.table({"k": range(rows), "v": [t] * rows}), key=["k"])


def expected(t: int) -> dict[int, int]:
    """What `one` holds as of an epoch: its first ones have all keys, the others two."""
    return {k: t if k < 2 else min(t, FIRST - 1) for k in range(KEYS)}


def state(store: nosync.Store, t: int) -> dict[int, int]:
    rows = store.read("one", t)
    return dict(zip(rows.column("k").to_pylist(), rows.column("v").to_pylist(), strict=True))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 4] ^= 1
    path.write_bytes(data)


def spans(store: nosync.Store, stage: str) -> list[tuple[int, int]]:
    return sorted((layer.lower, layer.upper) for layer in store.layers() if layer.stage == stage)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> HeldMerge:
    monkeypatch.setattr(compactor, "LOOK_S", 0.01)
    return HeldMerge(monkeypatch)


@pytest.fixture
def store(open_store: OpenStore) -> nosync.Store:
    return open_store(settings=nosync.StoreSettings(background=False, merge_process_rows=LARGE_ROWS, grace_s=0.0))


@contextmanager
def merging(store: nosync.Store, held: HeldMerge) -> Iterator[None]:
    """Begins a large merge, of the first layers of `one`, and lets it end at the end of the `with`."""
    for t in range(FIRST):
        put(store, "one", t, KEYS)
        store.seal(t, fill_missing=True)
    store.sync()

    def merge() -> None:
        while store.node.merge_once():  # type: ignore[attr-defined]
            pass

    thread = threading.Thread(target=merge)
    thread.start()
    try:
        assert held.began.wait(10.0)
        yield
    finally:
        held.go_on.set()
        thread.join(30.0)
    assert not thread.is_alive()


def test_new_layers_do_not_pile_up_behind_a_large_merge(store: nosync.Store, held: HeldMerge) -> None:
    """More layers come than the node would let wait for that process."""
    last = FIRST + 60
    with merging(store, held):
        for t in range(FIRST, last):
            put(store, "one", t, 2)
            store.seal(t)
            if t % 4 == 0:
                store.sync()
                eventually("they are merged", lambda: len(store.layers()) < 24, 10.0)
        found = spans(store, "one")
        assert found[:5] == [(t, t + 1) for t in range(4)] + [(4, found[4][1])]
        assert [state(store, t) for t in range(last)] == [expected(t) for t in range(last)]
    assert held.nices == [OUT_OF_THE_WAY], "no process that hurries took its place"
    assert spans(store, "one")[0] >= (0, 4)
    assert [state(store, t) for t in range(last)] == [expected(t) for t in range(last)]
    assert store.verify().errors == ()


def test_other_traces_are_merged_meanwhile_and_large_ones_after_it(store: nosync.Store, held: HeldMerge) -> None:
    for t in range(FIRST):
        put(store, "small", t, 2)
        put(store, "zlarge", t, KEYS)
    with merging(store, held):
        eventually("the small one is merged", lambda: (0, 4) in spans(store, "small"), 10.0)
        assert spans(store, "zlarge") == [(t, t + 1) for t in range(FIRST)]
        assert held.nices == [OUT_OF_THE_WAY]
    assert spans(store, "one")[0] == spans(store, "zlarge")[0] == (0, 4)
    assert held.nices == [OUT_OF_THE_WAY] * 2


def test_a_pause_ends_all_of_them(store: nosync.Store, held: HeldMerge) -> None:
    """What is rewound is gone when that returns, whatever was being merged."""
    with merging(store, held):
        for t in range(FIRST, FIRST + 9):
            put(store, "one", t, 2)
            store.seal(t)
        store.sync()
        eventually("the later ones are merged", lambda: len(store.layers()) < FIRST + 6, 10.0)
        store.rewind(FIRST - 1, keep_as="")
        assert spans(store, "one")[:4] == [(t, t + 1) for t in range(4)], "the large one was abandoned"
    assert held.nices == [OUT_OF_THE_WAY]
    assert [state(store, t) for t in range(FIRST)] == [expected(t) for t in range(FIRST)]
    assert store.verify().errors == ()


def test_a_damaged_layer_is_looked_at_after_the_large_merge(store: nosync.Store, held: HeldMerge) -> None:
    for t in range(FIRST):
        put(store, "small", t, 2)
    with merging(store, held):
        eventually("the small one is merged", lambda: (0, 4) in spans(store, "small"), 10.0)
        for t in range(FIRST, FIRST + 4):
            for stage in ("one", "small"):
                put(store, stage, t, 2)
            store.seal(t)
            store.sync()
            if t == FIRST:  # the fourth one is what they are merged for
                of_small = [layer for layer in store.layers() if layer.stage == "small"]
                flip(victim := Path(max(of_small, key=lambda layer: layer.lower).path))
        eventually("the other one is merged", lambda: (FIRST - 1, FIRST + 3) in spans(store, "one"), 10.0)
        assert victim.exists()
        assert len(spans(store, "small")) == 1 + 5
    assert [missing.entry.id.trace.stage for missing in store.missing()] == ["small"]
    assert not victim.exists()
    assert [state(store, t) for t in range(FIRST + 4)] == [expected(t) for t in range(FIRST + 4)]
