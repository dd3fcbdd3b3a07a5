"""Views beside Spark's own query over the rows that are there, after every epoch."""

from __future__ import annotations

import datetime
import decimal
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa

import nosync
from nosync.flow.tables import CHANGE_TYPES
from nosync.lsm.columnar.columns import CHANGE_TYPE_COLUMN
from nosync.spark.plans.verifying import different
from tests.helpers.driver import driver_runs
from tests.views.clauses import KEYS, SCHEMAS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
_TIME = pa.timestamp("us", "UTC")
ARROW: dict[str, pa.Schema] = {
    "orders": pa.schema({
        "id": pa.int64(), "person": pa.int64(), "item": pa.string(), "price": pa.float64(), "at": _TIME,
        "tax": pa.decimal128(9, 2),
    }),
    "people": pa.schema({"pid": pa.int64(), "city": pa.string(), "score": pa.float64()}),
    "clicks": pa.schema({"who": pa.int64(), "weight": pa.float64(), "page": pa.string(), "seen": _TIME}),
}  # fmt: skip


@dataclass
class Inputs:
    """Rows of chance for the inputs, epoch by epoch, and what is there after each."""

    seed: int
    rows: int = 24
    there: dict[str, dict[Any, dict[str, Any]]] = field(default_factory=lambda: {name: {} for name in SCHEMAS})

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)

    def epoch(self, t: int) -> dict[str, pa.Table]:
        """Returns the rows of an epoch: the first fills the tables, and others change and delete."""
        given = {}
        for name, most in (("orders", self.rows), ("people", 8)):
            (key,) = KEYS[name]
            picked = range(most) if t == 0 else self._chance.sample(range(most + 6), most // 3)
            changes = []
            for i in picked:
                if i in self.there[name] and self._chance.random() < 0.4:
                    changes.append({**self.there[name].pop(i), CHANGE_TYPE_COLUMN: "delete"})
                else:
                    self.there[name][i] = {key: i, **self._row(name)}
                    changes.append({**self.there[name][i], CHANGE_TYPE_COLUMN: self._chance.choice(CHANGE_TYPES[::2])})
            schema = ARROW[name].append(pa.field(CHANGE_TYPE_COLUMN, pa.string()))
            given[name] = pa.Table.from_pylist(changes, schema=schema)
        new = [self._click(t, i) for i in range(6)]
        self.there["clicks"] |= {(t, i): row for i, row in enumerate(new)}
        given["clicks"] = pa.Table.from_pylist(new, schema=ARROW["clicks"])
        return given

    def contents(self, name: str) -> pa.Table:
        return pa.Table.from_pylist(list(self.there[name].values()), schema=ARROW[name])

    def _row(self, name: str) -> dict[str, Any]:
        chance = self._chance
        if name == "people":
            city = chance.choice([None, "tea", "Ink", "Rome"])
            return {"city": city, "score": chance.choice([None, float(chance.randrange(12))])}
        return {
            "person": chance.choice([None, *range(6)]),
            "item": chance.choice([None, "tea", "ink", "pen", ""]),
            "price": chance.choice([None, float(chance.randrange(12)), -0.5]),
            "at": START + datetime.timedelta(minutes=chance.randrange(600)),
            "tax": chance.choice([None, decimal.Decimal(chance.randrange(100_000)) / 100]),
        }

    def _click(self, t: int, i: int) -> dict[str, Any]:
        chance = self._chance
        return {
            "who": chance.choice([None, 1, 2, 3]),
            "weight": float(chance.randrange(9)),
            "page": chance.choice([None, "a", "b"]),
            "seen": START + datetime.timedelta(minutes=20 * t + 3 * i + chance.randrange(3)),
        }


def flow_over_inputs(
    name: str = "views", schemas: Mapping[str, str] = SCHEMAS, keys: Mapping[str, Sequence[str]] = KEYS
) -> nosync.Dataflow:
    """Returns a flow of tables, where inputs have keys, and of sources."""
    flow = nosync.Dataflow(name)
    for input_name, ddl in schemas.items():
        if input_name in keys:
            flow.table(input_name, ddl, key=keys[input_name])
        else:
            flow.source(input_name, ddl)
    return flow


def named(queries: Mapping[str, str]) -> dict[str, str]:
    """Returns queries by the names of views."""
    return {clause.replace(" ", "_"): query for clause, query in queries.items()}


def parts(queries: Mapping[str, str], of: int) -> list[list[str]]:
    """Returns the names of queries in parts, each for one flow."""
    names = list(queries)
    return [names[i : i + of] for i in range(0, len(names), of)]


def frames(spark: SparkSession, given: Mapping[str, pa.Table]) -> dict[str, DataFrame]:
    return {name: spark.createDataFrame(table) for name, table in given.items()}


def differences(
    spark: SparkSession, job: nosync.Job, queries: Mapping[str, str], tables: Mapping[str, pa.Table]
) -> Iterator[str]:
    """Yields what views have that Spark's own query over the tables does not give, or the other way round."""
    session = spark.newSession()
    for name, table in tables.items():
        session.createDataFrame(table).createOrReplaceTempView(f"`{name}`")
    for name, query in queries.items():
        expected, found = session.sql(query).toArrow(), job.read(name).toArrow()
        if found.column_names != expected.column_names:
            yield f"{name}: columns {found.column_names}, expected {expected.column_names}"
            continue
        extra, missing = different(found, expected)
        if extra.num_rows or missing.num_rows:
            yield f"{name}: extra {extra.slice(0, 2).to_pylist()}, missing {missing.slice(0, 2).to_pylist()}"


def run(
    spark: SparkSession,
    store: nosync.Store,
    queries: Mapping[str, str],
    inputs: Inputs,
    epochs: int,
    shards: Sequence[int],
) -> nosync.Job:
    """Runs views for some epochs, each with the next number of shards, by the driver and by Spark in turn. Fails where a
    view is not what Spark gives.
    """
    flow = flow_over_inputs()
    for name, query in queries.items():
        flow.sql(name, query, spark=spark)
    job = nosync.Job(flow, store, spark=spark, shards=shards[0])
    for t in range(epochs):
        if t and shards[t % len(shards)] != shards[(t - 1) % len(shards)]:
            job.rescale(shards[t % len(shards)])
        with driver_runs(spark, "64m" if t % 2 == 0 else "0"):
            job.advance(t, frames(spark, inputs.epoch(t)))
        tables = {name: inputs.contents(name) for name in SCHEMAS}
        found = list(differences(spark, job, queries, tables))
        assert not found, f"epoch {t} of seed {inputs.seed}:\n" + "\n".join(found)
    return job
