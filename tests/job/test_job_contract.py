"""What a job is given, and given again: only what was sealed is ever served, in the user's time zone, to sinks in
order.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F

import nosync
from nosync.spark.expressions import text_of
from nosync.spark.session import turn_of
from nosync.testing.daemon_cluster import eventually, running
from tests.conftest import OpenStore
from tests.helpers.totals import SCHEMA, flow_of, given, totals

pytestmark = pytest.mark.spark


def lose(store: nosync.Store, stage: str, t: int) -> None:
    store.sync()
    for layer in store.layers():
        if layer.stage == stage and layer.lower == t:
            Path(layer.path).unlink()


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["advance", "recover"])
def test_other_rows_for_a_sealed_epoch_are_never_served(spark: SparkSession, store: nosync.Store, how: str) -> None:
    job = nosync.Job(flow_of(), store, spark=spark, shards=1)
    for t in range(4):
        job.advance(t, given(spark, ("a", t), ("b", 10 * t)))
    expected = [totals(store, t) for t in range(4)]
    lose(store, "rows", 2)
    lose(store, "sums", 2)
    wrong = given(spark, ("a", 999))
    again = {"advance": lambda: job.advance(2, wrong), "recover": lambda: job.recover({2: wrong})}[how]
    with pytest.raises(nosync.DeterminismError, match="2"):
        again()
    assert "999" not in str(store.read("rows", as_of=1).to_pylist())
    report = job.recover({2: given(spark, ("a", 2), ("b", 20))})
    assert not report.unrecoverable
    assert [totals(store, t) for t in range(4)] == expected
    store.sync()
    assert job.safe_point() == 3


def test_a_file_that_is_not_what_was_sealed_is_set_aside(spark: SparkSession, store: nosync.Store) -> None:
    """As an earlier version left it."""
    job = nosync.Job(flow_of(), store, spark=spark, shards=1)
    for t in range(4):
        job.advance(t, given(spark, ("a", t)))
    store.sync()
    (right,) = (layer for layer in store.layers() if (layer.stage, layer.lower) == ("sums", 2))
    (other,) = (layer for layer in store.layers() if (layer.stage, layer.lower) == ("sums", 1))
    path = Path(right.path)
    entry = next(e for e in store.node.manifests()[2].entries if e.id.trace.stage == "sums")
    path.unlink()
    store.node.make_durable_now()
    from nosync.lsm.layers.writer import arrange

    store.directory.publish(entry.id, arrange(pa.table({"k": ["a"], "total": [77]}), ["k"], whose="test"))
    store.sync()
    assert other.rows == 1
    report = job.recover()
    assert (report.lost, report.recomputed) == (1, 1)
    assert totals(store, 2) == {"a": 3}
    assert list((store.directory.root / "quarantine").iterdir())


def test_other_rows_for_an_epoch_that_was_merged_since_are_refused(spark: SparkSession, store: nosync.Store) -> None:
    job = nosync.Job(flow_of(), store, spark=spark, shards=1)
    for t in range(4):
        job.advance(t, given(spark, ("a", t)))
    store.sync()
    store.compact()
    with pytest.raises(nosync.DeterminismError):
        job.advance(2, given(spark, ("a", 999)))
    job.advance(2, given(spark, ("a", 2)))
    assert totals(store) == {"a": 6}


def even(rows: pa.Table) -> pa.Table:
    return rows.filter(pc.equal(pc.bit_wise_and(rows["v"], 1), 0))


@pytest.mark.long
def test_branches_with_the_same_code_at_other_forks_have_states_of_their_own(
    spark: SparkSession, tmp_path: Path
) -> None:
    def replayed(first: int | None) -> dict[str, int]:
        with nosync.open(tmp_path / str(first)) as store:
            flow = nosync.Dataflow("f")
            flow.source("rows", SCHEMA).map("kept", lambda rows: rows).aggregate(
                "sums", key=["k"], total=nosync.sum("v")
            )
            job = nosync.Job(flow, store, spark=spark, shards=2)
            for t in range(6):
                job.advance(t, given(spark, ("a", 2 * t + 1), ("b", t)))
            if first is not None:
                job.branch("x", at=first, replace={"kept": even}).replay()
            branch = job.branch("y", at=3, replace={"kept": even})
            assert branch.replay().layers_computed
            again = job.branch("z", at=3, replace={"kept": even})
            assert again.replay().layers_computed == 0, "the same code from the same state is shared"
            assert totals(store, 5, "z") == totals(store, 5, "y")
            assert nosync.Job(flow, store, spark=spark, shards=2).last_sealed() == 5
            job.branch("y", at=3, replace={"kept": even})  # opened again
            return totals(store, 5, "y")

    alone = replayed(None)
    assert alone == {"a": 1 + 3 + 5 + 7, "b": 0 + 1 + 2 + 3 + 4}
    assert replayed(1) == alone


@pytest.fixture
def new_york(spark: SparkSession) -> Iterator[None]:
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    yield
    spark.conf.set("spark.sql.session.timeZone", before)


@pytest.mark.parametrize("way", ["json", "csv", "wide csv", "udf"])
def test_times_mean_what_they_mean_to_the_user(
    spark: SparkSession, store: nosync.Store, tmp_path: Path, new_york: None, way: str
) -> None:
    schema = "k string, at timestamp, hour bigint"
    lines = [f"2024-01-0{day} {hour:02}:30:00" for day in (1, 2) for hour in (0, 5, 23)]
    if way == "json":
        (tmp_path / "in").write_text("\n".join(f'{{"k": "a", "at": "{line}", "hour": 1}}' for line in lines))
        frame = spark.read.schema(schema).json(str(tmp_path / "in"))
    elif way == "csv":
        (tmp_path / "in").write_text("\n".join(f"a,{line},1" for line in lines))
        frame = spark.read.schema(schema).csv(str(tmp_path / "in"))
    elif way == "wide csv":  # of which Spark's short text of a schema leaves out the last columns
        many = ", ".join(f"c{i} string" for i in range(30))
        (tmp_path / "in").write_text("\n".join("x," * 30 + f"a,{line},1" for line in lines))
        frame = spark.read.schema(f"{many}, {schema}").csv(str(tmp_path / "in")).select("k", "at", "hour")
    else:
        import pandas as pd
        from pyspark.sql.functions import pandas_udf

        def hours(at: Any) -> Any:
            return at.dt.hour

        hours.__annotations__ = {"at": pd.Series, "return": pd.Series}
        hour_of = pandas_udf(hours, "bigint")

        (tmp_path / "in").write_text("\n".join(lines))
        frame = spark.read.text(str(tmp_path / "in")).selectExpr("'a' AS k", "to_timestamp(value) AS at")
        frame = frame.withColumn("hour", hour_of("at"))
    expected = sorted(frame.select(F.unix_micros("at"), "hour").toPandas().itertuples(index=False))
    flow = nosync.Dataflow("f")
    flow.source("rows", schema)
    job = nosync.Job(flow, store, spark=spark, shards=2)
    job.advance(0, {"rows": frame})
    epoch = "datediff(date(at), '2024-01-01') + 1"
    job.backfill({"rows": frame.where("at >= '2024-01-01'")}, epoch=epoch) if way != "udf" else None
    found = sorted(
        (row["at"].value // 1000, row["hour"]) for row in store.read("rows", 0).to_pandas().to_dict("records")
    )
    assert found == [tuple(row) for row in expected]
    if way != "udf":
        assert [store.read("rows", t).num_rows for t in (1, 2)] == [9, 12], (
            "as many as the user's own zone has in a day"
        )
    assert spark.conf.get("spark.sql.session.timeZone") == "America/New_York"


@pytest.mark.parametrize("way", ["advance", "backfill", "stream"])
def test_jobs_of_one_session_take_turns(
    spark: SparkSession, tmp_path: Path, new_york: None, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Another job's epoch must not be planned with the settings that the one which runs has given the session, nor is it
    with these that rows find their epochs.
    """
    (tmp_path / "in").write_text('{"k": "a", "at": "2024-01-01 05:30:00"}')
    frame = spark.read.schema("k string, at timestamp").json(str(tmp_path / "in"))
    (expected,) = (row[0] for row in frame.select(F.unix_micros("at")).collect())
    begun, go = tmp_path / "begun", tmp_path / "go"

    def wait(rows: pa.Table) -> pa.Table:
        begun.touch()
        eventually("the other job waits for its turn", go.exists)
        return rows

    waiting = threading.Event()

    @contextlib.contextmanager
    def turn(session: SparkSession) -> Iterator[None]:
        if begun.exists():
            waiting.set()
        with turn_of(session):
            yield

    def job_on(store: nosync.Store, *, waits: bool) -> nosync.Job:
        flow = nosync.Dataflow("f")
        rows = flow.source("rows", "k string, at timestamp")
        if waits:
            rows.map("waits", wait, schema="k string, at timestamp")
        return nosync.Job(flow, store, spark=spark, shards=1)

    def stream(job: nosync.Job) -> None:
        (tmp_path / "files").mkdir()
        (tmp_path / "files" / "in").write_text((tmp_path / "in").read_text())
        rows = spark.readStream.schema("k string, at timestamp").json(str(tmp_path / "files"))
        job.stream({"rows": rows}, checkpoint=tmp_path / "cp", trigger={"availableNow": True}).awaitTermination()

    with nosync.open(tmp_path / "a") as a, nosync.open(tmp_path / "b") as b:
        first, second = job_on(a, waits=True), job_on(b, waits=False)
        monkeypatch.setattr("nosync.spark.epoch_run.turn_of", turn)
        monkeypatch.setattr("nosync.spark.epoch_inputs.turn_of", turn)
        monkeypatch.setattr("nosync.spark.structured_streaming.turn_of", turn)
        with ThreadPoolExecutor(2) as threads:
            runs = [threads.submit(first.advance, 0, {"rows": frame})]
            eventually("it runs", begun.exists)
            if way == "advance":
                runs.append(threads.submit(second.advance, 0, {"rows": frame}))
            elif way == "backfill":
                runs.append(threads.submit(second.backfill, {"rows": frame}, epoch="hour(at) - 5"))
            else:
                runs.append(threads.submit(stream, second))
            assert waiting.wait(timeout=30)
            go.touch()
            for one in runs:
                one.result()
        for store in (a, b):
            assert store.read("rows", 0)["at"].cast(pa.int64()).to_pylist() == [expected]
    assert spark.conf.get("spark.sql.session.timeZone") == "America/New_York"


