"""Upgrades by which a stage becomes another operator under its name: it has what the new one makes of all rows, or is refused.

What an operator holds is of no use to another one, though its key and columns may be the same. Without Spark.
"""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Callable, Collection
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import nosync
from nosync.job.meanings import OPERATORS, recorded_states
from tests.conftest import OpenStore
from tests.helpers.runner import StoreRunner
from tests.job.test_sources_that_come_back import upgraded

Make = Callable[[nosync.Dataflow], Any]
Rows = list[list[tuple[str, str]]]
IS_LONG = bool(os.environ.get("NOSYNC_LONG"))
AT = 1
"""The epoch from which on the new code runs."""


def minute(n: int) -> dt.datetime:
    return dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC) + dt.timedelta(minutes=n)


def table(time: str, value: str, rows: Collection[tuple[str, int, int]]) -> pa.Table:
    times = pa.array([minute(n) for _, n, _ in rows], pa.timestamp("us", "UTC"))
    keys, values = pa.array([k for k, _, _ in rows], pa.string()), pa.array([v for _, _, v in rows], pa.int64())
    return pa.table({"k": keys, time: times, value: values})


EPOCHS = [
    {"e": table("at", "v", e), "o": table("seen", "w", o)}
    for e, o in [
        ((("p", 0, 1), ("q", 1, 2), ("p", 0, 1), ("p", 20, 3)), (("p", 0, 7), ("r", 1, 1))),
        ((("q", 25, 4), ("p", 2, 9), ("p", 30, 3)), (("p", 28, 9), ("q", 1, 1))),
        ((("r", 60, 1), ("p", 61, 2)), (("r", 60, 1), ("r", 61, 5))),
    ]
]


def same(rows: pa.Table) -> pa.Table:
    return rows


def without_time(rows: pa.Table) -> pa.Table:
    return rows.drop_columns(["at"])


def is_large(rows: pa.Table) -> pa.ChunkedArray:
    return pc.greater(rows["v"], 2)


def count(key: Any, changes: list[dict[str, Any]], state: dict[str, Any] | None) -> dict[str, Any]:
    return {"v": (state["v"] if state else 0) + len(changes)}


def update(flow: nosync.Dataflow, **options: Any) -> Any:
    return flow["e"].update_per_key("s", key=["k"], state="v bigint", fn=count, version="1", **options)


def window(flow: nosync.Dataflow, **options: Any) -> Any:
    said = {"key": ["k"], "time": "at", "watermark": "0 minutes", "v": nosync.sum("v"), **options}
    return flow["e"].window("s", **said)


