"""Whatever files are lost around a merge: what is recovered then is still there when the merge's garbage is gone."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

import nosync
from nosync.job.recovery_planner import RecordedCells
from nosync.lsm.layers.writer import arrange
from nosync.lsm.model.layer import Description, LayerId, Shard, TraceId
from nosync.lsm.model.timestamp import ZERO, pack
from nosync.lsm.platform.env import Env
from nosync.lsm.trace.presence import live
from tests.helpers.depth import examples

GRACE_S = 100.0
STAGES = ("one", "two")


class Clock(Env):
    """A clock that tests set forward."""

    now_s = 0.0

    def monotonic_s(self) -> float:
        return self.now_s


def rows_of(stage: str, t: int) -> pa.Table:
    """An epoch's rows: every key is written again, so that merging drops history."""
    return pa.table({"k": range(5), "v": [100 * len(stage) + t] * 5})


@contextmanager
def opened(epochs: int, merges: int, retain: int | None) -> Iterator[tuple[nosync.Store, Clock]]:
    """A store of sealed epochs, where a merge was done after as many epochs as there are merges, at most one after each."""
    env = Clock()
    settings = nosync.StoreSettings(background=False, grace_s=GRACE_S, retry_s=0.0, retain=retain)
    with tempfile.TemporaryDirectory() as root, nosync.open(Path(root) / "store", env=env, settings=settings) as store:
        for t in range(epochs):
            for stage in STAGES:
                store.append(stage, t=t, rows=rows_of(stage, t), key=["k"])
            store.seal(t)
            store.sync()
            for _ in range(merges):
                store.node.merge_once()
        yield store, env


def publish_again(store: nosync.Store, id: LayerId, t: int) -> None:
    """What the task of a recovery does: it knows the directory and no node."""
    arranged = arrange(rows_of(id.trace.stage, t), ["k"], whose="", hasher=store.directory.hasher)
    store.directory.publish(id, arranged)


def recover(store: nosync.Store) -> None:
    """Publishes what is missing and is not recorded, as the planner decides that."""
    missing = store.missing()
    inventory = RecordedCells(store.directory.descriptions, store.node.since())
    for m in missing:
        if inventory.layer_at(m.entry.id.trace, m.t) is None:
            publish_again(store, m.entry.id, m.t)
    store.sync()


def state(store: nosync.Store, stage: str, t: int) -> list[tuple[int, int]]:
    table = store.read(stage, as_of=t)
    return sorted(zip(table["k"].to_pylist(), table["v"].to_pylist(), strict=True))


@settings(max_examples=examples(60))
@given(
    epochs=st.integers(5, 12),
    merges=st.integers(1, 2),
    retain=st.sampled_from([None, 2]),
    lost=st.lists(st.integers(0, 100), max_size=12),
    all_of_one=st.booleans(),
    late=st.booleans(),
)
def test_what_was_recovered_stays(
    epochs: int, merges: int, retain: int | None, lost: list[int], all_of_one: bool, late: bool
) -> None:
    """`late`: files are lost after the grace period, and the node has not looked since."""
    with opened(epochs, merges, retain) as (store, env):
        files = sorted((store.directory.root / "layers").rglob("*.layer"))
        gone = {files[n % len(files)] for n in lost}
        gone |= {path for path in files if all_of_one and "one" in path.parts}
        for path in gone:
            path.unlink()
        if late:
            env.now_s += 2 * GRACE_S
            store.node.collect_garbage()
        recover(store)
        env.now_s += 2 * GRACE_S
        store.node.collect_garbage()
        assert store.missing() == []
        oldest = store.since()
        for stage, t in itertools.product(STAGES, range(oldest, epochs)):
            assert state(store, stage, t) == [(k, 100 * len(stage) + t) for k in range(5)]


def test_all_files_of_a_stage_beside_a_merge() -> None:
    """What is published again under names that wait for their grace to end is no garbage."""
    with opened(6, 1, None) as (store, env):
        merged = [id for id in store.directory.layer_ids() if not id.is_fresh]
        assert merged, "no merge was done: this test shows nothing"
        for path in (store.directory.root / "layers" / "one").rglob("*.layer"):
            path.unlink()
        recover(store)
        env.now_s += 2 * GRACE_S
        store.node.collect_garbage()
        assert state(store, "one", 5) == [(k, 305) for k in range(5)]


def test_a_lost_merged_layer_gives_back_what_it_replaced() -> None:
    """Nothing needs to be computed: the files are there until their grace ends, and longer now."""
    with opened(6, 1, None) as (store, env):
        merged = [id for id in store.directory.layer_ids() if not id.is_fresh]
        for id in merged:
            store.directory.path_of(id).unlink()
        env.now_s += 2 * GRACE_S
        store.node.collect_garbage()  # right now, before anybody looked
        store.sync()
        assert store.missing() == []
        assert [state(store, "one", t)[0] for t in range(6)] == [(0, 300 + t) for t in range(6)]


def test_replaced_layers_are_removed_while_the_merged_one_is_there() -> None:
    with opened(6, 1, None) as (store, env):
        before = len(store.directory.layer_ids())
        env.now_s += 2 * GRACE_S
        store.node.collect_garbage()
        assert len(store.directory.layer_ids()) < before


def _d(lower: int, upper: int, since: int = 0) -> Description:
    return Description(pack(lower), pack(upper), pack(since) if since else ZERO)


def test_live_layers_are_those_that_no_merged_one_replaces() -> None:
    fresh = [_d(t, t + 1) for t in range(6)]
    assert live([*fresh, _d(0, 4)], ZERO) == [*fresh[4:], _d(0, 4)]
    assert live([*fresh, _d(0, 4, 3)], pack(3)) == [*fresh[4:], _d(0, 4, 3)]
    # What was compacted further than history may go has less in it than what it stands for.
    assert live([*fresh, _d(0, 4, 3)], pack(2)) == [*fresh, _d(0, 4, 3)]
    # Of two of one range the one with more history stays, and of one range and frontier there is one name.
    assert live([_d(0, 4), _d(0, 4, 3)], pack(3)) == [_d(0, 4)]
    assert live([], ZERO) == []


def test_the_planner_does_not_count_what_is_about_to_go() -> None:
    """The changes of an epoch that was merged away are not promised because its file still waits to be removed."""
    listed = [*(_d(t, t + 1) for t in range(6)), _d(0, 4, 3)]
    trace = TraceId("one", "code", Shard(0, 1))
    found = RecordedCells(lambda _: listed, pack(3)).layer_at(trace, 1)
    assert found == _d(0, 4, 3)
