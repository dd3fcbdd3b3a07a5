"""Sinks into tables with transactions: each epoch once, whenever a job dies; tables and rows that are refused."""

from __future__ import annotations

import datetime
import decimal
import itertools
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import nosync
from nosync.job.table_sink import TableSink, TableState, secrets_of
from nosync.lsm.facts.deliveries import DeliveryLog
from nosync.replication.remote.bucket import UnavailableError
from nosync.replication.remote.cloud import open_bucket
from nosync.replication.remote.patient import PatientBucket
from tests.conftest import OpenStore
from tests.helpers.runner import StoreRunner
from tests.helpers.s3 import moto
from tests.helpers.sink_runs import COLUMNS, Frame, delivery_of, expected, flow_of, rows_of, run
from tests.helpers.tables import KINDS, TABLES, Output, postgres

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EPOCHS, KILLS = 8, int(os.environ.get("NOSYNC_SINK_KILLS", "20"))
SLOW_KILLS = 8
"""Where each call is one of a server in Python."""
MOST_POINTS = {"delta": 20, "delta-s3": 20, "iceberg": 20, "parquet-s3": 14}
"""So many of them are some epochs; of a database 45."""


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    with postgres() as url:
        yield url


@pytest.fixture(scope="module")
def objects() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch, moto(patch) as url:
        yield url


def output_of(kind: str, request: pytest.FixtureRequest, root: Path) -> Output:
    needs = {"postgres": "database", "delta-s3": "objects", "parquet-s3": "objects"}.get(kind)
    found = Output(kind, root, None if needs is None else request.getfixturevalue(needs))
    found.drop()
    return found


@pytest.fixture(params=KINDS)
def output(request: pytest.FixtureRequest, tmp_path: Path) -> Output:
    return output_of(request.param, request, tmp_path)


@pytest.fixture(params=TABLES)
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Output:
    return output_of(request.param, request, tmp_path)


class Killed(BaseException):
    """As `kill -9`: nothing of the job runs after it."""


# --- a job that dies --------------------------------------------------------------------------------------------------