TIMES = {"time": ("at", "seen"), "watermark": "0 minutes"}
BY_ROW: dict[str, Make] = {
    "map": lambda f: f["e"].map("s", same),
    "map without a column": lambda f: f["e"].map("s", without_time),
    "filter": lambda f: f["e"].filter("s", is_large),
    "union": lambda f: f["e"].union("s", f["mapped"]),
    "map that is not recorded": lambda f: f["e"].map("s", same, persist="none"),
}
OF_WHAT_IS_THERE: dict[str, Make] = {
    "sum": lambda f: f["e"].aggregate("s", key=["k"], v=nosync.sum("v")),
    "max": lambda f: f["e"].aggregate("s", key=["k"], v=nosync.max("v")),
    "sum of changes": lambda f: f["sums"].aggregate("s", key=["k"], v=nosync.sum("v")),
    "update": update,
    "update with ttl": lambda f: update(f, ttl=3),
    "dedupe of changes": lambda f: f["sums"].dedupe("s", key=["k"]),
    "join": lambda f: f["e"].join("s", f["o"], on=["k"]),
    "left join": lambda f: f["e"].join("s", f["o"], on=["k"], how="left"),
    "semi join": lambda f: f["e"].join("s", f["o"], on=["k"], how="left_semi"),
    "per_key": lambda f: f["e"].per_key("s", key=["k"], fn=without_time),
    "window": lambda f: window(f, size="10 minutes"),
    "window of max": lambda f: window(f, size="10 minutes", v=nosync.max("v")),
    "session": lambda f: window(f, gap="10 minutes"),
    "map of changes": lambda f: f["sums"].map("s", same),
    "map of changes that is not recorded": lambda f: f["sums"].map("s", same, persist="none"),
    "map of changes without a column": lambda f: f["sums"].map("s", without_time),
}
BY_ARRIVAL: dict[str, Make] = {
    "dedupe": lambda f: f["mapped"].dedupe("s", key=["k"]),
    "dedupe by time": lambda f: f["e"].dedupe("s", key=["k", "v"], time="at", watermark="0 minutes"),
    "update by time": lambda f: update(f, time="at", watermark="0 minutes"),
    "interval join": lambda f: f["e"].join("s", f["o"], on=["k"], within=("0 seconds", "5 minutes"), **TIMES),
    "as-of join": lambda f: f["e"].join_asof("s", f["o"], on=["k"], **TIMES),
    "final window": lambda f: window(f, size="10 minutes", emit="final"),
    "final window of max": lambda f: window(f, size="10 minutes", emit="final", v=nosync.max("v")),
}
ALL = {**BY_ROW, **OF_WHAT_IS_THERE, **BY_ARRIVAL}
OFTEN = [
    "map", "map that is not recorded", "map without a column", "sum", "update with ttl", "join", "per_key", "window",
    "map of changes", "dedupe", "interval join", "final window",
]  # fmt: skip
"""Those that become all others in the short form of the test."""
UPDATES = {"update", "update with ttl", "update by time"}
JOINS_BY_TIME, WINDOWS = {"interval join", "as-of join"}, {"window", "window of max", "session"}


def flow_of(make: Make) -> nosync.Dataflow:
    flow = nosync.Dataflow("f")
    source = flow.source("e", "k string, at timestamp, v bigint")
    flow.source("o", "k string, seen timestamp, w bigint")
    source.map("mapped", same)
    source.aggregate("sums", key=["k", "at"], v=nosync.sum("v"))
    make(flow)
    flow["s"].aggregate("after", key=["k"], n=nosync.count())
    return flow


def state(store: nosync.Store, t: int) -> list[list[tuple[tuple[str, Any], ...]]]:
    recorded = {entry.id.trace.stage for entry in store.manifest(t).entries}
    stages = [name for name in ("s", "after") if name in recorded]
    return [sorted(tuple(sorted(row.items())) for row in store.read(name, t).to_pylist()) for name in stages]


def run(store: nosync.Store, before: Make, after: Make | None) -> list[Any]:
    """Returns the state after each epoch from `AT` on, where `after` runs from there on if it is given."""
    runner = StoreRunner(flow_of(before), store, 1, shards=2)
    for t, given in enumerate(EPOCHS):
        if t == AT and after is not None:
            runner = upgraded(store, flow_of(after))
        runner.advance(t, given)
    return [state(store, t) for t in range(AT, len(EPOCHS))]


FRESH: dict[str, list[Any]] = {}


def fresh(name: str, open_store: OpenStore) -> list[Any]:
    """Returns the states of a store that ran this operator from the beginning."""
    if name not in FRESH:
        FRESH[name] = run(open_store(f"fresh {name}", retain=100), ALL[name], None)
    return FRESH[name]


def goes_on(before: str, after: str) -> bool:
    """Returns whether what a stage gave stays, and the new code counts for new rows."""
    return {before, after} <= BY_ROW.keys() or {before, after} <= UPDATES


def is_refused(before: str, after: str) -> bool:
    needs_arrivals = after in BY_ARRIVAL or (after in BY_ROW and before not in BY_ROW and "not recorded" not in after)
    return needs_arrivals or (before in JOINS_BY_TIME and after in WINDOWS)  # their watermarks have other columns