def test_a_stream_needs_no_trigger(spark: SparkSession, store: nosync.Store, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "0.json").write_text('{"k": "a", "v": 1}')
    job = nosync.Job(flow_of(), store, spark=spark, shards=1)
    rows = spark.readStream.schema(SCHEMA).json(str(tmp_path / "in"))
    query = job.stream({"rows": rows}, checkpoint=tmp_path / "cp")
    query.processAllAvailable()
    query.stop()
    assert totals(store) == {"a": 1}


def test_a_job_on_a_closed_store_writes_nothing(spark: SparkSession, store: nosync.Store) -> None:
    job = nosync.Job(flow_of(), store, spark=spark, shards=1)
    job.advance(0, given(spark, ("a", 1)))
    store.close()
    for call in (lambda: job.advance(1, given(spark, ("a", 1))), job.recover):
        with pytest.raises(nosync.StorageError, match="is closed"):
            call()


# --- tables, expressions ----------------------------------------------------------------------------------------------


@pytest.mark.long
def test_options_that_mean_nothing_are_refused(spark: SparkSession, store: nosync.Store, tmp_path: Path) -> None:
    nosync.Job(flow_of(), store, spark=spark, shards=1).advance(0, given(spark, ("a", 1)))
    nosync.register(spark)
    reader = spark.read.format("nosync").option("path", str(store.directory.root)).option("stage", "sums")
    for name, value, message in (
        ("startingEpoch", "0", "readChangeFeed=true"),
        ("readChangeFeed", "yes", "is not true or false"),
        ("asOf", "²", "is neither the number of an epoch nor a time"),
        ("startingVersion", "1", "startingEpoch"),
    ):
        with pytest.raises(Exception, match=message):
            spark.read.format("nosync").options(
                path=str(store.directory.root), stage="sums", **{name: value}
            ).load().collect()
    assert reader.load().count() == 1
    stream = spark.readStream.format("nosync").option("path", str(store.directory.root)).option("stage", "sums").load()
    query = (
        stream.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "cp")).trigger(availableNow=True)
    )
    with pytest.raises(Exception, match="set the option readChangeFeed to true"):
        query.start().awaitTermination(60)


