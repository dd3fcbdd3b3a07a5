"""Rows of large epochs go to their shards by files: the same layers as by Spark's shuffle, which stays where files do not do."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import nosync
from nosync.lsm.errors import FlowError, StageError, StorageError
from tests.conftest import OpenStore
from tests.helpers.orders import digests
from tests.helpers.rows_by_two_ways import FLOWS, ROWS, SHARDS, WIDE, by_id, job_of, joined, rows_of, wide_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark


@pytest.fixture
def exchanges(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many files each exchange wrote. Every epoch after a job's first one is large enough for one."""
    from nosync.spark import file_shuffle as exchanges

    monkeypatch.setattr(exchanges, "LEAST_ROWS", 1)
    monkeypatch.setattr(exchanges, "LEAST_ROWS_A_TASK", 0)
    found: list[int] = []
    run = exchanges.Exchanging.run

    def spied(self: Any, *about: Any) -> Any:
        exchange = run(self, *about)
        found.append(len(exchange.files))
        return exchange

    monkeypatch.setattr(exchanges.Exchanging, "run", spied)
    return found


@pytest.fixture
def left_over(spark: SparkSession) -> Callable[[], list[str]]:
    return lambda: [path.name for path in Path(str(spark.sparkContext._temp_dir)).glob("nosync-*")]


def never(monkeypatch: pytest.MonkeyPatch) -> None:
    from nosync.spark import file_shuffle as exchanges

    monkeypatch.setattr(exchanges, "LEAST_ROWS", 1 << 62)


def same_by_both_ways(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, run: Callable[[nosync.Store], None]
) -> int:
    """Runs epochs by files, then by Spark's shuffle, each in a store of its own. How many layers there are, the same in both."""
    found = []
    for way in ("files", "shuffle"):
        if way == "shuffle":
            never(monkeypatch)
        store = open_store(way)
        run(store)
        found.append(digests(store))
    assert found[0] == found[1]
    return len(found[0])


def given(spark: SparkSession, t: int, n: int = 400, partitions: int = 3) -> DataFrame:
    return spark.createDataFrame(rows_of(t, n), ROWS).repartition(partitions)


def two_hops(flow: nosync.Dataflow) -> None:
    first = flow.source("rows", ROWS).aggregate("by_name", key=["name"], n=nosync.sum("n"), flag=nosync.max("id"))
    first.aggregate("out", key=["flag"], n=nosync.count(), most=nosync.max("n"))


def by_text(flow: nosync.Dataflow) -> None:
    flow.source("rows", ROWS).aggregate("out", key=["name", "flag"], n=nosync.count(), most=nosync.max("n"))


def ids_twice(flow: nosync.Dataflow) -> None:
    """What leaves the source's segment is wanted by two keys."""
    rows = flow.source("rows", ROWS)
    rows.aggregate("ids", key=["id"], n=nosync.count())
    rows.aggregate("ns", key=["n"], ids=nosync.count())


@pytest.mark.few(1)
@pytest.mark.parametrize("make", [*FLOWS, two_hops, by_text, ids_twice])
def test_layers_are_the_same_as_by_a_shuffle(
    make: Callable[[nosync.Dataflow], None],
    spark: SparkSession,
    open_store: OpenStore,
    exchanges: list[int],
    monkeypatch: pytest.MonkeyPatch,
    left_over: Callable[[], list[str]],
) -> None:
    def run(store: nosync.Store) -> None:
        job = job_of(make, spark, store)
        for t in range(3):
            inputs = {"rows": given(spark, t)}
            if make is joined:
                inputs["others"] = given(spark, t + 7, 100, partitions=2)
            job.advance(t, inputs)
        assert left_over() == []

    assert same_by_both_ways(open_store, monkeypatch, run) >= SHARDS * 3 * 2
    # Not the first epoch, of which nobody knew how large it is.
    assert exchanges == ([5, 5] if make is joined else [3, 3])


