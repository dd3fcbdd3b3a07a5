"""Each operator of Structured Streaming, and what it becomes here."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

import nosync
from tests.parity.both_ways import APPEND, COMPLETE, EVENTS, UPDATE, Batch, Case, Streams, flow_of, one
from tests.parity.rows import batches_of
from tests.parity.stateful_cases import STATEFUL

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

WINDOW = ["k", "start", "end", "n", "total"]
HOWS = {"inner": "inner", "left": "leftOuter", "right": "rightOuter", "full": "fullOuter", "left_semi": "leftSemi"}


FLUSHED = datetime.datetime(2030, 1, 1)


def flushed(random: np.random.Generator) -> list[Batch]:
    """Returns batches, and two of a later time, by which all before is final: a stage behind another one is given what
    is final there, so it closes a window later than Spark, which passes the watermark itself on.
    """
    batches = batches_of(random, "k", "x")
    for i in range(2):
        at = pa.array([FLUSHED + i * datetime.timedelta(days=1)], pa.timestamp("us", "UTC"))
        batches.append(pa.table({"at": at, "k": pa.array(["a"]), "x": pa.array([100 + i], pa.int64())}))
    return [{"events": batch} for batch in batches]


# --- aggregates -------------------------------------------------------------------------------------------------------


def _aggregate(streams: Streams) -> DataFrame:
    from pyspark.sql import functions as F

    return streams["events"].groupBy("k").agg(
        F.count("*").alias("n"), F.count("x").alias("known"), F.sum("x").alias("total"), F.avg("x").alias("mean"),
        F.min("x").alias("least"), F.max("x").alias("most"), F.sum("d").alias("dsum"), F.avg("y").alias("ymean"),
        F.min("y").alias("yleast"), F.max("y").alias("ymost"),
    )  # fmt: skip


AGGREGATES = ["k", "n", "known", "total", "mean", "least", "most", "dsum", "ymean", "yleast", "ymost"]


def _aggregate_flow(source: nosync.Stage) -> object:
    return source.aggregate(
        "out", key=["k"], n=nosync.count(), known=nosync.count("x"), total=nosync.sum("x"), mean=nosync.mean("x"),
        least=nosync.min("x"), most=nosync.max("x"), dsum=nosync.sum("d"), ymean=nosync.mean("y"),
        yleast=nosync.min("y"), ymost=nosync.max("y"),
    )  # fmt: skip


def _global(streams: Streams) -> DataFrame:
    from pyspark.sql import functions as F

    return streams["events"].groupBy().agg(F.count("*").alias("n"), F.sum("x").alias("total"))


# --- windows ----------------------------------------------------------------------------------------------------------


def _windowed(size: str, slide: str | None, delay: str) -> Callable[[Streams], DataFrame]:
    def query(streams: Streams) -> DataFrame:
        from pyspark.sql import functions as F

        events = streams["events"].withWatermark("at", delay)
        counted = events.groupBy("k", F.window("at", size, slide)).agg(
            F.count("*").alias("n"), F.sum("x").alias("total")
        )
        return counted.select("k", "window.start", "window.end", "n", "total")

    return query


def _renamed(stage: nosync.Stage) -> object:
    return stage.map(
        "out",
        lambda rows: rows.rename_columns(
            [{"window_start": "start", "window_end": "end"}.get(name, name) for name in rows.column_names]
        ),
    )


def _window_flow(**window: Any) -> Callable[[], nosync.Dataflow]:
    return flow_of(
        lambda source: _renamed(
            source.window("w", key=["k"], time="at", n=nosync.count(), total=nosync.sum("x"), **window)
        )
    )


def _sessions(delay: str) -> Callable[[Streams], DataFrame]:
    def query(streams: Streams) -> DataFrame:
        from pyspark.sql import functions as F

        events = streams["events"].withWatermark("at", delay)
        counted = events.groupBy("k", F.session_window("at", "7 minutes").alias("window")).agg(
            F.count("*").alias("n"), F.sum("x").alias("total")
        )
        return counted.select("k", "window.start", "window.end", "n", "total")

    return query


# --- duplicates -------------------------------------------------------------------------------------------------------


def _within(streams: Streams) -> DataFrame:
    return streams["events"].withWatermark("at", "9 minutes").dropDuplicatesWithinWatermark(["k"])


def _duplicates(streams: Streams) -> DataFrame:
    return streams["events"].select("k", "x").dropDuplicates(["k", "x"])


def _duplicates_in_time(streams: Streams) -> DataFrame:
    return streams["events"].withWatermark("at", "5 minutes").dropDuplicates(["k", "at"])


# --- joins ------------------------------------------------------------------------------------------------------------


def _newest_with_key(rows: pa.Table) -> pa.Table:
    """Returns rows whose newest one has a key. Where it has none Spark leaves it out before the watermark, which it moves
    here (docs/convert.md).
    """
    if not rows.num_rows:
        return rows
    keys = rows["k"].to_pylist()
    return rows.set_column(rows.column_names.index("k"), "k", pa.array([*keys[:-1], keys[-1] or "a"], pa.string()))


def _two(random: np.random.Generator, *, nulls: bool = True) -> list[Batch]:
    left, both = ([_newest_with_key(b) for b in batches_of(random, "k", "x", nulls=nulls)] for _ in range(2))
    right = [b.rename_columns(["seen", "j", "y"]) for b in both]
    if (
        len(
            {str(b["at"][0].as_py().year) for b in left if b.num_rows}
            | {str(b["seen"][0].as_py().year) for b in right if b.num_rows}
        )
        > 1
    ):
        return _two(random, nulls=nulls)  # both sides are of one time
    return [{"events": a, "others": b} for a, b in zip(left, right, strict=True)]


def _interval(how: str) -> Callable[[Streams], DataFrame]:
    def query(streams: Streams) -> DataFrame:
        from pyspark.sql import functions as F

        left = streams["events"].withWatermark("at", "5 minutes")
        right = streams["others"].withWatermark("seen", "8 minutes")
        near = F.expr("k = j AND seen >= at - INTERVAL 4 MINUTES AND seen <= at + INTERVAL 10 MINUTES")
        joined = left.join(right, near, HOWS[how])
        if how == "left_semi":
            return joined.select("k", "at", "x")
        return joined.select(F.coalesce("k", "j").alias("k"), "at", "x", "seen", "y")

    return query


def _interval_flow(how: str) -> Callable[[], nosync.Dataflow]:
    def make() -> nosync.Dataflow:
        flow = nosync.Dataflow("parity")
        left = flow.source("events", EVENTS)
        right = flow.source("others", "seen timestamp, j string, y bigint")
        renamed = right.map("renamed", lambda rows: rows.rename_columns(["seen", "k", "y"]))
        left.join(
            "out", renamed, on=["k"], how=how, time=("at", "seen"), within=("-4 minutes", "10 minutes"),
            watermark=("5 minutes", "8 minutes"),
        )  # fmt: skip
        return flow

    return make


def _inner(streams: Streams) -> DataFrame:
    right = streams["others"].withColumnRenamed("j", "k")
    return streams["events"].join(right, ["k"]).select("k", "at", "x", "seen", "y")


def _inner_flow() -> nosync.Dataflow:
    flow = nosync.Dataflow("parity")
    left = flow.source("events", EVENTS)
    right = flow.source("others", "seen timestamp, j string, y bigint")
    left.join("out", right.map("renamed", lambda rows: rows.rename_columns(["seen", "k", "y"])), on=["k"])
    return flow


# --- chains -----------------------------------------------------------------------------------------------------------


def _window_of_windows(streams: Streams) -> DataFrame:
    from pyspark.sql import functions as F

    events = streams["events"].withWatermark("at", "5 minutes")
    small = events.groupBy("k", F.window("at", "5 minutes")).agg(F.count("*").alias("n"))
    large = small.groupBy(F.window(F.window_time("window"), "20 minutes")).agg(
        F.count("*").alias("n"), F.sum("n").alias("total")
    )
    return large.select("window.start", "window.end", "n", "total")


def _just_before(rows: pa.Table) -> pa.Table:
    import pyarrow.compute as pc

    end = pc.subtract(rows.column("window_end"), pa.scalar(1, pa.duration("us")))
    return pa.table({"ended": end, "n": rows.column("n")})


def _window_of_windows_flow(source: nosync.Stage) -> object:
    small = source.window(
        "small", key=["k"], time="at", size="5 minutes", watermark="5 minutes", emit="final", n=nosync.count()
    )
    large = small.map("ends", _just_before).window(
        "large", time="ended", size="20 minutes", watermark="0 seconds", emit="final", n=nosync.count(),
        total=nosync.sum("n"),
    )  # fmt: skip
    return _renamed(large)


def _dedupe_then_window(streams: Streams) -> DataFrame:
    from pyspark.sql import functions as F

    first = streams["events"].withWatermark("at", "5 minutes").dropDuplicatesWithinWatermark(["k", "x"])
    counted = first.groupBy(F.window("at", "10 minutes")).agg(F.count("*").alias("n"))
    return counted.select("window.start", "window.end", "n")


CASES = [
    *(
        Case(f"aggregate-{mode}", mode, _aggregate, flow_of(_aggregate_flow, f"{EVENTS}, d decimal(10,2), y double"),
             AGGREGATES, one("k", "x", "d", "y"), ["k"])
        for mode in (UPDATE, COMPLETE)
    ),
    Case("global-complete", COMPLETE, _global,
         flow_of(lambda s: s.aggregate("out", key=[], n=nosync.count(), total=nosync.sum("x"))), ["n", "total"],
         one("k", "x")),
    *(
        Case(f"tumbling-{mode}", mode, _windowed("10 minutes", None, "5 minutes"),
             _window_flow(size="10 minutes", watermark="5 minutes", emit="final" if mode == APPEND else "changes"),
             WINDOW, one("k", "x"), ["k", "start", "end"])
        for mode in (APPEND, UPDATE)
    ),
    Case("sliding-append", APPEND, _windowed("10 minutes", "5 minutes", "3 minutes"),
         _window_flow(size="10 minutes", slide="5 minutes", watermark="3 minutes", emit="final"), WINDOW, one("k", "x")),
    Case("session-append", APPEND, _sessions("5 minutes"),
         _window_flow(gap="7 minutes", watermark="5 minutes", emit="final"), WINDOW, one("k", "x")),
    Case("within-append", APPEND, _within,
         flow_of(lambda s: s.dedupe("out", key=["k"], time="at", watermark="9 minutes")), ["k", "at"], one("k", "x")),
    Case("duplicates-append", APPEND, _duplicates, flow_of(lambda s: s.map(
        "pairs", lambda rows: rows.select(["k", "x"])).dedupe("out", key=["k", "x"])), ["k", "x"], one("k", "x")),
    Case("duplicates-in-time-append", APPEND, _duplicates_in_time,
         flow_of(lambda s: s.dedupe("out", key=["k", "at"], time="at", watermark="5 minutes", within="0 seconds")),
         ["k", "at"], one("k", "x")),
    *(
        Case(f"interval-{how}-append", APPEND, _interval(how), _interval_flow(how),
             ["k", "at", "x"] if how == "left_semi" else ["k", "at", "x", "seen", "y"],
             functools.partial(_two, nulls=how != "full"))
        for how in HOWS
    ),
    Case("join-append", APPEND, _inner, _inner_flow, ["k", "at", "x", "seen", "y"], _two),
    Case("window-of-windows-append", APPEND, _window_of_windows, flow_of(_window_of_windows_flow),
         ["start", "end", "n", "total"], flushed, until=FLUSHED),
    Case("dedupe-then-window-append", APPEND, _dedupe_then_window,
         flow_of(lambda s: _renamed(s.dedupe("d", key=["k", "x"], time="at", watermark="5 minutes").window(
             "w", time="at", size="10 minutes", watermark="5 minutes", emit="final", n=nosync.count()))),
         ["start", "end", "n"], flushed, until=FLUSHED),
    *STATEFUL,
]  # fmt: skip