@pytest.mark.long
def test_a_stream_of_changes_notices_that_its_past_is_another_one(
    spark: SparkSession, store: nosync.Store, tmp_path: Path
) -> None:
    job = nosync.Job(flow_of(), store, spark=spark, shards=1)
    for t in range(3):
        job.advance(t, given(spark, ("a", 1)))
    nosync.register(spark)

    def read() -> None:
        stream = spark.readStream.format("nosync").options(
            path=str(store.directory.root), stage="sums", readChangeFeed="true"
        )
        out = stream.load().writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "cp"))
        out.option("path", str(tmp_path / "out")).trigger(availableNow=True).start().awaitTermination(60)

    read()
    job.advance(3, given(spark, ("a", 1)))
    read()
    assert spark.read.parquet(str(tmp_path / "out")).agg(F.max("_epoch")).collect()[0][0] == 3
    job.rewind(1)
    for t in (2, 3, 4):
        job.advance(t, given(spark, ("a", 100)))
    with pytest.raises(Exception, match="Begin again with a new checkpoint"):
        read()


def test_expressions_that_would_be_others_when_computed_again_are_refused(
    spark: SparkSession, store: nosync.Store
) -> None:
    spark.range(3).createOrReplaceTempView("dim")
    for expressions, message in (
        (("k", "current_timestamp() AS at"), "depends on when"),
        (("k", "coalesce(CAST('now' AS timestamp), null) AS at"), "depends on when"),
        (("k", "v IN (SELECT id FROM dim) AS known"), "subquery"),
        (("k", "explode(array(v)) AS each"), "generators"),
    ):
        flow = nosync.Dataflow("f")
        flow.source("rows", SCHEMA).select("out", *expressions).aggregate("n", key=["k"], n=nosync.count())
        with pytest.raises(nosync.FlowError, match=message):
            nosync.Job(flow, store, spark=spark, shards=1)
    spark.catalog.dropTempView("dim")
    flow = nosync.Dataflow("f")
    flow.source("rows", SCHEMA).where("some", "k <> 'Window seat'").select("out", "k", "'Aggregate demand' AS what")
    job = nosync.Job(flow, store, spark=spark, shards=1)
    job.advance(0, given(spark, ("a", 1), ("Window seat", 2)))
    assert store.read("out").to_pylist() == [{"k": "a", "what": "Aggregate demand"}]


