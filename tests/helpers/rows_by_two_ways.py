"""Rows and flows for tests that compare the layers of one way that rows get to tasks with those of another."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa

import nosync
from nosync.spark.schemas import parse_ddl

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SHARDS = 3
ROWS = "id bigint, name string, n int, flag boolean"
ROWS_NAMES = [column.split()[0] for column in ROWS.split(", ")]


def rows_of(t: int, n: int = 400) -> pa.Table:
    names = [None if i % 7 == 3 else f"näme {i % 11}" * (i % 4) for i in range(n)]
    return pa.table(
        {
            "id": pa.array([None if i % 50 == 49 else (i * 7919 + t) % 101 - 50 for i in range(n)], pa.int64()),
            "name": pa.array(names, pa.string()),
            "n": pa.array([None if i % 13 == 5 else i % 31 - 15 for i in range(n)], pa.int32()),
            "flag": pa.array([None if i % 17 == 2 else i % 3 == 0 for i in range(n)], pa.bool_()),
        }
    )


def by_id(flow: nosync.Dataflow) -> None:
    flow.source("rows", ROWS).where("wanted", "n > 0 AND flag").aggregate("out", key=["id"], n=nosync.count())


def by_expression(flow: nosync.Dataflow) -> None:
    rows = flow.source("rows", ROWS).where("wanted", "name IS NOT NULL OR n = 3")
    rows.select("made", "id - id % 10 AS w", "n + 1 AS more", "name").aggregate(
        "out", key=["w"], n=nosync.count(), more=nosync.sum("more"), least=nosync.min("name")
    )


def by_nothing(flow: nosync.Dataflow) -> None:
    """A source of its own, and two ends."""
    rows = flow.source("rows", ROWS)
    rows.map("same", lambda table: table).dedupe("ids", key=["id"])
    rows.select("chosen", "name", "n * 2 AS n").dedupe("names", key=["name"])


def joined(flow: nosync.Dataflow) -> None:
    rows = flow.source("rows", ROWS)
    others = flow.source("others", ROWS).where("some", "NOT (n IN (1, 2, 3))").select("few", "id", "name AS other")
    rows.select("left", "id", "n").join("out", others, on=["id"])


FLOWS = [by_id, by_expression, by_nothing, joined]


def job_of(make: Callable[[nosync.Dataflow], None], spark: SparkSession, store: nosync.Store) -> nosync.Job:
    flow = nosync.Dataflow("f")
    make(flow)
    return nosync.Job(flow, store, spark=spark, shards=SHARDS)


WIDE = (
    "b tinyint, s smallint, i int, l bigint, f float, d double, flag boolean, text string, bytes binary, day date, "
    "at timestamp, local timestamp_ntz, amount decimal(10,2), large decimal(38,4)"
)


def wide_rows(n: int = 300) -> pa.Table:
    """Of all types that tasks read, with what is special of each."""
    schema = parse_ddl(WIDE)
    special: dict[str, list[Any]] = {
        "b": [-128, 127], "s": [-(2**15), 2**15 - 1], "i": [-(2**31), 2**31 - 1], "l": [-(2**63), 2**63 - 1],
        "f": [float("nan"), -0.0, 0.0, float("inf"), 1.5], "d": [float("nan"), -0.0, 0.0, float("-inf"), 1e300],
        "flag": [True, False], "text": ["", "a", "ä" * 40, "x" * 33, "\x00"], "bytes": [b"", b"\xff" * 9, b"12345678"],
        "day": [dt.date(1, 1, 1), dt.date(1970, 1, 1), dt.date(9999, 12, 31), dt.date(1582, 10, 10)],
        "at": [dt.datetime(1, 1, 1, tzinfo=dt.UTC), dt.datetime(2026, 3, 29, 2, 30, 0, 1, tzinfo=dt.UTC)],
        "local": [dt.datetime(1, 1, 1), dt.datetime(9999, 12, 31, 23, 59, 59, 999999)],
        "amount": [Decimal("-99999999.99"), Decimal("0.00"), Decimal("1.10")],
        "large": [Decimal(-(10**33)), Decimal("123456789012345678901.0001"), Decimal(0)],
    }  # fmt: skip
    columns = []
    for number, field in enumerate(schema):
        values = [None, *special[field.name]]
        columns.append(pa.array([values[i * (number + 3) // 2 % len(values)] for i in range(n)], field.type))
    return pa.Table.from_arrays(columns, schema=schema)
