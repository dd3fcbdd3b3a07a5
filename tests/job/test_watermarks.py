"""Windows over several inputs as Spark runs them: expressions of the JVM on the way, shards, and every way to run an epoch."""

from __future__ import annotations

import datetime
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.sql import functions as F

import nosync
from nosync.cli import main
from nosync.job.meanings import WATERMARK_POLICIES
from nosync.lsm.status import WindowStatus
from tests.conftest import OpenStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

COLUMNS = "k string, made timestamp, x bigint"
START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
EPOCHS = 5
MADE_BY = ("u", "w", "w__watermark", "w__late", "d", "shown")


def rows(name: str, t: int) -> list[tuple[str, datetime.datetime, int]]:
    """Those of `b` are five hours behind; in epoch 3 it is silent, and in epoch 4 one of them is late even so."""
    minute = 60 * t + (0 if name == "b" else 300)
    minutes = [minute + i * 7 for i in range(6)]
    if name == "b" and t == 3:
        return []
    if name == "b" and t == 4:
        minutes[0] -= 180
    return [(f"k{i % 4}", START + datetime.timedelta(minutes=m), 10 * t + i) for i, m in enumerate(minutes)]


def inputs(spark: SparkSession, t: int) -> dict[str, DataFrame]:
    return {name: spark.createDataFrame(rows(name, t), COLUMNS) for name in "ab"}


def declared(*, later: bool = False, **window: Any) -> nosync.Dataflow:
    """`later`: the time is made by expressions after the inputs came together, and rows pass a stage that keeps state."""
    flow = nosync.Dataflow("f")
    a, b = (flow.source(name, COLUMNS) for name in "ab")
    union = a.where("some", "x >= 0").union("u", b)
    stage = union.where("known", "k IS NOT NULL").select("shown", "upper(k) AS k", "made AS at", "x")
    if later:
        stage = stage.dedupe("d").map("same", lambda rows: rows)
    stage.window("w", key=["k"], time="at", size="30 minutes", watermark="10 minutes", n=nosync.count(), total=nosync.sum("x"),
                 **window)  # fmt: skip
    return flow


def found(job: nosync.Job) -> list[Counter[Any]]:
    last = job.last_sealed()
    watermarks = [
        set(job.changes("w__watermark", t - 1, t).select("watermark", F.to_json("inputs")).collect())
        for t in range(last + 1)
    ]
    assert all(len(of_epoch) == 1 for of_epoch in watermarks), "every shard says the same"
    of_epochs = Counter(tuple(next(iter(of_epoch))) for of_epoch in watermarks)
    return [Counter(map(tuple, job.read(name).collect())) for name in ("w", "w__late")] + [of_epochs]


@pytest.mark.long
def test_every_way_to_run_epochs_gives_the_same_answer(spark: SparkSession, open_store: OpenStore) -> None:
    """One by one, all at once, with other numbers of shards, computed again after a loss, and replayed on a branch."""
    store = open_store("one")
    for t in range(EPOCHS):
        job = nosync.Job(declared(later=True), store, spark=spark, shards=2 if t < 3 else 3)
        job.advance(t, inputs(spark, t))
    expected = found(job)
    assert job.read("w__late").count() == 1, "only the row that is behind its own input"
    assert (
        sum(row.n for row in job.read("w").collect()) == sum(len(rows(n, t)) for n in "ab" for t in range(EPOCHS)) - 1
    )

    store.sync()
    lost = [layer for layer in store.layers() if layer.stage in MADE_BY]
    for layer in lost:
        Path(layer.path).unlink()
    assert len(lost) > EPOCHS
    assert not job.recover().unrecoverable
    assert found(job) == expected

    branch = job.branch("other", at=1, replace={"w": {"n": nosync.count(), "total": nosync.max("x")}})
    branch.replay()
    assert found(branch)[1:] == expected[1:]
    assert Counter(tuple(row)[:4] for row in branch.read("w").collect()) == Counter(row[:4] for row in expected[0])

    together = nosync.Job(declared(later=True), open_store("all"), spark=spark, shards=2)
    given = {
        name: spark.createDataFrame([(*row, t) for t in range(EPOCHS) for row in rows(name, t)], f"{COLUMNS}, t bigint")
        for name in "ab"
    }
    together.backfill(given, epoch="t")
    assert found(together) == expected