def test_which_variable_of_lambdas_stands_where_counts_as_code(spark: SparkSession) -> None:
    def outer() -> Column:
        return F.transform("a", lambda x: F.transform("b", lambda y: x))

    inner = F.transform("a", lambda x: F.transform("b", lambda y: y))
    assert text_of(outer()) != text_of(inner)
    assert text_of(outer()) == text_of(outer()), "each process counts its lambdas"


def test_the_code_of_a_function_in_an_expression_counts(spark: SparkSession, store: nosync.Store) -> None:
    def job(add: int) -> nosync.Job:
        spark.udf.register("more", lambda v: None if v is None else v + add, "bigint")
        flow = nosync.Dataflow("f")
        flow.source("rows", SCHEMA).select("out", "k", "more(v) AS v").aggregate(
            "sums", key=["k"], total=nosync.sum("v")
        )
        return nosync.Job(flow, store, spark=spark, shards=1)

    job(1).advance(0, given(spark, ("a", 1)))
    job(1).advance(1, given(spark, ("a", 1)))
    with pytest.raises(nosync.FlowError, match="code"):
        job(2)


def test_columns_as_ordinary_frames_have_them(spark: SparkSession, store: nosync.Store) -> None:
    flow = nosync.Dataflow("f")
    flow.source("rows", "`a.b` string, `größe` bigint, tags array<string>").aggregate(
        "n", key=["a.b"], n=nosync.count()
    )
    job = nosync.Job(flow, store, spark=spark, shards=2)
    frame = spark.sql(
        "SELECT 'x' AS `a.b`, 1L AS `größe`, split('p,q', ',') AS tags, INTERVAL '1' MONTH AS unused, map('a', 1) AS other"
    )
    job.advance(0, {"rows": frame})
    job.advance(1, {"rows": frame})
    assert store.read("n").to_pylist() == [{"a.b": "x", "n": 2}]


