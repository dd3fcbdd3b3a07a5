"""Rows on their way to Python tasks: none is lost or changed, however long, and bytes are counted only where they must be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import nosync
from nosync.lsm.errors import WideRowError
from tests.conftest import OpenStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

MOST_ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"
MOST_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """The first epoch of each Spark job that follows, and whether bytes were counted in it."""
    from nosync.spark import runner

    found: list[tuple[int, bool]] = []
    run_epochs = runner.run_epochs

    def run(spark: Any, flow: Any, plans: Any, inputs: Any, *, has_wide_rows: bool, **more: Any) -> Any:
        found.append((plans[0].t, has_wide_rows))
        return run_epochs(spark, flow, plans, inputs, has_wide_rows=has_wide_rows, **more)

    monkeypatch.setattr(runner, "run_epochs", run)
    return found


def texts(spark: SparkSession, *lengths: int) -> DataFrame:
    return spark.createDataFrame([(i, "x" * n) for i, n in enumerate(lengths)], "id bigint, text string")


def lengths_of(table: pa.Table) -> dict[int, int]:
    return {row["id"]: len(row["text"]) for row in table.to_pylist()}


def kept(rows: pa.Table) -> pa.Table:
    return rows


def longer(rows: pa.Table) -> pa.Table:
    return rows.set_column(1, "text", pa.array([t * 2000 for t in rows.column("text").to_pylist()], pa.string()))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.long
def test_an_epoch_with_a_long_row_runs_again_and_the_jobs_next_ones_count(
    spark: SparkSession,
    open_store: OpenStore,
    runs: list[tuple[int, bool]],
    caplog: pytest.LogCaptureFixture,
    fused: bool,
) -> None:
    """And it is said why once, with what spares it."""
    flow = nosync.Dataflow("f")
    rows = flow.source("rows", "id bigint, text string")
    rows = rows.select("all", "id", "text") if fused else rows.map("all", kept)
    rows.dedupe("out", key=["id"])
    store = open_store()
    job = nosync.Job(flow, store, spark=spark, shards=2)
    job.advance(0, {"rows": texts(spark, 1024, 0, 1000)})
    assert runs == [(0, False)]
    job.advance(1, {"rows": texts(spark, 3, 7, 5, 2_000_000, 1025, 9)})
    assert runs[1:] == [(1, False), (1, True)]
    job.advance(2, {"rows": texts(spark, *range(8))})
    assert runs[3:] == [(2, True)]
    assert lengths_of(store.read("out")) == {0: 1024, 1: 0, 2: 1000, 3: 2_000_000, 4: 1025, 5: 9, 6: 6, 7: 7}
    assert sorted(len(row["text"]) for row in store.read("rows").to_pylist()) == sorted(
        [1024, 0, 1000, 3, 7, 5, 2_000_000, 1025, 9, *range(8)]
    )
    (message,) = caplog.messages
    assert message.startswith("epoch 1: a row has more than 1,024 bytes of text")
    assert MOST_BYTES in message
    store.sync()
    lost = max((layer for layer in store.layers() if layer.stage == "out"), key=lambda layer: layer.bytes)
    Path(lost.path).unlink()
    assert job.recover().recomputed == 1


@pytest.mark.long
def test_long_rows_that_tasks_make_are_found_too(
    spark: SparkSession, open_store: OpenStore, runs: list[tuple[int, bool]]
) -> None:
    """What was recorded before the row was met stays, and is used."""
    flow = nosync.Dataflow("f")
    rows = flow.source("rows", "id bigint, text string")
    rows.map("longer", longer).aggregate("out", key=["id"], text=nosync.max("text"))
    store = open_store()
    nosync.Job(flow, store, spark=spark, shards=2).advance(0, {"rows": texts(spark, 0, 1, 2)})
    assert runs == [(0, False), (0, True)]
    assert lengths_of(store.read("out")) == {0: 0, 1: 2000, 2: 4000}


def test_epochs_of_a_backfill_run_together_in_spite_of_a_long_row(
    spark: SparkSession, open_store: OpenStore, runs: list[tuple[int, bool]]
) -> None:
    flow = nosync.Dataflow("f")
    flow.source("rows", "id bigint, text string").aggregate("out", key=["id"], text=nosync.max("text"))
    store = open_store()
    job = nosync.Job(flow, store, spark=spark, shards=2)
    job.backfill({"rows": texts(spark, 1, 2, 3000, 4)}, epoch="CAST(id AS INT)")
    assert runs == [(0, False), (0, True)]
    assert lengths_of(store.read("out")) == {0: 1, 1: 2, 2: 3000, 3: 4}


def test_whose_rows_may_be_long_has_its_bytes_counted(spark: SparkSession) -> None:
    from nosync.flow.binder import bind
    from nosync.spark.arrow_transfer import handover
    from nosync.spark.schemas import parse_ddl
    from nosync.spark.session import arrow_settings

    def made(columns: str, given: DataFrame | None = None, **how: bool) -> tuple[dict[str, str], bool]:
        flow = nosync.Dataflow("f")
        flow.source("n", columns).aggregate("sums", key=["id"], n=nosync.count())
        found = handover(spark, bind(flow, parse_ddl), {} if given is None else {"n": given}, **how)
        return dict(found.settings), found.is_text_limited

    def rows(width: int) -> dict[str, str]:
        return {MOST_BYTES: str(2**31 - 1), MOST_ROWS: str((64 << 20) // width)}

    assert arrow_settings(spark, None) == {}
    assert made("id bigint, n bigint", has_wide_rows=True) == (rows(16) | {MOST_ROWS: "1000000"}, False)
    assert made("id bigint, text string, more binary") == (rows(8 + 4 + 4 + 1024), True)
    assert made("id bigint, text string", has_wide_rows=True) == ({}, False)
    assert made("id bigint, texts array<string>") == ({}, False)
    functions = spark.range(3).mapInArrow(lambda batches: batches, "id bigint")
    assert made("id bigint", functions) == ({}, False)
    for other in ("uuid() AS text", "CAST(current_timestamp() AS STRING) AS text", "CAST(rand() AS STRING) AS text"):
        again = spark.range(3).selectExpr("id", other)
        assert made("id bigint, text string", again) == ({}, False), "the rows may be others when they are given again"
    spark.conf.set(MOST_BYTES, "1000000b")
    try:
        assert made("id bigint, text string") == ({}, False), "the user's setting counts"
    finally:
        spark.conf.unset(MOST_BYTES)


def test_functions_in_expressions_have_their_bytes_counted(spark: SparkSession) -> None:
    """They get what tasks make, which may be long, and what they return may be short."""
    from pyspark.sql import functions as F

    from nosync.flow.binder import bind
    from nosync.spark.arrow_transfer import Handover, handover
    from nosync.spark.expressions import Analyzer
    from nosync.spark.schemas import parse_ddl

    flow = nosync.Dataflow("f")
    made = flow.source("rows", "id bigint").map(
        "texts", lambda rows: rows.append_column("t", rows["id"].cast("string"))
    )
    size = F.udf(len, "int")
    made.select("sizes", "id", size("t").alias("size")).aggregate("out", key=["id"], size=nosync.sum("size"))
    assert handover(spark, bind(flow, parse_ddl, Analyzer(spark, {})), {"rows": spark.range(3)}) == Handover()


def test_rows_that_are_others_each_time_run_once(
    spark: SparkSession, open_store: OpenStore, runs: list[tuple[int, bool]]
) -> None:
    """What is recorded of the first run would not go with the second."""
    flow = nosync.Dataflow("f")
    rows = flow.source("rows", "id bigint, text string").map("longer", longer)
    rows.aggregate("out", key=["id"], text=nosync.max("text"))
    store = open_store()
    given = spark.range(40).selectExpr("id", "CAST(current_timestamp() AS STRING) AS text")
    nosync.Job(flow, store, spark=spark, shards=4).advance(0, {"rows": given})
    assert runs == [(0, False)]
    assert store.read("out").num_rows == 40


@pytest.mark.long
def test_rows_are_limited_by_all_of_their_text(spark: SparkSession) -> None:
    """Bytes, not characters; of strings and binary values together; nulls have none."""
    from nosync.spark.arrow_transfer import MOST_TEXT_BYTES, Handover
    from nosync.spark.errors import task_errors

    def passed(a: str | None, b: bytes | None) -> int:
        def ids(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                yield batch.select(["n.`"])

        rows = spark.createDataFrame([(7, a, b)], "`n.```  bigint, a string, `b.c` binary")
        with task_errors():
            return int(
                Handover({}, is_text_limited=True).mapped(rows, ids, pa.schema([("n.`", pa.int64())])).collect()[0][0]
            )

    half = MOST_TEXT_BYTES // 2
    assert passed(None, None) == passed("ü" * (half // 2), b"x" * half) == passed(None, b"x" * 2 * half) == 7
    for a, b in (("ü" * (half // 2), b"x" * (half + 1)), (None, b"x" * (2 * half + 1)), ("ü" * (half + 1), None)):
        with pytest.raises(WideRowError, match="1,024 bytes"):
            passed(a, b)


def test_expressions_reach_spark_as_they_are(spark: SparkSession) -> None:
    from nosync.spark.selecting import selected

    texts = ["id + 1 AS a", "'\n\\\\,;' AS `b.c`", "concat('\u2192', id) AS d", "-- nothing\n id"]
    for these in (texts, texts[:1], [*texts, "'\x01' AS e"]):
        assert selected(spark.range(2), these).collect() == spark.range(2).selectExpr(*these).collect()