@pytest.mark.long
def test_status_says_which_input_holds_a_window_back(
    spark: SparkSession, open_store: OpenStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store("store")
    job = nosync.Job(declared(), store, spark=spark, shards=2)
    for t in range(EPOCHS - 1):
        job.advance(t, inputs(spark, t))
    window = job.status().windows["w"]
    assert window.held_back_by == ("b",)
    assert (window.watermark, window.inputs["b"].watermark) == ("2026-01-01T02:25:00",) * 2
    assert (window.inputs["a"].watermark, window.inputs["b"].epochs_without_rows) == ("2026-01-01T08:25:00", 1)
    store.sync()
    store.close()
    capsys.readouterr()
    main(["status", str(tmp_path / "store")])
    assert "held back by b" in capsys.readouterr().out
    main(["status", str(tmp_path / "store"), "--json"])
    as_json = json.loads(capsys.readouterr().out)
    assert as_json["windows"]["w"]["inputs"]["b"] == {
        "watermark": "2026-01-01T02:25:00", "epochs_without_rows": 1, "idle": False,
    }  # fmt: skip


@pytest.mark.long
def test_an_input_that_is_idle_is_not_waited_for(spark: SparkSession, open_store: OpenStore) -> None:
    job = nosync.Job(declared(idle_after=1), open_store(), spark=spark, shards=2)
    late = []
    for t in range(EPOCHS + 1):
        job.advance(t, inputs(spark, t))
        window = job.status().windows["w"]
        assert window.inputs["b"].idle == (t == 3)
        assert window.held_back_by == (() if t == 3 else ("b",))
        late.append(job.read("w__late").count())
    # Rows are late by the watermark of the epoch before, which waited for b until it had been idle for one.
    assert late == [0, 0, 0, 0, 1, 1 + len(rows("b", 5))]


@pytest.mark.long
def test_stores_go_on_as_they_were_written(spark: SparkSession, open_store: OpenStore) -> None:
    """`policy="max"` writes what versions before wrote, who recorded nothing of it. Rows of b are late by the fastest from
    the third epoch on, for it is the watermark of the epoch before that counts.
    """
    store = open_store()
    old = nosync.Job(declared(policy="max"), store, spark=spark, shards=2)
    old.advance(0, inputs(spark, 0))
    assert WATERMARK_POLICIES not in store.manifest(0).meta
    fingerprint = old.flow.stages["w"].fingerprint

    job = nosync.Job(declared(), store, spark=spark, shards=2)
    assert job.flow.stages["w"].fingerprint == fingerprint
    for t in (1, 2):
        job.advance(t, inputs(spark, t))
    assert job.read("w__late").count() == len(rows("b", 2)), "the fastest counts"
    assert job.status().windows["w"] == WindowStatus("2026-01-01T07:25:00", {}, ())
    with pytest.raises(nosync.FlowError, match="was recorded with fingerprint"):
        nosync.Job(declared(policy="min"), store, spark=spark, shards=2)

    branch = job.branch("other", at=0, replace={"shown": ["lower(k) AS k", "made AS at", "x"]})
    branch.replay()
    assert branch.read("w__late").count() == len(rows("b", 2)), "a stage before the window changed, and not the window"
    added = job.branch("more", at=0, add=lambda flow: flow["shown"].window(
        "new", key=["k"], time="at", size="30 minutes", watermark="10 minutes", n=nosync.count()))  # fmt: skip
    added.replay()
    assert added.read("new__late").count() == 0, "a new window goes by the slowest"
    assert added.read("w__late").count() == len(rows("b", 2))
    assert store.manifest(1, "more").meta[WATERMARK_POLICIES] == {"new": "min"}
    again = nosync.Job(added._versions.declared, store, spark=spark, shards=2, branch="more")
    assert again.flow.stages["new"].fingerprint == added.flow.stages["new"].fingerprint

    new = nosync.Job(declared(), open_store("new"), spark=spark, shards=2)
    new.advance(0, inputs(spark, 0))
    assert nosync.Job(declared(policy="min"), new._store, spark=spark).flow.stages["w"].fingerprint != fingerprint


@pytest.mark.long
def test_nobody_sees_which_input_a_row_came_by(spark: SparkSession, open_store: OpenStore) -> None:
    store = open_store()
    job = nosync.Job(declared(later=True), store, spark=spark, shards=2)
    job.advance(0, inputs(spark, 0))
    columns = {"u": ["k", "made", "x"], "d": ["k", "at", "x"], "same": ["k", "at", "x"]}
    for name, expected in columns.items():
        frame = spark.read.format("nosync").option("stage", name).load(str(store.directory.root))
        assert job.read(name).columns == frame.columns == store.read(name).column_names == expected
        assert job.read(name).count() == frame.count() == 12
        assert job.changes(name, -1, 0).columns == [*expected, "_change_type", "_epoch"]
        assert isinstance(store.schema(name), pa.Schema)
        assert store.schema(name).names == expected
    window = job.read("w").where("k = 'K1'").first()
    why = job.explain("w", {name: window[name] for name in ("k", "window_start", "window_end")})
    assert sum(table.num_rows for table in why.inputs.values()) == window.n