@pytest.mark.long
def test_stores_of_other_units_are_tables_too(spark: SparkSession, store: nosync.Store) -> None:
    nanoseconds = pa.array([1_700_000_000_123_456_000], pa.timestamp("ns", "UTC"))
    rows = pa.table({"k": [1], "ns": nanoseconds, "list": pa.array([["a"]], pa.large_list(pa.string()))})
    store.append("raw", t=0, rows=rows, key=["k"])
    store.seal(0)
    nosync.register(spark)
    table = spark.read.format("nosync").options(path=str(store.directory.root), stage="raw").load()
    assert table.select("k", F.unix_micros("ns"), "list").collect() == [(1, 1_700_000_000_123_456, ["a"])]


@pytest.mark.long
def test_differences_of_rows_with_any_names(spark: SparkSession, store: nosync.Store) -> None:
    flow = nosync.Dataflow("f")
    rows = flow.source("rows", "x_a string, x bigint, n bigint").map("copy", lambda rows: rows)
    rows.aggregate("sums", key=["x_a"], x=nosync.sum("x"))
    job = nosync.Job(flow, store, spark=spark, shards=1)
    for t in range(2):
        job.advance(t, {"rows": spark.createDataFrame([("p", 1, 2), ("q", 3, 4)], "x_a string, x bigint, n bigint")})
    branch = job.branch("b", at=0, replace={"copy": lambda rows: rows.slice(0, 1)})
    branch.replay()
    assert nosync.diff(job, branch, "copy").count() == 1
    assert nosync.diff_summary(job, branch, "sums").changed == 1
    with pytest.raises(nosync.FlowError, match="rename one"):
        nosync.diff(job, branch, "sums")
    assert nosync.diverges_at(job, branch, "copy") == 1


def test_a_table_is_read_from_a_daemons_address(spark: SparkSession, tmp_path: Path) -> None:
    nosync.register(spark)
    with running(tmp_path, ("n1",), replicas=1) as daemons:
        with daemons.open("n1") as store:
            store.append("s", t=0, rows=pa.table({"k": [1, 2], "v": [3, 4]}), key=["k"])
            store.seal(0)
            store.sync()
        for path in (f"127.0.0.1:{daemons.ports['n1']}", str(daemons.data("n1"))):
            table = spark.read.format("nosync").options(path=path, stage="s").load()
            assert sorted(tuple(row) for row in table.collect()) == [(1, 3), (2, 4)]