class Points:
    """Where a job may die: before and after each call that leaves something."""

    def __init__(self) -> None:
        self.left = 0

    def around(self, patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        done = getattr(owner, name)

        def counted(*args: Any, **how: Any) -> Any:
            self.passed()
            found = done(*args, **how)
            self.passed()
            return found

        patch.setattr(owner, name, counted)

    def passed(self, *_: object) -> None:
        self.left -= 1
        if self.left == 0:
            raise Killed


def watch(points: Points, patch: pytest.MonkeyPatch, kind: str, sink_class: type) -> None:
    for name in ("own", "begin", "mark"):
        points.around(patch, DeliveryLog, name)
    if kind == "parquet-s3":
        points.around(patch, PatientBucket, "put_new")
        return
    for name in ("_make", "_add"):
        points.around(patch, sink_class, name)
    if kind == "iceberg":
        from pyiceberg.table import Transaction

        points.around(patch, Transaction, "append")
        points.around(patch, Transaction, "commit_transaction")
    elif kind.startswith("delta"):
        import deltalake

        points.around(patch, deltalake, "write_deltalake")
        points.around(patch, deltalake.DeltaTable, "create")
    else:
        import sqlalchemy as sa

        points.around(patch, sa.Connection, "execute")
        points.around(patch, sa.Table, "create")
        points.around(patch, sa.engine.default.DefaultDialect, "do_commit")


@pytest.mark.few(2, "make kills")
def test_each_epoch_is_there_once_whenever_the_job_dies(
    open_store: OpenStore, output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, points = random.Random(7), Points()
    watch(points, monkeypatch, output.kind, type(output.sink()))
    store, kills = open_store(retain=1000), 0
    for until in itertools.count(1):
        points.left = chance.randint(1, MOST_POINTS.get(output.kind, 45))
        try:
            run(store, output.sink(), until)
        except Killed:
            kills += 1
            if kills == (SLOW_KILLS if output.kind == "delta-s3" else KILLS):
                break
    points.left = 0
    last = store.last_sealed()
    assert last is not None
    run(store, output.sink(), last + 2)
    assert output.rows(*COLUMNS) == expected(store, last + 1)
    assert last > (2 if output.kind != "delta-s3" else 0)


def test_another_driver_does_not_add_an_epoch_that_is_there(open_store: OpenStore, table: Output) -> None:
    store = open_store(retain=100)
    run(store, table.sink(), 3)
    sink, marks = table.sink(), delivery_of(store, table.sink()).marks("sums")
    state = sink._state()
    assert state is not None
    run(store, table.sink(), 6)
    with pytest.raises(nosync.StorageError, match=r"was changed meanwhile: another driver gives it epochs"):
        sink._add(store.changes("sums", 2, 3), TableState(state.output, 3, state.line), state)
    assert not sink.deliver(lambda: pytest.fail("it has that"), 3, marks)
    assert table.rows(*COLUMNS) == expected(store, 5)


def test_what_others_commit_to_an_iceberg_table_meanwhile_is_no_driver(open_store: OpenStore, tmp_path: Path) -> None:
    output, store = Output("iceberg", tmp_path), open_store(retain=100)
    run(store, output.sink(), 3)
    sink = output.sink()
    state = sink._state()
    table = output.iceberg().load_table("shop.sums")
    table.delete("_epoch = 1")
    StoreRunner(flow_of(), store, 3, shards=1).advance(3, rows_of(3))
    sink._add(store.changes("sums", 2, 3), TableState(state.output, 3, state.line), state)
    assert output.rows(*COLUMNS) == [row for row in expected(store, 3) if row[0] != 1]


def test_epochs_without_rows_are_withdrawn_as_well(open_store: OpenStore, output: Output) -> None:
    store, sink = open_store(retain=100), output.sink()
    run(store, sink, 5)
    marks = delivery_of(store, sink).marks("sums")
    assert (sink.last_given(marks), rows_of(4).num_rows) == (4, 0)
    sink.withdraw(3, marks)
    assert output.sink().last_given(marks) == 3
    assert output.rows(*COLUMNS) == expected(store, 3)
    sink.withdraw(-1, marks)
    assert (output.sink().last_given(marks), output.rows(*COLUMNS)) == (None, [])


def test_a_driver_that_was_replaced_by_a_rewind_adds_nothing(open_store: OpenStore, table: Output) -> None:
    """It sealed an epoch and stood still, and the table has as many epochs as when it looked."""
    store, sink = open_store(retain=100), table.sink()
    run(store, sink, 4)
    stale, rows = delivery_of(store, sink).marks("sums"), store.changes("sums", 2, 3)
    sink.withdraw(1, stale)
    seen = sink._state()
    assert seen is not None
    store.rewind(1, keep_as="before")
    marks = delivery_of(store, table.sink()).marks("sums")
    assert table.sink().deliver(lambda: Frame(store.changes("sums", 0, 1)), 2, marks)  # type: ignore[arg-type,return-value]
    before = table.rows(*COLUMNS)
    with pytest.raises(nosync.StorageError, match="has epoch 2 of another line: another driver goes on with the store"):
        sink.deliver(lambda: Frame(rows), 3, stale)  # type: ignore[arg-type,return-value]
    with pytest.raises(nosync.StorageError, match="was changed meanwhile"):
        sink._add(rows, TableState(seen.output, 2, seen.line), seen)
    assert table.rows(*COLUMNS) == before


def test_an_object_whose_answer_was_lost_is_withdrawn(
    open_store: OpenStore, tmp_path: Path, objects: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, store = Output("parquet-s3", tmp_path, objects), open_store(retain=100)
    put, sink = PatientBucket.put_new, output.sink()

    def lost(bucket: PatientBucket, name: str, data: bytes) -> bool:
        found = put(bucket, name, data)
        if "epoch=2" in name:
            raise UnavailableError("no answer")
        return found

    monkeypatch.setattr(PatientBucket, "put_new", lost)
    with pytest.raises(nosync.RemoteError, match="no answer"):
        run(store, sink, 3)
    monkeypatch.undo()
    marks = delivery_of(store, sink).marks("sums")
    sink.withdraw(1, marks)
    assert output.rows(*COLUMNS) == expected(store, 1)


def test_what_a_driver_added_after_it_was_replaced_is_told_and_mended(open_store: OpenStore, table: Output) -> None:
    """It adds its epoch just when the one that goes on has withdrawn it."""
    store, sink = open_store(retain=100), table.sink()
    run(store, sink, 4)
    stale, rows = delivery_of(store, sink).marks("sums"), store.changes("sums", 1, 2)
    sink.withdraw(1, stale)
    store.rewind(1, keep_as="before")
    marks = delivery_of(store, table.sink()).marks("sums")
    assert sink.deliver(lambda: Frame(rows), 2, stale), "its line has that epoch"  # type: ignore[arg-type,return-value]
    with pytest.raises(nosync.StorageError, match="has epoch 2 of another line"):
        table.sink().deliver(lambda: Frame(rows), 2, marks)  # type: ignore[arg-type,return-value]
    delivery_of(store, table.sink())
    assert table.sink().last_given(marks) == 1
    assert table.rows(*COLUMNS) == expected(store, 1)


# --- tables of others, and what a table does not take -----------------------------------------------------------------


def test_the_table_of_another_store_is_not_written(open_store: OpenStore, output: Output) -> None:
    one, other = open_store("one", retain=100), open_store("two", retain=100)
    run(one, output.sink(), 3)
    before = output.rows(*COLUMNS)
    with pytest.raises(
        nosync.StorageError,
        match=r"has the output of another store or stage: give this sink a (table|directory) of its own",
    ):
        run(other, output.sink(), 3)
    assert output.rows(*COLUMNS) == before
    run(one, output.sink(), 4)


def test_a_table_of_others_is_refused(open_store: OpenStore, table: Output) -> None:
    if table.kind.startswith("delta"):
        from deltalake import write_deltalake

        write_deltalake(table.place, pa.table({"x": [1]}), storage_options=table.sink()._options)
    elif table.kind == "iceberg":
        table.iceberg().create_namespace("shop")
        table.iceberg().create_table("shop.sums", pa.schema({"x": pa.int64()}))
    else:
        import sqlalchemy as sa

        with sa.create_engine(table.url, poolclass=sa.NullPool).begin() as connection:
            connection.execute(sa.text("CREATE TABLE sums (x bigint)"))
    with pytest.raises(
        nosync.StorageError, match="was made by others: give this sink a table of its own, which it makes"
    ):
        run(open_store(), table.sink(), 1)


def test_a_table_that_was_dropped_begins_with_the_next_epoch(open_store: OpenStore, table: Output) -> None:
    store = open_store(retain=100)
    run(store, table.sink(), 3)
    if table.kind == "delta":
        table.path.rename(table.path.with_name("gone"))
    elif table.kind == "iceberg":
        table.iceberg().drop_table("shop.sums")
    elif table.kind == "delta-s3":
        bucket = open_bucket(table.place)
        bucket.delete([one.name for one in bucket.list("")])
    else:
        import sqlalchemy as sa

        with sa.create_engine(table.url, poolclass=sa.NullPool).begin() as connection:
            connection.execute(sa.text("DROP TABLE sums"))
    run(store, table.sink(), 6)
    assert table.rows(*COLUMNS) == [row for row in expected(store, 5) if row[0] >= 3]


MAP = pa.map_(pa.string(), pa.int64())
WIDE: dict[str, pa.Array] = {
    "flag": pa.array([True, None]),
    "tiny": pa.array([-128, 127], pa.int8()),
    "whole": pa.array([2**63 - 1, -(2**63)], pa.int64()),
    "real": pa.array([1.5, None], pa.float32()),
    "double": pa.array([1e300, float("inf")]),
    "exact": pa.array([decimal.Decimal("12345678901234567890.12"), None], pa.decimal128(38, 2)),
    "day": pa.array([datetime.date(1, 1, 1), datetime.date(9999, 12, 31)]),
    "at": pa.array(
        [datetime.datetime(1969, 12, 31, 23, 59, 59, 999999, datetime.UTC), None], pa.timestamp("us", "UTC")
    ),
    "local": pa.array([datetime.datetime(2024, 3, 31, 2, 30), None], pa.timestamp("us")),
    "text": pa.array(["zwölf 'x'; --", ""]),
    "raw": pa.array([b"\x00\xff", None]),
}


def given(sink: TableSink, marks: DeliveryLog, t: int, rows: dict[str, pa.Array]) -> None:
    n = len(next(iter(rows.values())))
    table = pa.table({**rows, "_change_type": ["insert"] * n, "_epoch": pa.array([t] * n, pa.int64())})
    sink.deliver(lambda: Frame(table), t, marks)  # type: ignore[arg-type,return-value]


def test_values_are_read_as_they_were_and_columns_come(open_store: OpenStore, table: Output) -> None:
    marks = delivery_of(open_store(), table.sink()).marks("sums")
    given(table.sink(), marks, 0, {"text": pa.array(["before"])})
    given(table.sink(), marks, 1, WIDE)
    given(table.sink(), marks, 2, {"text": pa.array(["after"])})
    found = {row["text"]: row for row in table._all()}
    assert (found["before"]["whole"], found["after"]["exact"]) == (None, None)
    for i, text in enumerate(WIDE["text"].to_pylist()):
        for name, column in WIDE.items():
            value, is_ = column[i].as_py(), found[text][name]
            if table.kind == "sqlite":  # it keeps texts and numbers
                value = {bool: int, decimal.Decimal: str, datetime.date: str}.get(type(value), lambda x: x)(value)
                if isinstance(value, datetime.datetime):
                    value = value.replace(tzinfo=None).isoformat(" ", "microseconds")
            assert is_ == value, (name, text)


@pytest.mark.parametrize("kind", ["list", "map", "interval"])
def test_what_a_database_does_not_take_is_said_by_column(open_store: OpenStore, tmp_path: Path, kind: str) -> None:
    made = {
        "list": pa.array([[1]]),
        "map": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())),
        "interval": pa.array([1], pa.duration("us")),
    }
    output = Output("sqlite", tmp_path)
    marks = delivery_of(open_store(), output.sink()).marks("sums")
    with pytest.raises(
        nosync.SchemaError, match=r"column 'x' has type .*, which a SqlSink does not write: .*to_json\(x\)"
    ):
        given(output.sink(), marks, 0, {"x": made[kind]})


@pytest.mark.parametrize(
    ("kind", "columns", "message"),
    [
        (
            "delta",
            {"x": pa.duration("us")},
            r"DeltaSink of stage sums: column 'x' .* and Delta has no intervals: .*extract",
        ),
        ("delta", {"x": pa.list_(pa.struct({"y": pa.duration("us")}))}, "column 'x' .* Delta has no intervals"),
        ("delta", {"x": pa.int64(), "X": pa.int64()}, "columns 'x' and 'X' differ in case alone, and Delta does not"),
        ("delta", {"_Epoch": pa.int64()}, "columns '_epoch' and '_Epoch' differ in case alone"),
        ("iceberg", {"x": pa.month_day_nano_interval()}, "IcebergSink of stage sums: column 'x' .* Iceberg has no"),
        ("sqlite", {"x": pa.int64(), "X": pa.int64()}, "columns 'x' and 'X' differ in case alone, and this database"),
        ("sqlite", {"x": pa.list_(pa.int64())}, "SqlSink of stage sums: column 'x' .* which a SqlSink does not write"),
    ],
)
def test_a_table_that_cannot_have_a_column_says_so_before_the_first_epoch(
    tmp_path: Path, kind: str, columns: dict[str, pa.DataType], message: str
) -> None:
    """Its job was made, the epoch was sealed, and then a library said something of its own."""
    with pytest.raises(nosync.SchemaError, match=message):
        Output(kind, tmp_path).sink().check_columns("sums", pa.schema(columns))


@pytest.mark.parametrize("kind", ["delta", "iceberg", "sqlite"])
def test_columns_of_which_nothing_is_said_are_taken(open_store: OpenStore, tmp_path: Path, kind: str) -> None:
    """What `check_columns` lets pass is written: each limit that is not named stands here for itself."""
    output = Output(kind, tmp_path)
    rows = WIDE if kind == "sqlite" else WIDE | {"list": pa.array([[1], None]), "map": pa.array([[("a", 1)], []], MAP)}
    rows = rows | {"X": pa.array([1, 2]), "x": pa.array([3, 4])} if kind == "iceberg" else rows
    output.sink().check_columns("sums", pa.schema({name: column.type for name, column in rows.items()}))
    given(output.sink(), delivery_of(open_store(), output.sink()).marks("sums"), 0, rows)
    assert len(output._all()) == 2


@pytest.mark.parametrize(
    "days", [pa.array([5_000_000], pa.date32()), pa.array([3 * 10**17], pa.timestamp("us", "UTC"))]
)
@pytest.mark.parametrize("kind", ["iceberg", "sqlite"])
def test_a_time_after_9999_is_refused_and_the_epoch_can_come_without_it(
    open_store: OpenStore, tmp_path: Path, kind: str, days: pa.Array
) -> None:
    output = Output(kind, tmp_path)
    marks = delivery_of(open_store(), output.sink()).marks("sums")
    with pytest.raises(nosync.NosyncError, match="date value out of range"):
        given(output.sink(), marks, 0, {"x": days})
    given(output.sink(), marks, 0, {"x": pa.nulls(1, days.type)})
    assert [row["x"] for row in output._all()] == [None]


def test_a_nan_does_not_become_null_in_sqlite(open_store: OpenStore, tmp_path: Path) -> None:
    output = Output("sqlite", tmp_path)
    marks = delivery_of(open_store(), output.sink()).marks("sums")
    with pytest.raises(nosync.InvalidInputError, match="column 'x' has a NaN, which SQLite keeps as null"):
        given(output.sink(), marks, 0, {"x": pa.array([1.0, float("nan")])})


# --- mistakes in the declaring call -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nosync.SqlSink("sums.db", "sums"), "needs the URL of a database, as in postgresql"),
        (lambda: nosync.SqlSink("nosuch://u:secret@h/d", "sums"), "that SQLAlchemy does not know: .*nosuch"),
        (lambda: nosync.SqlSink("postgresql+psycopg://u:p@ss:secret@h/d", "sums"), "written as %40"),
        (
            lambda: nosync.SqlSink("mysql+pymysql://h/d", "sums"),
            "the driver of this database is not installed: pip install pymysql",
        ),
        (lambda: nosync.SqlSink("sqlite://", ""), "needs the name of a table"),
        (lambda: nosync.SqlSink("sqlite://", "nosync_outputs"), "needs the name of a table"),
        (lambda: nosync.IcebergSink("sums"), "say its namespace, too, as in 'shop.spending'"),
        (lambda: nosync.DeltaSink(""), "needs the path or the URL of a table"),
    ],
)
def test_a_mistake_is_said_where_it_is_made(make: Callable[[], object], message: str) -> None:
    with pytest.raises(nosync.InvalidInputError, match=message) as error:
        make()
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nosync.SqlSink("postgresql+psycopg://u:secret@127.0.0.1:1/d", "sums"),
        lambda: nosync.SqlSink("postgresql+psycopg://127.0.0.1:1/d?user=u&password=secret", "sums"),
        lambda: nosync.IcebergSink("shop.sums", "c", {"uri": "mysql+pymysql://u:secret@h/d"}),
        lambda: nosync.DeltaSink(
            "s3://b/t", {"aws_secret_access_key": "secret", "aws_region": "nowhere", "max_retries": "0"}
        ),
    ],
)
def test_no_password_is_shown(open_store: OpenStore, make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    sink = make()
    with pytest.raises(nosync.StorageError, match=r"cannot read (table|the)") as error:
        run(open_store(), sink, 1)
    assert "secret" not in f"{error.value} {error.value.__cause__} {sink!r} {sink}"


def test_what_no_error_says() -> None:
    settings = {
        "uri": "mysql://u:pass@h/d",
        "type": "sql",
        "s3.secret-access-key": "abc",
        "warehouse": "s3://b",
        "token": "",
    }
    assert secrets_of(settings) == ["mysql://u:pass@h/d", "pass", "abc"]


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path, open_store: OpenStore) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(nosync.StorageError, match=r"cannot .* the Delta table .*file/table: "):
        run(open_store(), nosync.DeltaSink(tmp_path / "file" / "table"), 1)


