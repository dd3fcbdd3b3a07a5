"""Tasks run the functions that a job was made of, whatever becomes of what those use."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import nosync
from nosync.lsm.errors import FlowError
from tests.conftest import OpenStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def flow_of(limits: list[int]) -> nosync.Dataflow:
    def low(rows: pa.Table) -> pa.Table:
        return rows.filter(pc.less(rows["n"], limits[0]))

    def counted(key: tuple[Any, ...], rows: list[dict[str, Any]], state: dict[str, Any] | None) -> dict[str, Any]:
        return {"total": limits[0]}

    flow = nosync.Dataflow("f")
    low_rows = flow.source("rows", "n bigint").map("low", low, persist="disk")
    low_rows.update_per_key("counts", key=["n"], state="total bigint", fn=counted)
    return flow


def read(store: nosync.Store) -> tuple[list[Any], list[Any]]:
    low, counts = store.read("low").to_pylist(), store.read("counts").to_pylist()
    return sorted(row["n"] for row in low), sorted((row["n"], row["total"]) for row in counts)


def test_what_a_function_uses_changes_after_the_job_was_made(spark: SparkSession, open_store: OpenStore) -> None:
    """As in a notebook. What is recorded is what the fingerprint says, and so it is after a recovery."""
    limits, store = [3], open_store()
    declared = flow_of(limits)
    job = nosync.Job(declared, store, spark=spark, shards=2)
    job.advance(0, {"rows": spark.range(10).toDF("n")})
    limits[0] = 7
    declared.source("later", "n bigint")
    job.advance(1, {"rows": spark.range(10).toDF("n")})
    as_it_was = [0, 0, 1, 1, 2, 2], [(0, 3), (1, 3), (2, 3)]
    assert read(store) == as_it_was
    store.sync()
    for layer in store.layers():
        if layer.stage != "rows":
            Path(layer.path).unlink()
    assert job.recover().recomputed == 8
    assert read(store) == as_it_was
    branch = job.branch("more", at=0, replace={"counts": lambda key, rows, state: {"total": -limits[0]}})
    limits[0] = 9
    branch.replay()
    assert [row["total"] for row in branch.read("counts").collect()] == [-7, -7, -7]

    with pytest.raises(FlowError, match="low"):  # it is another function by now
        nosync.Job(flow_of(limits), store, spark=spark, shards=2)
    limits[0] = 3
    nosync.Job(flow_of(limits), store, spark=spark, shards=2).advance(2, {"rows": spark.range(1).toDF("n")})


def test_broadcast_variables_go_with_each_job(spark: SparkSession, open_store: OpenStore) -> None:
    known = spark.sparkContext.broadcast({1, 4})

    def some(rows: pa.Table) -> pa.Table:
        return rows.filter(pa.array([n in known.value for n in rows["n"].to_pylist()], pa.bool_()))

    flow = nosync.Dataflow("f")
    flow.source("rows", "n bigint").map("some", some, persist="disk")
    store = open_store()
    job = nosync.Job(flow, store, spark=spark, shards=2)
    for t in range(2):
        job.advance(t, {"rows": spark.range(6).toDF("n")})
    assert sorted(store.read("some")["n"].to_pylist()) == [1, 1, 4, 4]


def test_a_function_that_cannot_be_sent_is_refused_at_once(spark: SparkSession, open_store: OpenStore) -> None:
    lock = threading.Lock()

    def locked(rows: pa.Table) -> pa.Table:
        with lock:
            return rows

    flow = nosync.Dataflow("f")
    flow.source("rows", "n bigint").map("locked", locked)
    with pytest.raises(FlowError, match="stage locked: its function cannot be sent to Spark's tasks: .*lock"):
        nosync.Job(flow, open_store(), spark=spark, shards=2)


@pytest.mark.parametrize(
    "body", ["return helpers_of_udfs.clean(n)", "from helpers_of_udfs import clean\n    return clean(n)"]
)
def test_code_that_a_udf_only_names_counts(
    spark: SparkSession, open_store: OpenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    """Spark sends the name of a module's function to workers, and not its code."""
    from pyspark.sql import functions as F

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    store = open_store()

    def fingerprint_of(factor: int, unused: int) -> str:
        (tmp_path / "helpers_of_udfs.py").write_text(
            f"def clean(n): return n * {factor}\ndef other(n): return {unused}\n"
        )
        sys.modules.pop("helpers_of_udfs", None)
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(f"import helpers_of_udfs\ndef udf(n):\n    {body}", names)
        flow = nosync.Dataflow("f")
        rows = flow.source("rows", "n bigint").select("s", F.udf(names["udf"], "bigint")("n").alias("n"))
        rows.aggregate("total", key=[], n=nosync.sum("n"))
        return nosync.Job(flow, store, spark=spark, shards=2).flow.stages["s"].fingerprint

    try:
        first = fingerprint_of(1, 1)
        assert fingerprint_of(1, 2) == first
        assert fingerprint_of(1000, 1) != first
    finally:
        sys.modules.pop("helpers_of_udfs", None)
