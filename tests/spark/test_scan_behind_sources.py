"""Tasks behind a source that read its files themselves: the same layers as when rows are sent to them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import nosync
from tests.conftest import OpenStore
from tests.helpers.orders import digests
from tests.helpers.rows_by_two_ways import ROWS, SHARDS, job_of, rows_of
from tests.helpers.scanning import by_both_ways, written

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

AT = "timestamp_seconds(60 * n) AS at"
Make = Callable[[nosync.Dataflow], Any]


def timed(flow: nosync.Dataflow, name: str = "rows", *more: str) -> nosync.Stage:
    return flow.source(name, ROWS).where(f"of_{name}", "id IS NOT NULL").select(f"timed_{name}", "id", AT, *more)


def window(**options: Any) -> Make:
    said = {
        "key": ["id"],
        "time": "at",
        "watermark": "3 minutes",
        "n": nosync.count(),
        "most": nosync.max("name"),
        **options,
    }
    return lambda flow: timed(flow, "rows", "name", "n / 3 AS third").window("out", **said)


def interval(flow: nosync.Dataflow) -> None:
    left, right = timed(flow, "rows", "name"), timed(flow, "others").select("again", "id", "at AS seen", "3 AS three")
    left.join(
        "out",
        right,
        on=["id"],
        time=("at", "seen"),
        within=("0 seconds", "5 minutes"),
        watermark="10 minutes",
        how="left",
    )


def by_two_keys(flow: nosync.Dataflow) -> None:
    rows = flow.source("rows", ROWS)
    rows.aggregate("by_id", key=["id"], n=nosync.count(), first=nosync.first("name", by="n"))
    rows.where("some", "flag").aggregate("by_name", key=["name"], n=nosync.sum("n"), ids=nosync.count_distinct("id"))
    rows.select("halves", "id", "n / 2 AS half").aggregate("spread", key=["half"], n=nosync.count())


def chained(flow: nosync.Dataflow) -> None:
    """What windows are recorded for is a source of more, and one takes rows of all shards."""
    first = timed(flow, "rows", "name").window(
        "first", key=["name"], time="at", size="5 minutes", watermark="0 minutes", n=nosync.count()
    )
    first.aggregate("out", key=["n"], windows=nosync.count())
    flow["timed_rows"].dedupe("once", key=["id"], time="at", watermark="20 minutes")
    flow["timed_rows"].map("mapped", lambda table: table).aggregate("all", key=[], n=nosync.count())


def beside_a_join(flow: nosync.Dataflow) -> None:
    """What windows are recorded for is of one source of a task that has two, and the other one's rows come by expressions."""
    others = flow.source("others", ROWS).where("some", "NOT (n IN (1, 2, 3))").select("few", "id", "name AS other")
    rows = flow.source("rows", ROWS)
    rows.join("joined", others, on=["id"])
    rows.select("timed_rows", "id", AT).window(
        "out", key=["id"], time="at", size="5 minutes", watermark="0 minutes", n=nosync.count()
    )


SHAPES: dict[str, tuple[Make, set[str]]] = {
    "tumbling": (window(size="5 minutes"), {"timed_rows", "out__watermark"}),
    "sliding": (window(size="6 minutes", slide="2 minutes"), {"timed_rows", "out__watermark"}),
    "session": (window(gap="2 minutes", mean=nosync.mean("third")), {"timed_rows", "out__watermark"}),
    "final": (window(size="5 minutes", emit="final"), {"timed_rows", "out__watermark"}),
    "kept": (window(gap="2 minutes", keep="4 minutes"), {"timed_rows", "out__watermark"}),
    "interval": (interval, {"timed_rows", "again", "out__watermark"}),
    "keys": (by_two_keys, {"spread", "by_name"}),
    "join": (beside_a_join, {"timed_rows", "out__watermark"}),
    "chained": (chained, {"timed_rows", "first__watermark", "once__watermark"}),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_layers_are_the_same_as_when_rows_are_sent(
    shape: str, spark: SparkSession, open_store: OpenStore, readers: list[frozenset[str]], tmp_path: Path
) -> None:
    make, expected = SHAPES[shape]
    sources = ["rows", "others"] if make in (interval, beside_a_join) else ["rows"]
    by_tasks, by_jvm = by_both_ways(make, spark, open_store, tmp_path, sources, epochs=3)
    assert readers == [frozenset(expected)] * 3, "the JVM reads them the other way"
    assert by_tasks == by_jvm
    assert len(by_tasks) >= SHARDS * 3 * 3


def test_rows_by_several_files_and_of_equal_contents(
    spark: SparkSession, open_store: OpenStore, readers: list[frozenset[str]], tmp_path: Path
) -> None:
    """Equal rows lie in one shard of the source, and come in its order."""
    found = []
    for by_jvm in (False, True):
        store = open_store(f"by_jvm_{by_jvm}")
        job = job_of(by_two_keys, spark, store)
        for part in range(3):
            written(tmp_path / "rows" / f"{part}.parquet", pa.concat_tables([rows_of(1, 50), rows_of(part)]))
        written(tmp_path / "rows" / "none.parquet", rows_of(0, 0))
        frame = spark.read.schema(ROWS).parquet(str(tmp_path / "rows"))
        job.advance(0, {"rows": frame.where("true") if by_jvm else frame})
        found.append(digests(store))
    assert readers == [frozenset({"spread", "by_name"})]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("make", "expected"), [(by_two_keys, {"by_name"}), (window(gap="2 minutes"), {"timed_rows", "out__watermark"})]
)
def test_few_tasks_read_all(
    spark: SparkSession, open_store: OpenStore, readers: list[frozenset[str]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, make: Make, expected: set[str],
) -> None:  # fmt: skip
    """Where only one segment beside the source's may read each row, the others are sent theirs. What the source's task records
    as well reads nothing.
    """
    monkeypatch.setattr("nosync.spark.epoch_job.MOST_READERS", 2 * SHARDS)
    by_tasks, by_jvm = by_both_ways(make, spark, open_store, tmp_path, ["rows"], epochs=1)
    assert readers == [frozenset(expected)]
    assert by_tasks == by_jvm


def test_what_tasks_cannot_compute_the_jvm_does(
    spark: SparkSession, open_store: OpenStore, readers: list[frozenset[str]], tmp_path: Path
) -> None:
    """An overflow, of which ANSI mode makes an error: Spark's own, as it is for rows that are sent."""
    flow = nosync.Dataflow("f")
    rows = flow.source("rows", "v bigint")
    rows.aggregate("by", key=["v"], n=nosync.count())
    rows.select("more", "v + 1 AS w").aggregate("out", key=["w"], n=nosync.count())
    job = nosync.Job(flow, open_store(), spark=spark, shards=SHARDS)
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"v": [2**63 - 1]}), path)
    with pytest.raises(
        nosync.NosyncError, match=r"(?i)epoch 0 \(expressions of more\): the Spark job failed: .*overflow"
    ):
        job.advance(0, {"rows": spark.read.parquet(str(path))})
    assert [len(one) for one in readers] == [1], "and then the JVM tried"
    job.rewind(-1)
    pq.write_table(pa.table({"v": [1, 2]}), tmp_path / "more.parquet")
    job.advance(0, {"rows": spark.read.parquet(str(tmp_path / "more.parquet"))})
    assert sorted(map(tuple, job.read("out").collect())) == [(2, 1), (3, 1)]
