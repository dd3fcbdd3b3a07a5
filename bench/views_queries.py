"""Views: beside the same flow by hand, and beside Spark computing its query again over all rows.

By hand: the operators that somebody would write for the query. Again: what Declarative Pipelines of open-source Spark do
for a materialized view, with the rows cached in memory, and the result written to Parquet. An epoch changes 1 % of the
lines: orders are cancelled, and as many come. Beside Spark, epochs get their changes by turns as rows that are in Spark's
memory, as a batch of a stream has them, and as Parquet files.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

import nosync
from bench.footprint import alone
from bench.harness import Result, timed
from bench.spark_epochs import CORES
from bench.tpch import KEYS, QUERIES, SCHEMAS, Tables
from nosync.lsm.columnar.columns import CHANGE_TYPE_COLUMN
from nosync.spark.session import local_session

LINES = {"short": 20_000, "normal": 1_000_000, "full": 4_000_000}
EPOCHS, WARM = 20, 8
"""How many epochs there are, and after how many of them the JVM has compiled what runs in each: both sides are measured
then.
"""
SHARE = 100
"""An epoch changes one of so many orders."""
ASKED = ("q1", "q3", "q18")
SHARDS = 2
_MEMORY = {"spark.driver.memory": "6g"}
"""Both sides keep their rows in memory; what Spark has by itself is not enough for a million of them."""
_SUMS = "SELECT l_suppkey, sum(l_extendedprice) AS price, count(*) AS n FROM lineitem WHERE l_quantity > 10 GROUP BY l_suppkey"
_JOINED = """SELECT p_brand, sum(l_extendedprice) AS price, count(*) AS n FROM lineitem JOIN part ON l_partkey = p_partkey
             GROUP BY p_brand"""


def run(scale: str) -> Iterator[Result]:
    lines = LINES[scale]
    for name, view, hand in (
        ("an aggregate", _SUMS, _sums_by_hand),
        ("a join and an aggregate", _JOINED, _join_by_hand),
    ):
        mine, theirs = alone(_beside_hand, lines, view, None), alone(_beside_hand, lines, view, hand)
        yield Result(
            f"{name}, {lines:,} lines, an epoch that changes 1 %", "a view", mine, "s", "the same flow by hand", theirs,
            mine / theirs, "<= 1.15", mine / theirs <= 1.15 * 1.1, repeats=EPOCHS - WARM,
        )  # fmt: skip
    for query in ASKED:
        of_rows, of_files, again = alone(_beside_spark, lines, query)
        for given, mine in (("rows in memory", of_rows), ("files", of_files)):
            yield Result(
                f"TPC-H {query}, {lines:,} lines, an epoch that changes 1 %, given as {given}", "a view", mine, "s",
                "Spark computes the query again", again, again / mine, ">= 10", again / mine >= 9,
                repeats=(EPOCHS - WARM) // 2,
            )  # fmt: skip


class _Given:
    """Rows of the tables: the first epoch's, and changes of 1 % of the orders."""

    def __init__(self, spark: SparkSession, lines: int, tables: set[str]) -> None:
        self._spark, self._tables = spark, tables
        self._generator = Tables(lines // 4)
        self._first = self._generator.first()
        self._next = self._generator.orders
        self.there = {name: self._first[name] for name in tables}

    def first(self) -> dict[str, DataFrame]:
        return {name: self._frame(name, self._first[name]) for name in self._tables}

    def changes(self, t: int, files: Path | None = None) -> dict[str, DataFrame]:
        """Returns the changes of an epoch: the oldest orders go, and others come. `files`: they are written to this directory."""
        n = self._generator.orders // SHARE
        orders, lines = self._generator.ordered(np.arange(self._next, self._next + n), self._first["partsupp"])
        self._next += n
        gone = pa.array(np.arange((t - 1) * n, t * n))
        made = {"orders": self._exchanged("orders", "o_orderkey", gone, orders)}
        made["lineitem"] = self._exchanged("lineitem", "l_orderkey", gone, lines)
        given = {name: table for name, table in made.items() if name in self._tables}
        nothing = {name: self._first[name].slice(0, 0) for name in self._tables if name not in given}
        if files is None:
            return {name: self._frame(name, table) for name, table in {**nothing, **given}.items()}
        return {name: self._file(files / f"{name}-{t}.parquet", table) for name, table in {**nothing, **given}.items()}

    def _exchanged(self, name: str, key: str, gone: pa.Array, new: pa.Table) -> pa.Table:
        import pyarrow.compute as pc  # noqa: PLC0415

        if name not in self._tables:
            return new
        is_gone = pc.is_in(self.there[name][key], value_set=gone)
        old = self.there[name].filter(is_gone)
        self.there[name] = pa.concat_tables([self.there[name].filter(pc.invert(is_gone)), new])
        return pa.concat_tables(
            [
                table.append_column(CHANGE_TYPE_COLUMN, pa.repeat(kind, len(table)))
                for table, kind in ((old, "delete"), (new, "insert"))
            ]
        )

    def _file(self, path: Path, table: pa.Table) -> DataFrame:
        pq.write_table(table, path)
        return self._spark.read.parquet(str(path))

    def _frame(self, name: str, table: pa.Table) -> DataFrame:
        return self._spark.createDataFrame(table).persist()


def _sums_by_hand(flow: nosync.Dataflow) -> None:
    flow["lineitem"].where("some", "l_quantity > 10").aggregate(
        "v", key=["l_suppkey"], price=nosync.sum("l_extendedprice"), n=nosync.count()
    )


def _join_by_hand(flow: nosync.Dataflow) -> None:
    lines = flow["lineitem"].select("lines", "l_partkey AS p_partkey", "l_extendedprice")
    joined = lines.join("joined", flow["part"].select("brands", "p_partkey", "p_brand"), on=["p_partkey"])
    joined.aggregate("v", key=["p_brand"], price=nosync.sum("l_extendedprice"), n=nosync.count())


def _beside_hand(lines: int, query: str, hand: Callable[[nosync.Dataflow], None] | None) -> float:
    """Returns the median of the seconds of an epoch, of a view or of what is made by hand."""
    spark = local_session(CORES, "nosync-bench", settings=_MEMORY)
    tables = {name for name in ("lineitem", "part") if name in query}
    with tempfile.TemporaryDirectory(dir=".") as directory:
        seconds = _epochs(spark, Path(directory), _Given(spark, lines, tables), query, hand, lambda _: None)
    spark.stop()
    return statistics.median(seconds[WARM:])


def _beside_spark(lines: int, name: str) -> tuple[float, float, float]:
    """Returns the medians of the seconds of an epoch of rows, of one of files, and of the query over all rows."""
    spark = local_session(CORES, "nosync-bench", settings=_MEMORY)
    query = QUERIES[name]
    given = _Given(spark, lines, _tables_of(query))
    with tempfile.TemporaryDirectory(dir=".") as directory:
        target = str(Path(directory).resolve() / "again")

        def again(there: Mapping[str, pa.Table]) -> None:
            for table, rows in there.items():
                frame = spark.createDataFrame(rows).persist()
                frame.count()
                frame.createOrReplaceTempView(table)
            seconds.append(timed(lambda: spark.sql(query).write.mode("overwrite").parquet(target)))
            for table in there:
                spark.table(table).unpersist()

        seconds: list[float] = []
        mine = _epochs(spark, Path(directory), given, query, None, again, by_turns=True)
    spark.stop()
    measured = mine[WARM:]
    return statistics.median(measured[::2]), statistics.median(measured[1::2]), statistics.median(seconds[WARM:])


def _epochs(
    spark: SparkSession, directory: Path, given: _Given, query: str, hand: Callable[[nosync.Dataflow], None] | None,
    after: Callable[[Mapping[str, pa.Table]], Any], *, by_turns: bool = False,
) -> list[float]:  # fmt: skip
    """Returns the seconds of each epoch. `after`: is called with what is there after each. `by_turns`: every second one is
    given files.
    """
    flow = _tables(given)
    if hand is None:
        flow.sql("v", query, spark=spark)
    else:
        hand(flow)
    with nosync.open(directory / "store", retain=100) as store:
        job = nosync.Job(flow, store, spark=spark, shards=SHARDS)
        first = given.first()
        job.advance(0, first)
        for frame in first.values():
            frame.unpersist()
        seconds = []
        for t in range(1, 1 + EPOCHS):
            has_files = by_turns and t % 2 == 0
            rows = given.changes(t, directory if has_files else None)
            for frame in rows.values() if not has_files else ():
                frame.count()
            seconds.append(timed(partial(job.advance, t, rows)))
            after(given.there)
        return seconds


def view_epochs(spark: SparkSession, directory: Path, name: str, lines: int) -> Generator[float]:
    """Yields the seconds of one epoch after another of a query of TPC-H as a view."""
    query = QUERIES[name]
    given = _Given(spark, lines, _tables_of(query))
    with nosync.open(directory, retain=100) as store:
        flow = _tables(given)
        flow.sql("v", query, spark=spark)
        job = nosync.Job(flow, store, spark=spark, shards=SHARDS)
        job.advance(0, given.first())
        for t in itertools.count(1):
            rows = given.changes(t)
            for frame in rows.values():
                frame.count()
            yield timed(partial(job.advance, t, rows))


def _tables_of(query: str) -> set[str]:
    return {table for table in SCHEMAS if f" {table}" in query.replace(",", " ").replace("\n", " ")}


def _tables(given: _Given) -> nosync.Dataflow:
    flow = nosync.Dataflow("views")
    for name in given.there:
        flow.table(name, SCHEMAS[name], key=KEYS[name])
    return flow