def test_sources_that_call_the_key_differently_go_by_files(
    spark: SparkSession, open_store: OpenStore, exchanges: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(store: nosync.Store) -> None:
        flow = nosync.Dataflow("f")
        people = flow.source("people", "age bigint, person bigint").select("named", "person AS id", "age")
        flow.source("rows", ROWS).select("left", "id", "n").join("out", people, on=["id"])
        job = nosync.Job(flow, store, spark=spark, shards=SHARDS)
        for t in range(2):
            there = spark.range(-40, 40).selectExpr(f"id % 7 + {t} AS age", "id AS person")
            job.advance(t, {"people": there, "rows": given(spark, t)})
        assert store.read("out").num_rows > 100

    assert same_by_both_ways(open_store, monkeypatch, run) >= SHARDS * 3 * 2
    assert len(exchanges) == 1


@pytest.mark.long
def test_flows_with_loops_are_shuffled(spark: SparkSession, open_store: OpenStore, exchanges: list[int]) -> None:
    """Each of their rounds is a Spark job, and would write the files again."""
    flow = nosync.Dataflow("f")
    roots = flow.source("roots", "node bigint")
    roots.iterate("up", lambda v: v.select("more", "node + 1 AS node").where("few", "node < 5"))
    store = open_store()
    job = nosync.Job(flow, store, spark=spark, shards=SHARDS)
    for t in range(2):
        job.advance(t, {"roots": spark.createDataFrame([(t,)], "node bigint")})
    assert sorted(store.read("up").column("node").to_pylist()) == [0, 1, 2, 3, 4]
    assert exchanges == []


@pytest.mark.parametrize(
    "key", ["", *[column.split()[0] for column in WIDE.split(", ") if column[0] not in "fd"], "day"]
)
@pytest.mark.parametrize("shards", [1, 5])
@pytest.mark.long
def test_rows_of_every_type_go_by_files(
    key: str,
    shards: int,
    spark: SparkSession,
    open_store: OpenStore,
    exchanges: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(store: nosync.Store) -> None:
        flow = nosync.Dataflow("f")
        rows = flow.source("rows", WIDE)
        if key:
            rows.aggregate("out", key=[key], n=nosync.count(), most=nosync.max("d"))
        job = nosync.Job(flow, store, spark=spark, shards=shards)
        for t in range(2):
            job.advance(t, {"rows": spark.createDataFrame(wide_rows(), WIDE)})

    assert same_by_both_ways(open_store, monkeypatch, run) >= shards * 2
    assert len(exchanges) == 1


def test_arrays_and_structs_go_by_files(
    spark: SparkSession, open_store: OpenStore, exchanges: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(store: nosync.Store) -> None:
        flow = nosync.Dataflow("f")
        rows = flow.source("rows", "k bigint, parts array<string>, pair struct<a: int, b: string>")
        rows.dedupe("out", key=["k"])
        job = nosync.Job(flow, store, spark=spark, shards=SHARDS)
        for t in range(2):
            parts, pair = "array(string(id), 'x') AS parts", "struct(int(id % 7) AS a, string(id % 3) AS b) AS pair"
            job.advance(t, {"rows": spark.range(50).selectExpr("id AS k", parts, pair)})

    assert same_by_both_ways(open_store, monkeypatch, run) >= SHARDS * 2 * 2
    assert len(exchanges) == 1


def test_epochs_that_are_smaller_than_the_one_before(
    spark: SparkSession, open_store: OpenStore, exchanges: list[int], left_over: Callable[[], list[str]]
) -> None:
    """One without rows, one whose rows are in one of many partitions; the one after an empty one is shuffled again."""
    store = open_store()
    job = job_of(by_id, spark, store)
    job.advance(0, {"rows": given(spark, 0)})
    job.advance(1, {"rows": given(spark, 1, 0)})
    job.advance(2, {"rows": given(spark, 2)})
    job.advance(3, {"rows": given(spark, 3, 1, partitions=9)})
    assert exchanges == [0, 1]
    expected = pa.concat_tables([rows_of(0), rows_of(2), rows_of(3, 1)])
    found = [row for row in expected.to_pylist() if row["flag"] and row["n"] is not None and row["n"] > 0]
    assert sum(store.read("out").column("n").to_pylist()) == len(found)
    assert sorted(map(str, store.read("rows").to_pylist())) == sorted(map(str, expected.to_pylist()))
    assert left_over() == []


def test_rows_that_come_by_many_small_tasks_are_shuffled_from_then_on(
    spark: SparkSession,
    open_store: OpenStore,
    exchanges: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("nosync.spark.file_shuffle.LEAST_ROWS_A_TASK", 100)
    job = job_of(by_id, spark, open_store())
    with caplog.at_level(logging.INFO, "nosync"):
        for t in range(4):
            job.advance(t, {"rows": given(spark, t, 400, partitions=5)})
    assert exchanges == [5]
    assert [record.message for record in caplog.records if "tasks" in record.message] == [
        "400 rows came by 5 tasks, too few by each to write files: Spark shuffles later epochs"
    ]


@pytest.mark.parametrize(
    ("master", "is_local"),
    [
        ("local", True), ("local[*]", True), ("local[2]", True), ("local[2, 3]", True), ("local-cluster[2,1,1024]", False),
        ("spark://host:7077", False), ("yarn", False), ("k8s://https://host", False),
    ],
)  # fmt: skip
def test_files_are_for_tasks_of_one_machine(master: str, is_local: bool) -> None:
    from nosync.spark.file_shuffle import LEAST_ROWS, Exchanges

    class Session:
        class sparkContext:
            pass

    Session.sparkContext.master = master  # type: ignore[attr-defined]
    exchanges = Exchanges()
    assert not exchanges.is_next_by_files(Session)  # type: ignore[arg-type]
    exchanges.note_rows(LEAST_ROWS)
    assert exchanges.is_next_by_files(Session) is is_local  # type: ignore[arg-type]
    exchanges.note_rows(LEAST_ROWS - 1)
    assert not exchanges.is_next_by_files(Session)  # type: ignore[arg-type]


@pytest.mark.long
def test_a_setting_of_the_session_keeps_the_shuffle(
    spark: SparkSession, open_store: OpenStore, exchanges: list[int]
) -> None:
    from nosync.spark.session import conf_set

    setting = "spark.nosync.exchange.enabled"
    job = job_of(by_id, spark, open_store())
    for t, value in enumerate(["true", "FALSE", "true"]):
        with conf_set(spark, {setting: value}):
            job.advance(t, {"rows": given(spark, t)})
    assert exchanges == [3]  # of the last one; the first never goes by files
    with conf_set(spark, {setting: "maybe"}), pytest.raises(FlowError, match=f"{setting} is 'maybe', expected true"):
        job.advance(3, {"rows": given(spark, 3)})
    job.advance(3, {"rows": given(spark, 3)})


def test_a_row_with_much_text_is_counted_by_files_as_well(
    spark: SparkSession, open_store: OpenStore, exchanges: list[int], left_over: Callable[[], list[str]]
) -> None:
    store = open_store()
    job = job_of(by_id, spark, store)
    job.advance(0, {"rows": given(spark, 0)})
    long = rows_of(1).set_column(1, "name", pa.array(["x" * 5000] * 400))
    job.advance(1, {"rows": spark.createDataFrame(long, ROWS)})
    assert len(exchanges) == 1  # the first attempt was refused before it had written all
    assert store.read("rows").num_rows == 800
    assert left_over() == []


@pytest.mark.long
def test_what_fails_leaves_no_files_and_can_be_run_again(
    spark: SparkSession, open_store: OpenStore, exchanges: list[int], left_over: Callable[[], list[str]], tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    path = str(broken)

    def touchy(rows: pa.Table) -> pa.Table:
        if Path(path).exists():
            raise ValueError("not today")
        return rows

    flow = nosync.Dataflow("f")
    flow.source("rows", ROWS).map("touched", touchy).aggregate("out", key=["id"], n=nosync.count())
    store = open_store()
    job = nosync.Job(flow, store, spark=spark, shards=SHARDS)
    job.advance(0, {"rows": given(spark, 0)})
    broken.touch()
    with pytest.raises(StageError, match="not today"):
        job.advance(1, {"rows": given(spark, 1)})
    assert left_over() == []
    broken.unlink()
    job.advance(1, {"rows": given(spark, 1)})
    assert store.read("rows").num_rows == 800
    assert exchanges == [3, 3]


@pytest.mark.few(1)
@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_files_that_are_lost_on_the_way_are_an_error_and_the_epoch_can_be_run_again(
    damage: str,
    spark: SparkSession,
    open_store: OpenStore,
    exchanges: list[int],
    monkeypatch: pytest.MonkeyPatch,
    left_over: Callable[[], list[str]],
) -> None:
    from nosync.spark.file_shuffle import Exchanging

    store = open_store()
    job = job_of(by_id, spark, store)
    job.advance(0, {"rows": given(spark, 0)})
    run = Exchanging.run

    def damaged(self: Any, *about: Any) -> Any:
        exchange = run(self, *about)
        path = exchange.files[1]
        if damage == "gone":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:-300])
        return exchange

    with monkeypatch.context() as patched:
        patched.setattr(Exchanging, "run", damaged)
        with pytest.raises(StorageError, match="cannot read rows on their way to their shards, in "):
            job.advance(1, {"rows": given(spark, 1)})
    assert left_over() == []
    job.advance(1, {"rows": given(spark, 1)})
    assert store.read("rows").num_rows == 800


def test_a_directory_that_cannot_be_written_is_an_error_that_names_it(
    spark: SparkSession, open_store: OpenStore, exchanges: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = open_store()
    job = job_of(by_id, spark, store)
    job.advance(0, {"rows": given(spark, 0)})
    rows = given(spark, 1)
    with monkeypatch.context() as patched:
        patched.setattr(spark.sparkContext, "_temp_dir", str(tmp_path / "none"))
        with pytest.raises(StorageError, match=f"cannot make a directory .* in {tmp_path}/none: No such file"):
            job.advance(1, {"rows": rows})
    job.advance(1, {"rows": rows})
    assert store.read("rows").num_rows == 800


def test_other_rows_than_recorded_are_refused_by_files_as_well(
    spark: SparkSession, open_store: OpenStore, exchanges: list[int]
) -> None:
    job = job_of(by_id, spark, open_store())
    for t in range(2):
        job.advance(t, {"rows": given(spark, t)})
    job.advance(1, {"rows": given(spark, 1)})
    with pytest.raises(nosync.DeterminismError):
        job.advance(1, {"rows": given(spark, 2)})
    assert exchanges == [3, 3, 3]


def test_a_lost_layer_of_an_epoch_that_went_by_files_is_computed_again(
    spark: SparkSession, open_store: OpenStore, exchanges: list[int], tmp_path: Path
) -> None:
    store = open_store()
    job = job_of(two_hops, spark, store)
    for t in range(3):
        job.advance(t, {"rows": given(spark, t)})
    before = digests(store)
    lost = next(path for path in sorted((tmp_path / "store").rglob("*.layer")) if "by_name" in str(path))
    lost.unlink()
    report = job.recover()
    assert (report.lost, report.recomputed, dict(report.unrecoverable)) == (1, 1, {})
    assert digests(store) == before
    assert exchanges == [3, 3]


@pytest.mark.long
def test_a_stream_of_large_batches_goes_by_files(
    spark: SparkSession, open_store: OpenStore, exchanges: list[int], tmp_path: Path
) -> None:
    import pyarrow.parquet as pq

    store = open_store()
    job = job_of(by_id, spark, store)
    (tmp_path / "in").mkdir()
    for t in range(3):
        pq.write_table(rows_of(t), tmp_path / "in" / f"{t}.parquet")
    stream = spark.readStream.schema(ROWS).option("maxFilesPerTrigger", 1).parquet(str(tmp_path / "in"))
    query = job.stream({"rows": stream}, checkpoint=tmp_path / "checkpoint", trigger={"availableNow": True})
    query.awaitTermination(120)
    assert query.exception() is None
    assert len(exchanges) == 2
    assert store.read("rows").num_rows == 1200
