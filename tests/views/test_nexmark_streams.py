"""NexMark's queries, from one text, by Structured Streaming and as views: the same micro-batches give the same rows.

Persons, auctions and bids only come here, as in NexMark. What Spark refuses over streams is named, for views answer it
all the same: test_nexmark.py compares those with Spark over tables.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException

import nosync
from nosync.lsm.columnar.columns import CHANGE_TYPE_COLUMN
from tests.conftest import OpenStore
from tests.parity.both_ways import APPEND, EPOCHS_AFTER, UPDATE, Batch, Case, Streams, at_sink, by_spark
from tests.views.nexmark import KEYS, Q11, QUERIES, SCHEMAS, Rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

STREAMS = ("person", "auction", "bid")
TABLE = "side_input"
"""It does not change here: Spark joins streams with a table as it is when a batch begins."""
DELAY = "2 seconds"
IN_FULL = {**QUERIES, "q11": Q11}
IN_APPEND = ("q0", "q1", "q2", "q3", "q7", "q8", "q10", "q11", "q12", "q13", "q14", "q20", "q21", "q22")
IN_UPDATE = {"q17": ["auction", "day"]}
IN_PARTS = {
    "q7": {"highest": "SELECT max(price) AS most, window.end AS until FROM bid GROUP BY window(at, '10 seconds')"},
    "q8": {
        "persons": "SELECT id, name, window.start AS begin FROM person GROUP BY id, name, window(at, '10 seconds')",
        "sellers": "SELECT seller, window.start AS begin FROM auction GROUP BY seller, window(at, '10 seconds')",
    },
}
"""What is a view of its own: windows that are final, which another view joins. Spark has one watermark for all of it."""
_NO_WATERMARK, _LATE, _DISTINCT = "without watermark", "'correctness' issue", "Distinct aggregations"
_PLACES = "NON_TIME_WINDOW_NOT_SUPPORTED"
REFUSED_BY_SPARK = {
    "q4": (_NO_WATERMARK, _LATE), "q5": (_NO_WATERMARK, _LATE), "q6": (_NO_WATERMARK, _PLACES), "q9": (_PLACES, _PLACES),
    "q15": (_NO_WATERMARK, _DISTINCT), "q16": (_NO_WATERMARK, _DISTINCT), "q18": (_PLACES, _PLACES),
    "q19": (_PLACES, _PLACES),
}  # fmt: skip
"""What Spark says of each in mode append, and in mode update."""


def query_of(text: str, side_input: DataFrame | None = None) -> Any:
    """Returns what asks a query in SQL over streams that have a watermark, as one does in a notebook."""

    def query(streams: Streams) -> DataFrame:
        session = streams["bid"].sparkSession
        for name in STREAMS:
            streams[name].withWatermark("at", DELAY).createOrReplaceTempView(name)
        (streams[TABLE] if side_input is None else side_input).createOrReplaceTempView(TABLE)
        return session.sql(text)

    return query


def batches_of(seed: int, epochs: int = 4) -> tuple[list[Batch], pa.Table]:
    """Returns the rows that come to the streams, and those of the table."""
    rows, batches = Rows(seed, each=100), []
    for t in range(epochs):
        given = rows.epoch(t)
        new = {name: given[name] for name in STREAMS}
        for name in set(STREAMS) & set(KEYS):  # without the changes of what was there
            last = max((row["id"] for batch in batches for row in batch[name].to_pylist()), default=0)
            table = new[name].filter(pa.array([key > last for key in new[name].column("id").to_pylist()], pa.bool_()))
            new[name] = table.drop_columns([CHANGE_TYPE_COLUMN])
        if t == 0:
            side_input = given[TABLE].drop_columns([CHANGE_TYPE_COLUMN])
        batches.append(new)
    return batches, side_input


def by_view(spark: SparkSession, store: nosync.Store, case: Case, batches: list[Batch], side_input: pa.Table) -> Any:
    """Returns the rows that a sink of the query's view is given."""
    flow = nosync.Dataflow("nexmark")
    for name in STREAMS:
        flow.source(name, SCHEMAS[name])
    flow.table(TABLE, SCHEMAS[TABLE], key=KEYS[TABLE])
    text = IN_FULL[case.name]
    for name, part in IN_PARTS.get(case.name, {}).items():
        assert f"({part})" in text
        flow.view(name, query_of(part), emit="final", spark=spark)
        text = text.replace(f"({part})", name)
    if case.name in IN_PARTS or case.name == "q13":  # rows of a view, or of a table, are joined as they come
        flow.sql("out", text, spark=spark)
    else:
        flow.view("out", query_of(text), emit="final" if case.mode == APPEND else "changes", spark=spark)
    job = nosync.Job(flow, store, spark=spark, shards=2)
    nothing = {name: table.slice(0, 0) for name, table in batches[0].items()}
    epochs = [*batches, *[nothing] * EPOCHS_AFTER]
    for t, batch in enumerate(epochs):
        given = {**batch, TABLE: side_input if t == 0 else side_input.slice(0, 0)}
        job.advance(t, {name: spark.createDataFrame(table) for name, table in given.items()})
    rows = job.changes("out", -1, len(epochs) - 1).toArrow().to_pylist()
    return case.counted(at_sink(case, rows))


def columns_of(spark: SparkSession, text: str) -> list[str]:
    session = spark.newSession()
    for name, ddl in SCHEMAS.items():
        session.createDataFrame([], ddl).createOrReplaceTempView(name)
    return session.sql(text).columns


@pytest.mark.long("make views")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "q12" else [pytest.mark.long("make views")])
        for name in (*IN_APPEND, *IN_UPDATE)
    ],
)
def test_both_engines_give_the_same_rows(spark: SparkSession, open_store: OpenStore, tmp_path: Path, name: str) -> None:
    batches, side_input = batches_of(seed=5)
    session = spark.newSession()  # whose views are of this test
    mode, columns = UPDATE if name in IN_UPDATE else APPEND, columns_of(session, IN_FULL[name])
    query = query_of(IN_FULL[name], session.createDataFrame(side_input))
    case = Case(name, mode, query, nosync.Dataflow, columns, lambda _: batches, IN_UPDATE.get(name, ()))
    expected = by_spark(session, case, batches, tmp_path / "spark")
    assert expected, "a query without an answer shows nothing"
    assert by_view(spark, open_store(), case, batches, side_input) == expected


@pytest.mark.long("make views")
@pytest.mark.parametrize("name", REFUSED_BY_SPARK)
def test_spark_refuses_the_others_over_streams(spark: SparkSession, tmp_path: Path, name: str) -> None:
    batches, side_input = batches_of(seed=5, epochs=1)
    session = spark.newSession()
    query = query_of(IN_FULL[name], session.createDataFrame(side_input))
    for mode, why in zip((APPEND, UPDATE), REFUSED_BY_SPARK[name], strict=True):
        case = Case(name, mode, query, nosync.Dataflow, columns_of(spark, IN_FULL[name]), lambda _: batches)
        with pytest.raises(PySparkException, match=why):
            by_spark(session, case, batches, tmp_path / mode)


def test_every_query_is_here() -> None:
    assert {*IN_APPEND, *IN_UPDATE} ^ REFUSED_BY_SPARK.keys() == IN_FULL.keys()
