"""What cannot be had right is refused, with a reason, before it is recorded; and what others do to a running job is noticed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

import nosync
from nosync.cli import main
from nosync.testing.daemon_cluster import running
from tests.conftest import OpenStore

pytestmark = pytest.mark.spark
SCHEMA = "k string, v bigint"


def given(spark: SparkSession, *rows: tuple[str, int]) -> dict[str, DataFrame]:
    return {"rows": spark.createDataFrame(list(rows), SCHEMA)}


@pytest.mark.parametrize(
    ("kind", "expression"),
    [
        ("select", "to_json(struct(*)) AS j"), ("select", "hash(*) AS h"), ("select", "* EXCEPT (v)"),
        ("select", lambda: F.col("*")), ("select", lambda: F.struct("*").alias("s")), ("where", "to_json(struct(*)) <> ''"),
    ],
)  # fmt: skip
def test_a_star_that_would_take_our_columns_is_refused(
    spark: SparkSession, open_store: OpenStore, kind: str, expression: str | Callable[[], Column]
) -> None:
    flow = nosync.Dataflow("f")
    rows = flow.source("rows", SCHEMA)
    chosen = expression if isinstance(expression, str) else expression()
    rows.select("out", "k", chosen) if kind == "select" else rows.where("out", chosen)
    with pytest.raises(nosync.SchemaError, match=r"stage out: .*a \* inside an expression"):
        nosync.Job(flow, open_store(), spark=spark, shards=2)


@pytest.mark.long
def test_stars_that_take_only_what_they_say_are_not(spark: SparkSession, open_store: OpenStore) -> None:
    flow = nosync.Dataflow("f")
    rows = flow.source("rows", "k string, s struct<a: bigint, b: bigint>, v bigint")
    out = rows.select(
        "out", "*", "v * 2 AS doubled", (F.col("v") * 3).alias("tripled"), "'(*)' AS text", persist="disk"
    )
    out.select("inside", "k", "s.*", persist="disk")
    job = nosync.Job(flow, open_store(), spark=spark, shards=2)
    job.advance(0, {"rows": spark.sql("SELECT 'x' AS k, named_struct('a', 1L, 'b', 2L) AS s, 5L AS v")})
    (row,) = job.read("out").collect()
    assert (row.doubled, row["text"]) == (10, "(*)")
    assert [tuple(row) for row in job.read("inside").collect()] == [("x", 1, 2)]


@pytest.mark.parametrize("name", ["_tag", "_report", "_hash64", "_side", "_matched", "__x", "_epoch"])
def test_names_of_ours_are_refused_wherever_a_column_comes_from(
    spark: SparkSession, open_store: OpenStore, name: str
) -> None:
    flow = nosync.Dataflow("f")
    with pytest.raises(nosync.SchemaError, match=f"column '{name}'"):
        flow.source("rows", f"k string, {name} bigint")
    flow = nosync.Dataflow("f")
    flow.source("rows", SCHEMA).map("out", lambda rows: rows.rename_columns(["k", name]))
    with pytest.raises(nosync.SchemaError, match=f"column '{name}'"):
        nosync.Job(flow, open_store(), spark=spark)


def test_late_rows_of_an_input_that_changes_are_only_read(spark: SparkSession, open_store: OpenStore) -> None:
    def flow_of(*, builds: bool) -> nosync.Dataflow:
        flow = nosync.Dataflow("f")
        latest = flow.source("rows", "k string, at timestamp, v bigint").update(
            "latest", key=["k"], state="at timestamp, v bigint", fn=lambda new, _: new.select(["k", "at", "v"])
        )
        counts = latest.window("counts", key=[], time="at", size="1 minute", watermark="0 seconds", n=nosync.count())
        if builds:
            counts.late.aggregate("late", key=["k"], n=nosync.count())
        return flow

    with pytest.raises(nosync.FlowError, match=r"stage late: .*can only be read, for the window's input changes"):
        nosync.Job(flow_of(builds=True), open_store("one"), spark=spark)
    nosync.Job(flow_of(builds=False), open_store("two"), spark=spark)


def test_a_worker_that_is_killed_is_an_error_of_ours_and_the_epoch_runs_again(
    spark: SparkSession, open_store: OpenStore, tmp_path: Path
) -> None:
    flag = tmp_path / "once"
    flag.touch()

    def die(rows: pa.Table) -> pa.Table:
        if rows.num_rows and flag.exists():
            flag.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return rows

    flow = nosync.Dataflow("f")
    flow.source("rows", SCHEMA).map("out", die, version="1")
    job = nosync.Job(flow, open_store(), spark=spark, shards=1)
    with pytest.raises(nosync.NosyncError, match="the Spark job failed"):
        job.advance(0, given(spark, ("a", 1)))
    job.advance(0, given(spark, ("a", 1)))
    assert job.read("out").count() == 1


def test_a_new_checkpoint_that_ran_no_batch_yet_is_started_again(
    spark: SparkSession, open_store: OpenStore, tmp_path: Path
) -> None:
    flow = nosync.Dataflow("f")
    flow.source("rows", SCHEMA).aggregate("sums", key=["k"], total=nosync.sum("v"))
    job = nosync.Job(flow, open_store(), spark=spark, shards=1)
    (tmp_path / "in").mkdir()

    def run(checkpoint: str, first: int) -> None:
        rows = spark.readStream.schema(SCHEMA).json(str(tmp_path / "in"))
        job.stream(
            {"rows": rows}, checkpoint=tmp_path / checkpoint, first=first, trigger={"availableNow": True}
        ).awaitTermination()

    (tmp_path / "in" / "0.json").write_text('{"k": "a", "v": 1}')
    run("one", 0)
    (tmp_path / "in" / "0.json").unlink()
    for _ in range(2):
        run("two", 1)
        assert job.last_sealed() == 0
    (tmp_path / "in" / "1.json").write_text('{"k": "a", "v": 2}')
    run("two", 1)
    assert job.last_sealed() == 1
    assert [row.total for row in job.read("sums").collect()] == [3]


def test_what_others_do_to_the_store_of_a_running_job(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "flow_for_recover.py").write_text(
        "import nosync\n\ndef make():\n    flow = nosync.Dataflow('f')\n"
        f"    flow.source('rows', '{SCHEMA}').aggregate('sums', key=['k'], total=nosync.sum('v'))\n    return flow\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    flow: Any = __import__("flow_for_recover").make()
    with running(tmp_path, ("n1",), replicas=1) as daemons, daemons.open("n1") as store:
        job = nosync.Job(flow, store, spark=spark, shards=1)
        for t in range(3):
            job.advance(t, given(spark, ("a", t)))
        main(["recover", str(daemons.data("n1")), "--flow", "flow_for_recover:make"])
        assert "layers lost       0" in capsys.readouterr().out
        job.advance(3, given(spark, ("a", 3)))  # where nothing is lost nobody is stopped
        main(["rewind", str(daemons.data("n1")), "1"])
        with pytest.raises(nosync.FencedError, match="was rewound"):
            job.advance(4, given(spark, ("a", 4)))
        assert nosync.Job(flow, store, spark=spark, shards=1).last_sealed() == 1


def test_a_column_of_maps_is_refused(spark: SparkSession, open_store: OpenStore) -> None:
    flow = nosync.Dataflow("f")
    flow.source("rows", "k string, s struct<m: map<string, bigint>>").aggregate("out", key=["k"], n=nosync.count())
    with pytest.raises(
        nosync.SchemaError, match=r"source rows: column 's' is .*map.*: give it as array<struct<key, value>>"
    ):
        nosync.Job(flow, open_store(), spark=spark, shards=2)


@pytest.mark.parametrize(
    ("column", "what"),
    [
        ("k string collate UTF8_LCASE", "has the collation UTF8_LCASE"),
        ("k array<string collate UTF8_LCASE>", "has the collation UTF8_LCASE"),
        ("k variant", "whose values cannot be hashed"),
        ("k struct<t: time(6)>", "whose values cannot be hashed"),
    ],
)
def test_columns_that_tasks_would_tell_apart_otherwise_than_spark(
    spark: SparkSession, open_store: OpenStore, column: str, what: str
) -> None:
    flow = nosync.Dataflow("f")
    flow.source("rows", f"{column}, v bigint").aggregate("n", key=["v"], n=nosync.count())
    with pytest.raises(nosync.SchemaError, match=what):
        nosync.Job(flow, open_store(), spark=spark, shards=2)


def test_rows_of_a_collation_are_refused(spark: SparkSession, open_store: OpenStore) -> None:
    flow = nosync.Dataflow("f")
    flow.source("rows", SCHEMA).aggregate("n", key=["k"], n=nosync.count())
    job = nosync.Job(flow, open_store(), spark=spark, shards=2)
    with pytest.raises(nosync.SchemaError, match="column 'k' has the collation UTF8_LCASE"):
        job.advance(0, {"rows": spark.sql("SELECT 'a' COLLATE UTF8_LCASE AS k, 1L AS v")})


def test_columns_that_differ_only_in_case(spark: SparkSession, open_store: OpenStore) -> None:
    """Spark takes one for the other, unless it is told not to."""
    flow = nosync.Dataflow("f")
    flow.source("rows", "k string, V bigint, v bigint").aggregate(
        "sums", key=["k"], a=nosync.sum("V"), b=nosync.sum("v")
    )
    store = open_store()
    with pytest.raises(nosync.SchemaError, match="source rows: columns 'V' and 'v' differ only in case"):
        nosync.Job(flow, store, spark=spark, shards=2)
    spark.conf.set("spark.sql.caseSensitive", "TRUE")
    try:
        job = nosync.Job(flow, store, spark=spark, shards=2)
        job.advance(0, {"rows": spark.createDataFrame([("x", 1, 10), ("x", 2, 20)], "k string, V bigint, v bigint")})
        assert [tuple(row) for row in job.read("sums").collect()] == [("x", 3, 30)]
    finally:
        spark.conf.unset("spark.sql.caseSensitive")


def test_arguments_of_another_kind_are_told(spark: SparkSession, open_store: OpenStore, tmp_path: Path) -> None:
    flow = nosync.Dataflow("f")
    flow.source("rows", SCHEMA).aggregate("sums", key=["k"], total=nosync.sum("v"))
    job = nosync.Job(flow, open_store(), spark=spark, shards=2)
    job.advance(0, given(spark, ("x", 1)))
    other = nosync.Job(flow, open_store("other"), spark=spark, shards=2)
    stream = spark.readStream.format("rate").load().selectExpr("CAST(value AS string) AS k", "value AS v")
    at: Any = np.int64(0)
    wrong: Any = "x"
    number: Any = 3
    for call, message in (
        (lambda: job.explain("sums", wrong), "stage sums: key is 'x', expected its columns and values: {'k': ...}"),
        (lambda: job.promote(wrong), r"promote\('x'\): expected the branch's Job"),
        (lambda: job.promote(other), "branch 'main' is one of .*other, not of .*store"),
        (lambda: job.branch("b", add=number), "add is 3, expected a function"),
        (lambda: job.branch("b", drop="sums"), r"drop is 'sums', expected a list of stage names: \['sums'\]"),
        (lambda: job.branch("b", replace=wrong), "replace is 'x', expected a dictionary"),
        (lambda: job.read("sums", as_of=at), r"np.int64\(0\) is not an epoch number.*give int\(...\) of it"),
        (lambda: job.stream({"rows": stream}, checkpoint=tmp_path / "cp", trigger=wrong), "trigger is 'x', expected"),
        (lambda: job.stream({"rows": stream}, checkpoint=tmp_path / "cp", first=1, trigger={"every": "1s"}), "'every'"),
        (lambda: job.stream({"rows": stream}, checkpoint=tmp_path / "cp", first=1, trigger={"once": 5}), "'once'"),
    ):
        with pytest.raises(nosync.NosyncError, match=message):
            call()
    assert sorted(job._store.branches()) == ["main"]