# --- in a job on Spark ------------------------------------------------------------------------------------------------


@pytest.mark.spark
@pytest.mark.parametrize(
    "output",
    [pytest.param(kind, marks=[] if kind in ("delta", "postgres") else [pytest.mark.long]) for kind in KINDS],
    indirect=True,
)
def test_what_a_rewind_and_a_promotion_leave_is_in_the_table(
    spark: SparkSession, open_store: OpenStore, output: Output
) -> None:
    def give(job: nosync.Job, t: int, *rows: tuple[str, int]) -> None:
        job.advance(t, {"rows": spark.createDataFrame(list(rows), "k string, v bigint")})

    store = open_store(retain=100)
    job = nosync.Job(flow_of(), store, spark=spark, shards=2, sinks={"sums": output.sink()})
    for t in range(4):
        give(job, t, ("a", t), ("b", 1))
    assert output.rows(*COLUMNS) == expected(store, 3)
    job.rewind(1)
    give(job, 2, ("a", 100))
    assert output.rows(*COLUMNS) == expected(store, 2)
    assert (2, "update_postimage", "a", 101) in output.rows(*COLUMNS)
    fix = job.branch("fix", at=0, replace={"sums": {"total": nosync.max("v")}})
    fix.replay()
    job.promote(fix)
    assert output.rows(*COLUMNS) == expected(store, 2)
    assert (2, "update_postimage", "a", 100) in output.rows(*COLUMNS)
    again = nosync.Job(job._versions.declared, store, spark=spark, shards=2, sinks={"sums": output.sink()})
    give(again, 3, ("c", 1))
    assert output.rows(*COLUMNS) == expected(store, 3)