def test_one_nan_whatever_made_it(spark: SparkSession, open_store: OpenStore) -> None:
    """`sqrt(-1)` gives another one than the constant: equal rows in another order are equal."""
    flow = nosync.Dataflow("f")
    flow.source("rows", "k string, v double").aggregate("n", key=["k"], n=nosync.count_distinct("v"))
    job = nosync.Job(flow, open_store(), spark=spark, shards=1)
    for order in ("(1D), (2D)", "(2D), (1D)"):  # the same epoch twice
        nans = f"SELECT 'a' AS k, CASE WHEN v = 1 THEN double('NaN') ELSE sqrt(-v) END AS v FROM VALUES {order} AS t(v)"
        job.advance(0, {"rows": spark.sql(nans)})
    assert [tuple(row) for row in job.read("n").collect()] == [("a", 1)]


def test_a_nan_that_a_function_makes_is_the_value_that_came_in(spark: SparkSession, open_store: OpenStore) -> None:
    """0/0 has its sign set here, and a NaN that comes in has not."""

    def divided(rows: pa.Table) -> pa.Table:
        return rows.append_column("q", pc.divide(rows["v"], rows["v"]))

    flow = nosync.Dataflow("f")
    made = flow.source("rows", "k string, v double").map("made", divided)
    made.aggregate("n", key=["k"], n=nosync.count_distinct("q"))
    job = nosync.Job(flow, open_store(), spark=spark, shards=1)
    job.advance(0, {"rows": spark.sql("SELECT 'a' AS k, v FROM VALUES (0D), (double('NaN')), (2D) AS t(v)")})
    assert [tuple(row) for row in job.read("n").collect()] == [("a", 2)]


@pytest.mark.parametrize("wheres", [0, 1])
def test_equal_rows_of_the_year_10000(spark: SparkSession, open_store: OpenStore, wheres: int) -> None:
    """Which Python has no dates of; the end of 9999 is in it in UTC, for who is west of Greenwich."""
    flow = nosync.Dataflow("f")
    rows: nosync.Stage = flow.source("rows", "k string, at timestamp, day date")
    for i in range(wheres):
        rows = rows.where(f"w{i}", "k IS NOT NULL")
    rows.aggregate("n", key=["k"], n=nosync.count())
    job = nosync.Job(flow, open_store(), spark=spark, shards=1)
    late = "SELECT 'a' AS k, TIMESTAMP'+10000-01-01 04:59:59' AS at, DATE'+10000-12-31' AS day FROM range(2)"
    job.advance(0, {"rows": spark.sql(late)})
    assert [tuple(row) for row in job.read("n").collect()] == [("a", 2)]


def test_arrays_that_hold_no_null_are_arrays(spark: SparkSession, open_store: OpenStore) -> None:
    """`split` gives one, and nobody can declare it."""
    flow = nosync.Dataflow("f")
    rows = flow.source("rows", "k string, a array<string>")
    words = rows.select("words", "k", "split(k, ',') AS a")
    words.map("mapped", lambda table: table, schema="k string, a array<string>")
    words.union("both", rows.select("given", "k", "a")).aggregate("n", key=["k"], n=nosync.count())
    job = nosync.Job(flow, open_store(), spark=spark, shards=2)
    job.advance(0, {"rows": spark.sql("SELECT 'x,y' AS k, array('z', null) AS a")})
    assert [row.a for row in job.read("mapped").collect()] == [["x", "y"]]
    assert [row.n for row in job.read("n").collect()] == [2]


@pytest.mark.long
def test_a_column_of_the_name_of_a_count(spark: SparkSession, open_store: OpenStore) -> None:
    flow = nosync.Dataflow("f")
    most = flow.source("rows", "_n bigint, v double").aggregate("most", key=["_n"], m=nosync.max("v"))
    most.select("out", "_n", "m + 1 AS q", persist="disk")
    job = nosync.Job(flow, open_store(), spark=spark, shards=2)
    job.advance(0, {"rows": spark.sql("SELECT 1L AS _n, 2D AS v")})
    assert [tuple(row) for row in job.read("out").collect()] == [(1, 3.0)]
