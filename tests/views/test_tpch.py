"""The queries of TPC-H, all at once, kept up to date while orders come, lines are cancelled and customers change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

import nosync
from bench.tpch import KEYS, QUERIES, SCHEMAS, Tables
from nosync.lsm.columnar.columns import CHANGE_TYPE_COLUMN
from nosync.spark.schemas import parse_ddl
from tests.conftest import OpenStore
from tests.helpers.driver import driver_runs
from tests.views.both_ways import differences, flow_over_inputs, frames

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.long("make views")]

ORDERS = 500


class There:
    """The rows of the tables after what was given."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[Any, dict[str, Any]]] = {name: {} for name in SCHEMAS}
        self._schemas: dict[str, pa.Schema] = {}

    def give(self, given: Mapping[str, pa.Table]) -> Mapping[str, pa.Table]:
        for name, table in given.items():
            if name not in self._schemas:
                self._schemas[name] = table.schema
            for row in table.to_pylist():
                kind = row.pop(CHANGE_TYPE_COLUMN, None)
                key = tuple(row[column] for column in KEYS[name])
                if kind == "delete":
                    del self._rows[name][key]
                else:
                    self._rows[name][key] = row
        return given

    def tables(self) -> dict[str, pa.Table]:
        return {
            name: pa.Table.from_pylist(list(rows.values()), schema=self._schemas[name])
            for name, rows in self._rows.items()
        }


def cancelled(lines: pa.Table) -> pa.Table:
    return lines.append_column(CHANGE_TYPE_COLUMN, pa.repeat("delete", lines.num_rows))


def declared(spark: SparkSession, queries: Mapping[str, str]) -> nosync.Dataflow:
    flow = flow_over_inputs("tpch", SCHEMAS, KEYS)
    for name, query in queries.items():
        flow.sql(name, query, spark=spark)
    return flow


def epochs_of(generator: Tables) -> list[dict[str, pa.Table]]:
    first = generator.first()
    orders, lines = generator.ordered(np.arange(ORDERS, ORDERS + 40), first["partsupp"])
    gone = cancelled(first["lineitem"].slice(100, 60))
    both = pa.concat_tables([gone, lines.append_column(CHANGE_TYPE_COLUMN, pa.repeat("insert", lines.num_rows))])
    second = {"orders": orders, "lineitem": both, "customer": generator.changed_customers(12)}
    return [first, second]


def advance(spark: SparkSession, job: nosync.Job, t: int, given: Mapping[str, pa.Table]) -> None:
    nothing = {
        name: spark.createDataFrame(parse_ddl(ddl).empty_table()) for name, ddl in SCHEMAS.items() if name not in given
    }
    job.advance(t, {**nothing, **frames(spark, given)})


BY_SPARK_ALONE = ("q8", "q14")
"""The queries with quotients of so many digits that Arrow has no type for them."""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("shards", [1, 4])
def test_all_queries_are_what_spark_gives(
    spark: SparkSession, open_store: OpenStore, shards: int, caplog: pytest.LogCaptureFixture
) -> None:
    """With four shards the driver runs the second epoch, of those queries that it can run."""
    caplog.set_level("DEBUG", "nosync")
    queries = {name: query for name, query in QUERIES.items() if shards == 1 or name not in BY_SPARK_ALONE}
    job = nosync.Job(declared(spark, queries), open_store(retain=100), spark=spark, shards=shards)
    there = There()
    for t, given in enumerate(epochs_of(Tables(ORDERS))):
        with driver_runs(spark, "64m" if t else "0"):
            advance(spark, job, t, there.give(given))
        found = list(differences(spark, job, queries, there.tables()))
        assert not found, f"epoch {t}:\n" + "\n".join(found)
    assert ("is run by the driver" in caplog.text) == (shards == 4)
    session = spark.newSession()
    for name, table in there.tables().items():
        session.createDataFrame(table).createOrReplaceTempView(name)
    empty = [name for name, query in queries.items() if not session.sql(query).count()]
    assert not empty, "a query without an answer shows nothing"


@pytest.mark.timeout(600)
def test_another_predicate_in_one_of_five(spark: SparkSession, open_store: OpenStore) -> None:
    queries = {name: QUERIES[name] for name in ("q1", "q4", "q6", "q12", "q14")}
    generator, there = Tables(ORDERS), There()
    given = epochs_of(generator)
    job = nosync.Job(declared(spark, queries), open_store(retain=100), spark=spark, shards=2)
    for t, rows in enumerate(given):
        advance(spark, job, t, there.give(rows))
    other = queries["q6"].replace("l_quantity < 24", "l_quantity < 30")
    branch = job.branch("more", views={"q6": other})
    computed = str(branch.plan_replay()).split("shares", maxsplit=1)[0]
    assert "q6" in computed
    assert not [name for name in ("q1", "q4", "q12", "q14") if f"{name} (" in computed]
    branch.replay()
    found = list(differences(spark, branch, queries | {"q6": other}, there.tables()))
    assert not found, "\n".join(found)
