"""Traces and merging against a dict that is edited one entry at a time."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nosync.lsm.columnar.hashing import Hasher, hash32
from nosync.lsm.columnar.ordering import order_by_key
from nosync.lsm.compaction.merge import Merge
from nosync.lsm.compaction.policy import FANOUT, LOG_FANOUT, Candidate, choose_merge, level_of
from nosync.lsm.errors import CompactedError, HoleError, NotAvailableError
from nosync.lsm.layers.writer import arrange
from nosync.lsm.model.layer import Description, LayerId, Shard, TraceId
from nosync.lsm.model.timestamp import Time, end_of, last_of, pack
from nosync.lsm.trace.cover import choose_cover
from nosync.lsm.trace.directory import LayerDirectory
from nosync.lsm.trace.trace import Trace
from tests.helpers.depth import examples
from tests.helpers.oracles import KEY_VALUES, State, colliding, state_of

TRACE = TraceId("s", "raw", Shard(0))
HASHERS = st.sampled_from([hash32, colliding])
KEYS = st.integers(0, 12)
EPOCH = st.fixed_dictionaries(
    {"rows": st.dictionaries(KEYS, st.integers(-9, 9), max_size=8), "deletes": st.sets(KEYS, max_size=4)}
)
HISTORY = st.lists(EPOCH, min_size=1, max_size=9)


class Recorded:
    """A trace on disk, and what it must say at every epoch."""

    def __init__(self, root: Path, hasher: Hasher, history: list[dict[str, Any]]) -> None:
        (root / "tmp").mkdir(parents=True)
        self.directory = LayerDirectory(root, 8, hasher=hasher)
        self.states: list[State] = [{}]
        for t, epoch in enumerate(history):
            deletes = sorted(epoch["deletes"] - epoch["rows"].keys())
            rows = pa.table(
                {"k": pa.array(epoch["rows"], pa.int64()), "v": pa.array(epoch["rows"].values(), pa.int64())}
            )
            arranged = arrange(
                rows, ["k"], whose="test", deletes=pa.table({"k": pa.array(deletes, pa.int64())}), hasher=hasher
            )
            self.directory.publish(LayerId(TRACE, Description.of_epoch(t)), arranged)
            state = dict(self.states[-1])
            for k in deletes:
                state.pop((k,), None)
            state |= {(k,): (v,) for k, v in epoch["rows"].items()}
            self.states.append(state)

    @property
    def epochs(self) -> int:
        return len(self.states) - 1

    def state(self, t: int) -> State:
        return self.states[t + 1]

    def trace(self, descriptions: list[Description]) -> Trace:
        layers = [self.directory.reader(LayerId(TRACE, d)) for d in descriptions]
        return Trace(TRACE, layers, self.directory.key_groups)

    def fresh(self) -> list[Description]:
        return [Description.of_epoch(t) for t in range(self.epochs)]


def _scan(trace: Trace, t: int) -> State:
    batches = trace.scan(last_of(t))
    return state_of(pa.Table.from_batches(batches, schema=trace.schema), ["k"])


def _check_reads(recorded: Recorded, trace: Trace, since: int) -> None:
    hasher = recorded.directory.hasher
    every_key = pa.array([7, *range(14), 3], pa.int64())  # twice, and in no order
    for t in range(since, recorded.epochs):
        expected = recorded.state(t)
        assert _scan(trace, t) == expected
        answer = trace.lookup([every_key], hasher([every_key]), last_of(t))
        found = [k for k, hit in zip(every_key.to_pylist(), answer.found, strict=True) if hit]
        assert found == [k for k in every_key.to_pylist() if (k,) in expected]
        assert answer.data.to_pylist() == [{"k": k, "v": expected[k,][0]} for k in found]


def _check_changes(recorded: Recorded, trace: Trace, since: int) -> None:
    for after in range(since, recorded.epochs):
        for until in range(after, recorded.epochs):
            state = dict(recorded.state(after))
            rows = trace.changes(last_of(after), last_of(until)).to_pylist()
            assert [row["_epoch"] for row in rows] == sorted(row["_epoch"] for row in rows)
            for previous, row in zip([None, *rows], rows, strict=False):
                key, value, kind = (row["k"],), (row["v"],), row["_change_type"]
                if kind in ("update_preimage", "delete"):
                    assert state.pop(key) == value
                elif kind == "update_postimage":
                    assert previous is not None
                    assert (previous["_change_type"], previous["k"]) == ("update_preimage", row["k"])
                    state[key] = value
                else:
                    assert key not in state
                    state[key] = value
            assert state == recorded.state(until)


@given(HISTORY, HASHERS)
def test_fresh_layers(history: list[dict[str, Any]], hasher: Hasher) -> None:
    with tempfile.TemporaryDirectory() as root:
        recorded = Recorded(Path(root) / "x", hasher, history)
        trace = recorded.trace(recorded.fresh())
        _check_reads(recorded, trace, 0)
        _check_changes(recorded, trace, 0)


@given(HISTORY, HASHERS, st.data())
@settings(max_examples=examples(150))
def test_any_merges_change_no_read_from_since_on(
    history: list[dict[str, Any]], hasher: Hasher, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as root:
        recorded = Recorded(Path(root) / "x", hasher, history)
        layers, since = recorded.fresh(), 0
        for _ in range(data.draw(st.integers(1, 4))):
            i = data.draw(st.integers(0, len(layers) - 1))
            j = data.draw(st.integers(i + 1, len(layers)))
            since = data.draw(st.integers(since, recorded.epochs - 1))
            if j - i == 1 and since == 0:
                continue
            trace = recorded.trace(layers[i:j])
            merge = Merge(
                recorded.directory.root,
                trace.layers,
                since=pack(since),
                bottom=i == 0,
                env=recorded.directory.env,
                block_rows=data.draw(st.integers(1, 6)),
            )
            if merge.id.description in layers:
                continue
            list(merge.steps())
            layers[i:j] = [merge.id.description]
        trace = recorded.trace(layers)
        for layer in trace.layers:
            layer.verify()
        _check_reads(recorded, trace, since)
        _check_changes(recorded, trace, since)


def test_a_full_merge_keeps_live_rows_only(tmp_path: Path) -> None:
    history = [{"rows": dict.fromkeys(range(12), t), "deletes": {t}} for t in range(8)]
    history.append({"rows": {}, "deletes": set(range(6))})
    recorded = Recorded(tmp_path / "x", hash32, history)
    layers = recorded.trace(recorded.fresh()).layers
    merge = Merge(recorded.directory.root, layers, since=pack(8), bottom=True, env=recorded.directory.env)
    list(merge.steps())
    assert merge.published.rows == len(recorded.state(8))
    middle = Merge(recorded.directory.root, layers[1:], since=pack(8), bottom=False, env=recorded.directory.env)
    list(middle.steps())
    (reader,) = recorded.trace([middle.id.description]).layers
    assert reader.info.tombstones == 6, "below a merge that is not at the bottom, deletes still hide older rows"


def test_what_was_compacted_stays_compacted(tmp_path: Path) -> None:
    """A later merge with a lower frontier (`retain` was raised) must not promise history that is gone."""
    recorded = Recorded(tmp_path / "x", hash32, [{"rows": {1: t}, "deletes": set()} for t in range(6)])
    env = recorded.directory.env
    first = Merge(
        recorded.directory.root, recorded.trace(recorded.fresh()[:4]).layers, since=pack(3), bottom=True, env=env
    )
    list(first.steps())
    layers = recorded.trace([first.id.description, *recorded.fresh()[4:]]).layers
    second = Merge(recorded.directory.root, layers, since=Time(0), bottom=True, env=env)
    list(second.steps())
    trace = recorded.trace([second.id.description])
    _check_reads(recorded, trace, 3)
    with pytest.raises(CompactedError):
        trace.scan(last_of(2))


def test_merging_is_deterministic(tmp_path: Path) -> None:
    history = [{"rows": {k: k * t for k in range(10)}, "deletes": {11}} for t in range(5)]
    files = []
    for name in ("a", "b"):
        recorded = Recorded(tmp_path / name, hash32, history)
        layers = recorded.trace(recorded.fresh()).layers
        merge = Merge(
            recorded.directory.root, layers, since=pack(2), bottom=True, env=recorded.directory.env, block_rows=4
        )
        list(merge.steps())
        files.append(recorded.directory.path_of(merge.id).read_bytes())
    assert files[0] == files[1]


def test_an_abandoned_merge_leaves_nothing(tmp_path: Path) -> None:
    recorded = Recorded(
        tmp_path / "x", hash32, [{"rows": dict.fromkeys(range(50), t), "deletes": set()} for t in range(3)]
    )
    layers = recorded.trace(recorded.fresh()).layers
    merge = Merge(recorded.directory.root, layers, since=Time(0), bottom=True, env=recorded.directory.env, block_rows=5)
    steps = merge.steps()
    next(steps)
    steps.close()
    assert not list((recorded.directory.root / "tmp").iterdir())
    assert sorted(recorded.directory.descriptions(TRACE)) == recorded.fresh()


def test_each_merge_step_does_bounded_work(tmp_path: Path) -> None:
    recorded = Recorded(
        tmp_path / "x", hash32, [{"rows": dict.fromkeys(range(500), t), "deletes": set()} for t in range(3)]
    )
    layers = recorded.trace(recorded.fresh()).layers
    merge = Merge(
        recorded.directory.root, layers, since=Time(0), bottom=True, env=recorded.directory.env, block_rows=100
    )
    written = np.diff([0, *merge.steps()])
    assert written.max() <= 100
    assert written.sum() == 1_500


@pytest.mark.parametrize("has_key", [True, False])
@given(sizes=st.lists(st.integers(0, 10**7), min_size=1, max_size=300), since=st.integers(0, 300))
@example(sizes=[0, 0, 0, 0, 0, 0, 1024, 0, 0, 0], since=0)
def test_the_policy_bounds_the_number_of_layers(sizes: list[int], since: int, has_key: bool) -> None:
    """Appending layer after layer and merging whenever the policy says so."""
    trace: list[Candidate] = []
    for t, rows in enumerate(sizes):
        trace.append(Candidate(rows, Description.of_epoch(t), has_key))
        while (chosen := choose_merge(trace, pack(since))) is not None:
            i, j = chosen
            assert j - i >= 2
            merged = Description(trace[i].description.lower, trace[j - 1].description.upper)
            trace[i:j] = [Candidate(sum(layer.rows for layer in trace[i:j]), merged, has_key)]
        levels = level_of(sum(sizes), has_key=has_key) + 1
        assert len(trace) <= ((FANOUT if has_key else LOG_FANOUT) - 1) * levels


@given(
    sizes=st.lists(st.integers(0, 10**7), min_size=5, max_size=100),
    since=st.integers(0, 100),
    taken=st.integers(1, 100),
    has_key=st.booleans(),
)
@example(sizes=[10**7, 0, 0, 0, 0], since=0, taken=1, has_key=True)
@example(sizes=[10**7, 10**7, 9, 9, 9], since=100, taken=1, has_key=True)
def test_what_another_merge_has_taken_is_left_alone(sizes: list[int], since: int, taken: int, has_key: bool) -> None:
    """The others are merged as far as if the taken ones were not there, but for rows that `since` made stale."""
    trace = [Candidate(rows, Description.of_epoch(t), has_key) for t, rows in enumerate(sizes)]
    alone = choose_merge(trace[taken:], Time(0))
    fits = None if alone is None else (alone[0] + taken, alone[1] + taken)
    by_level = fits if alone is None or has_a_full_level(trace[taken:]) else None
    assert choose_merge(trace, pack(since), taken=taken) == by_level


def has_a_full_level(trace: list[Candidate]) -> bool:
    """Whether so many layers are of one level that they are merged for that."""
    fanout = FANOUT if trace[0].has_key else LOG_FANOUT
    levels = [level_of(layer.rows, has_key=layer.has_key) for layer in trace]
    levels = [max(levels[i:]) for i in range(len(levels))]
    return any(levels.count(level) >= fanout for level in levels)


@given(st.sampled_from(sorted(KEY_VALUES)), st.sampled_from(sorted(KEY_VALUES)), HASHERS, st.data())
def test_every_key_type_is_found_again(first: str, second: str, hasher: Hasher, data: st.DataObject) -> None:
    (type_a, values_a), (type_b, values_b) = KEY_VALUES[first], KEY_VALUES[second]
    keys = data.draw(
        st.lists(st.tuples(st.none() | values_a, st.none() | values_b), unique_by=lambda k: (k[0], k[1]), max_size=12)
    )
    a, b = (pa.array([k[i] for k in keys], t) for i, t in ((0, type_a), (1, type_b)))
    with tempfile.TemporaryDirectory() as root:
        (Path(root) / "tmp").mkdir()
        directory = LayerDirectory(Path(root), 8, hasher=hasher)
        half = len(keys) // 2
        table = pa.table({"a": a, "b": b, "n": range(len(keys))})
        for t, rows in enumerate((table.slice(0, half), table.slice(half))):
            directory.publish(
                LayerId(TRACE, Description.of_epoch(t)), arrange(rows, ["a", "b"], whose="t", hasher=hasher)
            )
        trace = directory.trace(TRACE, until=end_of(1), as_of=last_of(1))
        assert sorted(row for batch in trace.scan(last_of(1)) for row in batch.column("n").to_pylist()) == list(
            range(len(keys))
        )
        answer = trace.lookup([a, b], hasher([a, b]), last_of(1))
        assert answer.data.column("n").to_pylist() == list(range(len(keys)))


@given(st.lists(st.tuples(st.integers(0, 3), st.text("ab", max_size=2) | st.none()), max_size=40))
def test_order_by_key_is_a_stable_sort(rows: list[tuple[int, str | None]]) -> None:
    hashes = np.array([r[0] for r in rows], dtype=np.uint32)
    order, same = order_by_key(hashes, [pa.array([r[1] for r in rows], pa.string())])
    expected = sorted(range(len(rows)), key=lambda i: (rows[i][0], rows[i][1] is None, rows[i][1] or ""))
    # Order between keys of one hash is only fixed where several collide; what matters is that equals are together.
    assert [hashes[i] for i in order] == [hashes[i] for i in expected]
    for x, y, equal in zip(order, order[1:], same, strict=False):
        assert equal == (rows[x] == rows[y])
        assert not equal or x < y
    assert sum(same) == len(rows) - len(set(rows))


def _d(lower: int, upper: int, since: int = 0) -> Description:
    return Description(pack(lower), pack(upper), pack(since))


def test_covers() -> None:
    fresh = [_d(t, t + 1) for t in range(8)]
    assert choose_cover(TRACE, [*fresh, _d(0, 4), _d(0, 8, 6)], pack(8), last_of(7)) == [_d(0, 8, 6)]
    assert choose_cover(TRACE, [*fresh, _d(0, 4), _d(0, 8, 6)], pack(8), last_of(5)) == [_d(0, 4), *fresh[4:]]
    assert choose_cover(TRACE, [_d(0, 4), _d(2, 8), *fresh[4:]], pack(6), last_of(5)) == [_d(0, 4), fresh[4], fresh[5]]
    assert choose_cover(TRACE, fresh, pack(0), last_of(0)) == []
    with pytest.raises(HoleError, match=r"\[3, 4\)"):
        choose_cover(TRACE, fresh[:3] + fresh[4:], pack(8), last_of(7))
    with pytest.raises(HoleError, match=r"\[0, 1\)"):
        choose_cover(TRACE, fresh[1:], pack(8), last_of(7), origin=pack(0))
    with pytest.raises(CompactedError, match="oldest exact timestamp is 6"):
        choose_cover(TRACE, [_d(0, 8, 6)], pack(6), last_of(5))
    with pytest.raises(NotAvailableError, match="recorded up to 7"):
        choose_cover(TRACE, fresh, pack(12), last_of(11))


@given(HISTORY, HASHERS, st.data())
def test_layers_of_two_nodes_that_overlap_in_part(
    history: list[dict[str, Any]], hasher: Hasher, data: st.DataObject
) -> None:
    """Two nodes merged differently, and one has of each a part: what covers all epochs reads as everything does."""
    with tempfile.TemporaryDirectory() as root:
        recorded = Recorded(Path(root) / "x", hasher, history)
        n = recorded.epochs
        since = data.draw(st.integers(0, n - 1))
        runs = data.draw(st.lists(st.tuples(st.integers(0, n - 1), st.integers(1, n)), max_size=4))
        kept = {Description.of_epoch(t) for t in data.draw(st.sets(st.integers(0, n - 1)))}
        for first, length in runs:
            layers = recorded.trace(recorded.fresh()[first : first + length]).layers
            if len(layers) < 2:
                continue
            merge = Merge(
                recorded.directory.root, list(layers), since=pack(min(since, first + len(layers) - 1)), bottom=first == 0,
                env=recorded.directory.env, block_rows=4,
            )  # fmt: skip
            for _ in merge.steps():
                pass
            kept.add(merge.id.description)
        for d in recorded.fresh():  # whatever none of them covers is there as it was
            if not any(k.lower <= d.lower and d.upper <= k.upper for k in kept):
                kept.add(d)
        for d in recorded.directory.descriptions(TRACE):
            if d not in kept:
                recorded.directory.path_of(LayerId(TRACE, d)).unlink()
        exact_from = max(d.since for d in kept)
        for t in range(n):
            if pack(t) < exact_from:
                continue
            trace = recorded.directory.trace(TRACE, until=end_of(t), as_of=last_of(t), origin=Time(0))
            assert _scan(trace, t) == recorded.state(t)
            for after in range(t + 1):
                if pack(after) >= exact_from:
                    feed = recorded.directory.trace(TRACE, until=end_of(t), as_of=last_of(after), origin=Time(0))
                    state = dict(recorded.state(after))
                    for row in feed.changes(last_of(after), last_of(t)).to_pylist():
                        if row["_change_type"] in ("update_preimage", "delete"):
                            assert state.pop((row["k"],)) == (row["v"],)
                        else:
                            state[row["k"],] = (row["v"],)
                    assert state == recorded.state(t)


def test_logs_that_overlap_in_part_have_each_row_once(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    directory = LayerDirectory(tmp_path, 8)
    for t in range(5):
        rows = arrange(pa.table({"n": [10 * t, 10 * t + 1]}), [], whose="test")
        directory.publish(LayerId(TRACE, Description.of_epoch(t)), rows)
    for first, last in ((0, 3), (1, 5)):
        layers = [directory.reader(LayerId(TRACE, Description.of_epoch(t))) for t in range(first, last)]
        merge = Merge(tmp_path, layers, since=Time(0), bottom=first == 0, env=directory.env, block_rows=4)
        for _ in merge.steps():
            pass
    for t in range(5):
        directory.path_of(LayerId(TRACE, Description.of_epoch(t))).unlink()
    trace = directory.trace(TRACE, until=end_of(4), as_of=last_of(4), origin=Time(0))
    assert len(trace.layers) == 2
    expected = [10 * t + i for t in range(5) for i in (0, 1)]
    assert pa.Table.from_batches(trace.scan(last_of(4)))["n"].to_pylist() == expected
    assert trace.changes(last_of(1), last_of(3))["n"].to_pylist() == [20, 21, 30, 31]