@pytest.mark.parametrize("before", list(ALL) if IS_LONG else OFTEN)
def test_it_has_what_the_new_one_makes_of_all_rows_or_is_refused(open_store: OpenStore, before: str) -> None:
    for after, code in ALL.items():
        if after == before or goes_on(before, after):
            continue
        store = open_store(f"{before} to {after}", retain=100)
        if is_refused(before, after):
            with pytest.raises((nosync.FlowError, nosync.SchemaError), match=r"stage s.*another name"):
                run(store, ALL[before], code)
            assert list(store.branches()) == ["main"], "nothing was done"
        else:
            found, expected = run(store, ALL[before], code), fresh(after, open_store)
            assert [states[-1] for states in found] == [states[-1] for states in expected], (before, after)
            if "not recorded" not in before + after:
                assert found == expected, (before, after)


@pytest.mark.parametrize("before", ["sum", "per_key", "join", "window", "map of changes"])
@pytest.mark.parametrize("after", ["sum", "per_key", "join", "semi join", "map of changes"])
def test_one_that_was_dropped_comes_back_as_another(open_store: OpenStore, before: str, after: str) -> None:
    """The sides that a join keeps beside itself were not there before, and began with the rows that came."""
    store = open_store(retain=100)
    flows = [flow_of(ALL[before]), nosync.Dataflow("f"), flow_of(ALL[after])]
    source = flows[1].source("e", "k string, at timestamp, v bigint")
    flows[1].source("o", "k string, seen timestamp, w bigint")
    source.map("mapped", same)
    runner = StoreRunner(flows[0], store, 1, shards=2)
    for t, flow in enumerate(flows):
        runner = upgraded(store, flow) if t else runner
        runner.advance(t, EPOCHS[t])
    assert state(store, 2) == fresh(after, open_store)[-1]


def test_what_treats_rows_by_themselves_goes_on(open_store: OpenStore) -> None:
    found = run(open_store(retain=100), BY_ROW["map"], BY_ROW["filter"])
    mapped, filtered = (run(open_store(name, retain=100), BY_ROW[name], None) for name in ("map", "filter"))
    first = [tuple(sorted(row.items())) for row in EPOCHS[0]["e"].to_pylist()]
    new = [row for row in filtered[-1][0] if row[0][1] > minute(20) or row[2][1] == 9]
    assert found[-1][0] == sorted(first + new)
    assert found[-1][0] not in (mapped[-1][0], filtered[-1][0])


def test_an_update_goes_on_with_another_time_to_live(open_store: OpenStore) -> None:
    """One by event time has a column for it, which another one does not have."""

    def expiring(flow: nosync.Dataflow) -> Any:
        return update(flow, time="at", watermark="0 minutes", ttl="10 days")

    found = run(open_store(retain=100), expiring, ALL["update with ttl"])
    assert [dict(row)["v"] for row in found[-1][0] if dict(row)["k"] == "p"] == [6]


def test_stores_of_earlier_versions(open_store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not say which operators they have. Logs and what has parts are known by these."""
    for before, after in [("map", "dedupe by time"), ("dedupe by time", "map"), ("map of changes", "map")]:
        store = open_store(f"{before} to {after}", retain=100)
        StoreRunner(flow_of(ALL[before]), store, 1, shards=2).advance(0, EPOCHS[0])
        log = type(store.node.timelines.manifests())
        manifest = store.manifest(0)
        del manifest.meta[OPERATORS]
        assert OPERATORS not in manifest.meta
        assert "s" not in recorded_states(manifest).operators or before == "dedupe by time"
        monkeypatch.setattr(log, "get", lambda _, t, known=manifest: known if t == 0 else None)
        with pytest.raises(nosync.FlowError, match="stage s was .* and is now"):
            upgraded(store, flow_of(ALL[after]))
        monkeypatch.undo()
