"""Windows with a watermark, and loops, that begin anew on a branch, against slow Python. No Spark."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import nosync
from nosync.flow.stage import Stage
from tests.helpers.depth import examples
from tests.helpers.graphs import hop, last_word, only, reach_slowly
from tests.helpers.runner import StoreRunner

MINUTE_US = 60_000_000
SIZE, DELAY = 4, 2
NEVER = -(1 << 62)
NO_TIME = 1000

Totals = dict[int, int]
Epoch = list[tuple[int, int]]
"""Pairs of a word and how much its total grows."""
EPOCHS = st.lists(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4)), max_size=6), min_size=3, max_size=8)


def timed(rows: pa.Table) -> pa.Table:
    """Rows whose event time is as many minutes as their total; null for one total that random rows do not have."""
    total = pc.if_else(pc.equal(rows["total"], NO_TIME), None, rows["total"])
    minutes = pc.multiply(total, MINUTE_US)
    return rows.select([n for n in rows.column_names if n != "total"]).append_column(
        "at", minutes.cast(pa.timestamp("us", "UTC"))
    )


def not_word(word: int) -> Any:
    def kept(rows: pa.Table) -> pa.ChunkedArray:
        return pc.not_equal(rows["word"], word)

    return kept


def windowed(hidden: int, **more: Any) -> nosync.Dataflow:
    """Counts by window of the totals of all words but one: rows that change."""
    flow = nosync.Dataflow("f")
    sums = flow.source("rows", "word bigint, n bigint").aggregate("sums", key=["word"], total=nosync.sum("n"))
    rows = sums.filter("kept", not_word(hidden)).map("timed", timed, schema="word bigint, at timestamp", persist="none")
    more = {"watermark": f"{DELAY} minutes"} | more
    rows.window("counts", key=[], time="at", size=f"{SIZE} minutes", n=nosync.count(), **more)
    return flow


class Slow:
    """What windows hold and give, epoch by epoch. Times are minutes."""

    def __init__(self, keep: int | None, *, final: bool) -> None:
        self.keep, self.final = keep, final
        self.windows: Counter[int] = Counter()  # by their end
        self.given: list[tuple[int, int]] = []
        self.marks = [NEVER, NEVER]  # of the epoch before, of this one
        self.gone_until = NEVER

    def epoch(self, gone: list[int], come: list[int], *, anew: bool = False) -> None:
        previous, current = self.marks
        late = NEVER if anew else previous
        if anew:
            self.windows.clear()
        for sign, times in ((-1, gone), (1, come)):
            for time in times:
                end = (time // SIZE + 1) * SIZE
                if end > late:
                    self.windows[end] += sign
        if self.final:
            if anew:
                self._drop(previous)  # was given before
            self.given += [(end, n) for end, n in self.windows.items() if n and end <= current]
            self._drop(current)
        elif self.keep is not None:
            self.gone_until = previous - self.keep
            self._drop(self.gone_until)
        newest = max([*gone, *come], default=None)
        self.marks = [current, current if newest is None else max(current, newest - DELAY)]

    def _drop(self, until: int) -> None:
        for end in [end for end in self.windows if end <= until]:
            del self.windows[end]

    @property
    def held(self) -> list[tuple[int, int]]:
        return sorted((end, n) for end, n in self.windows.items() if n)


def after(totals: Totals, epoch: Epoch) -> Totals:
    found = Counter(totals)
    for word, more in epoch:
        found[word] += more
    return dict(found)


def changes(before: Totals, now: Totals, hidden: int) -> tuple[list[int], list[int]]:
    moved = [word for word in now if word != hidden and now[word] != before.get(word)]
    return [before[word] for word in moved if word in before], [now[word] for word in moved]


def rows_of(epoch: Epoch) -> pa.Table:
    return pa.table({name: pa.array([row[i] for row in epoch], pa.int64()) for i, name in enumerate(("word", "n"))})


def held(store: nosync.Store, t: int, branch: str) -> list[tuple[int, int]]:
    rows = store.read("counts", t, branch=branch).to_pylist()
    return sorted((int(row["window_end"].timestamp()) // 60, row["n"]) for row in rows)


@pytest.mark.few(2, "make properties")
@pytest.mark.parametrize("keep", [None, 0, 3, "final", "retract"])
@settings(max_examples=examples(8))
@given(EPOCHS, st.integers(0, 9), st.integers(0, 4), st.integers(0, 4), st.integers(1, 3))
@example([[(0, 1), (1, 9)], [(1, 1)], [(1, 9)], [(2, 20)], [(2, 1)], [(1, 9)]], 2, 1, 0, 2)
@example([[(0, 1)], [(1, 20)], [], []], 2, 2, 3, 2)  # a window expires with the epoch that begins anew
@example([[(0, 5), (1, 6)], [(2, 9)], [(2, 9)], [(3, 30)], []], 1, 3, 2, 1)
def test_a_window_begins_anew_from_all_rows_at_the_watermark_that_is_in_force(
    keep: Any, epochs: list[Epoch], fork: int, hidden: int, other: int, shards: int
) -> None:
    fork %= len(epochs) - 1
    if hidden == other:
        other = 5
    final, minutes = keep == "final", 1 if keep == "retract" else keep
    more: dict[str, Any] = {} if minutes is None else {"keep": f"{minutes} minutes"}
    more = {"emit": "final"} if final else more | ({"expiry": "retract"} if keep == "retract" else {})
    slow = Slow(None if final else minutes, final=final)
    settings = nosync.StoreSettings(background=False, grace_s=0.0)
    with tempfile.TemporaryDirectory() as directory, nosync.open(Path(directory) / "s", settings=settings) as store:
        main = StoreRunner(windowed(hidden, **more), store, 1)
        totals: Totals = {}
        for t, epoch in enumerate(epochs):
            main.shards = shards if t > fork else 2
            main.advance(t, rows_of(epoch))
            before, totals = totals, after(totals, epoch)
            if t <= fork:
                slow.epoch(*changes(before, totals, hidden))
        assert_equal(slow, store, fork, "main")
        branch = main.make_branch("b", fork, windowed(other, **more), ["kept"])
        branch.shards = shards
        totals = {}
        for t, epoch in enumerate(epochs):
            before, totals = totals, after(totals, epoch)
            if t <= fork:
                continue
            if t == fork + 1:
                slow.epoch([], changes({}, totals, other)[1], anew=True)
            else:
                slow.epoch(*changes(before, totals, other))
            branch.replay(t)
            assert_equal(slow, store, t, "b")
            if keep in (0, 3):
                gone = store.changes("counts", t - 1, t, branch="b").filter(pc.field("_change_type") == "delete")
                ends = [int(end.timestamp()) // 60 for end in gone["window_end"].to_pylist()]
                assert min(ends, default=slow.gone_until + 1) > slow.gone_until, "what expires is not taken back"


def assert_equal(slow: Slow, store: nosync.Store, t: int, branch: str) -> None:
    if slow.final:
        given = store.read("counts", t, branch=branch).to_pylist()
        found = Counter((int(row["window_end"].timestamp()) // 60, row["n"]) for row in given)
        assert found == Counter(slow.given), t
    else:
        assert held(store, t, branch) == slow.held, t


@pytest.mark.parametrize("more", [{}, {"emit": "final"}, {"watermark": None}])
def test_rows_without_a_time_are_told_once(tmp_path: Path, more: dict[str, Any]) -> None:
    with nosync.open(tmp_path / "s") as store:
        main = StoreRunner(windowed(9, **more), store, 1)
        for t, epoch in enumerate([[(0, NO_TIME), (2, 4)], [(1, NO_TIME), (3, 9)], [(3, 1)]]):
            main.advance(t, rows_of(epoch))
        branch = main.make_branch("b", 0, windowed(2, **more), ["kept"])
        for t in (1, 2):
            branch.replay(t)
        late = store.changes("counts__late", -1, 2, branch="b").to_pylist()
        assert sorted((row["word"], row["_change_type"], row["_epoch"]) for row in late) == [
            (0, "insert", 0),
            (1, "insert", 1),
        ]


def test_a_window_with_a_watermark_that_was_dropped_does_not_come_back(tmp_path: Path) -> None:
    without = nosync.Dataflow("f")
    sums = without.source("rows", "word bigint, n bigint").aggregate("sums", key=["word"], total=nosync.sum("n"))
    sums.filter("kept", not_word(9))
    with nosync.open(tmp_path / "s") as store:
        main = StoreRunner(windowed(9), store, 1)
        for t in range(3):
            main.advance(t, rows_of([(t, 2)]))
        branch = main.make_branch("without", 0, without)
        branch.replay(1)
        with pytest.raises(nosync.FlowError, match="stage counts was there before .* goes by a watermark"):
            branch.make_branch("again", 1, windowed(9))
        assert sorted(store.branches()) == ["main", "without"]


def once_in_a_while(hidden: int) -> nosync.Dataflow:
    flow = nosync.Dataflow("f")
    shown = flow.source("rows", "word bigint, at timestamp").filter("shown", not_word(hidden))
    shown.dedupe("firsts", key=["word"], time="at", watermark="1 minute", within="5 minutes")
    return flow


def test_what_depends_on_arrival_does_not_follow_a_view_that_changes(tmp_path: Path) -> None:
    with nosync.open(tmp_path / "s") as store:
        main = StoreRunner(once_in_a_while(1), store, 1)
        times = pa.array([0, 60_000_000], pa.timestamp("us", "UTC"))
        main.advance(0, pa.table({"word": pa.array([1, 2], pa.int64()), "at": times}))
        with pytest.raises(nosync.FlowError, match=r"stage firsts cannot begin anew .* Give it another name"):
            main.make_branch("b", 0, once_in_a_while(2), ["shown"], ["shown"])
        assert sorted(store.branches()) == ["main"]


# --- loops ------------------------------------------------------------------------------------------------------------

NODE = st.integers(0, 5)
EDGES = st.lists(st.tuples(NODE, NODE, st.booleans()), max_size=8)


def reachability(barred: int, closed: int) -> nosync.Dataflow:
    """What is reached from node 0 by edges that come and go, but for edges to one node, and to another in the body."""
    flow = nosync.Dataflow("f")
    edge_log = flow.source("edge_log", "node bigint, dst bigint, there bigint, i bigint")
    roots = flow.source("roots", "node bigint").dedupe("root", key=["node"]).map("start", only("node"))
    edges = edge_log.update("edge_state", key=["node", "dst"], state="one bigint", fn=last_word)
    edges = edges.filter("open", to_another(barred)).map("edges", only("node", "dst"))

    def body(reached: Stage) -> Stage:
        there = reached.join("hops", edges, on=["node"]).filter("inside", to_another(closed))
        return there.map("next", hop)

    roots.iterate("reached", body).aggregate("how_many", key=["node"], n=nosync.count())
    return flow


def to_another(node: int) -> Any:
    def kept(rows: pa.Table) -> pa.ChunkedArray:
        return pc.not_equal(rows["dst"], node)

    return kept


@settings(max_examples=examples(20))
@given(st.lists(EDGES, min_size=3, max_size=6), st.integers(0, 9), NODE, NODE, st.booleans(), st.integers(1, 3))
@example([[(0, 1, True), (1, 2, True)], [(2, 1, True)], [(0, 1, False)], [(0, 2, True)]], 0, 2, 9, False, 2)
@example([[(0, 1, True), (1, 2, True), (2, 1, True)], [(2, 3, True)], [(0, 1, False)]], 0, 3, 9, True, 1)
def test_a_loop_begins_anew_where_its_input_or_its_body_has_other_code(
    epochs: list[list[tuple[int, int, bool]]], fork: int, barred: int, closed: int, in_body: bool, shards: int
) -> None:
    fork %= len(epochs) - 1
    settings = nosync.StoreSettings(background=False, grace_s=0.0)
    with tempfile.TemporaryDirectory() as directory, nosync.open(Path(directory) / "s", settings=settings) as store:
        main = StoreRunner(reachability(9, 9), store, 1)
        edges: set[tuple[int, int]] = set()
        seen = []
        for t, of_epoch in enumerate(epochs):
            roots = pa.table({"node": pa.array([0] if t == 0 else [], pa.int64())})
            main.shards = shards if t > fork else 2
            columns = {name: [int(c[i]) for c in of_epoch] for i, name in enumerate(("node", "dst", "there"))}
            log = pa.table({name: pa.array(values, pa.int64()) for name, values in columns.items()})
            main.advance(t, {"edge_log": log.append_column("i", pa.array(range(len(log)), pa.int64())), "roots": roots})
            for a, b, there in of_epoch:
                (edges.add if there else edges.discard)((a, b))
            seen.append(set(edges))
        other = reachability(9, closed) if in_body else reachability(barred, 9)
        branch = main.make_branch("b", fork, other, ["inside" if in_body else "open"])
        branch.shards = shards
        shut = closed if in_body else barred
        for t in range(fork + 1, len(epochs)):
            branch.replay(t)
            expected = sorted(reach_slowly({0}, {(a, b) for a, b in seen[t] if b != shut}))
            assert sorted(row["node"] for row in store.read("reached", t, branch="b").to_pylist()) == expected, t
            counts = {row["node"]: row["n"] for row in store.read("how_many", t, branch="b").to_pylist()}
            assert counts == dict.fromkeys(expected, 1), t
