"""Sinks of a store that was restored from copies: what they were given of epochs that are lost is taken back."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import nosync
from nosync.job.parquet_outputs import put
from nosync.lsm.errors import RemoteError, StorageError
from nosync.replication.remote.bucket import UnavailableError
from nosync.replication.remote.cloud import open_bucket
from nosync.replication.remote.restore import restore
from nosync.testing.simulated_bucket import Objects, SimulatedBucket
from tests.conftest import OpenStore
from tests.helpers.totals import flow_of, given, totals

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SAFE, LAST = 1, 3


def lose(spark: SparkSession, root: Path, sinks: dict[str, Any]) -> Path:
    """Returns a directory that was restored as of epoch SAFE, of a store whose sinks had all up to LAST."""
    url, copy = f"file://{root}/bucket", root / "as-it-was"
    with nosync.open(root / "store", remote=url) as store:
        job = nosync.Job(flow_of(), store, spark=spark, shards=1, sinks=sinks)
        for t in range(LAST + 1):
            job.advance(t, given(spark, ("a", 1)))
            if t == SAFE:
                store.sync_remote()
                shutil.copytree(root / "bucket", copy)
    assert restore(open_bucket(f"file://{copy}"), root / "restored").epoch == SAFE
    return root / "restored"


@pytest.mark.spark
def test_a_callback_hears_of_what_is_taken_back(spark: SparkSession, tmp_path: Path) -> None:
    said: list[tuple[str, int]] = []

    def sinks() -> dict[str, Any]:
        return {
            "sums": nosync.CallbackSink(
                lambda _, t: said.append(("given", t)), on_withdraw=lambda t: said.append(("after", t))
            )
        }

    with nosync.open(lose(spark, tmp_path, sinks())) as store:
        said.clear()
        job = nosync.Job(flow_of(), store, spark=spark, shards=1, sinks=sinks())
        job.advance(SAFE + 1, given(spark, ("a", 100)))
        nosync.Job(flow_of(), store, spark=spark, shards=1, sinks=sinks())
    assert said == [("after", SAFE), ("given", SAFE + 1)]


@pytest.mark.spark
@pytest.mark.parametrize("kind", ["parquet", "sql"])
def test_a_table_has_what_the_store_has_also_where_the_first_job_had_no_sink(
    spark: SparkSession, tmp_path: Path, kind: str
) -> None:
    out, url = tmp_path / "out", f"sqlite:///{tmp_path}/out.db"

    def sinks() -> dict[str, Any]:
        return {"rows": nosync.ParquetSink(out) if kind == "parquet" else nosync.SqlSink(url, "t")}

    with nosync.open(lose(spark, tmp_path, sinks())) as store:
        job = nosync.Job(flow_of(), store, spark=spark, shards=1)
        for t in range(SAFE + 1, LAST + 2):
            job.advance(t, given(spark, ("a", 100)))
        job = nosync.Job(flow_of(), store, spark=spark, shards=1, sinks=sinks())
        job.advance(LAST + 2, given(spark, ("a", 1)))
        found = given_to_parquet(spark, out) if kind == "parquet" else given_to_sql(url)
        assert found == {t: 100 if SAFE < t < LAST + 2 else 1 for t in range(LAST + 3)}
        assert totals(store) == {"a": sum(found.values())}


def given_to_parquet(spark: SparkSession, out: Path) -> dict[int, int]:
    return {row.epoch: row.v for row in spark.read.parquet(str(out)).collect()}


def given_to_sql(url: str) -> dict[int, int]:
    import sqlalchemy as sa

    with sa.create_engine(url).connect() as connection:
        return {int(epoch): int(v) for epoch, v in connection.execute(sa.text("SELECT _epoch, v FROM t"))}


@pytest.mark.spark
def test_a_column_of_the_name_of_the_partitions_is_refused(
    spark: SparkSession, open_store: OpenStore, tmp_path: Path
) -> None:
    flow = nosync.Dataflow("f")
    flow.source("rows", "k string, Epoch bigint")
    with pytest.raises(nosync.InvalidInputError, match="stage rows has a column 'Epoch', and so does the output"):
        nosync.Job(flow, open_store(), spark=spark, sinks={"rows": nosync.ParquetSink(tmp_path / "out")})


class _Busy(SimulatedBucket):
    """Answers that it is busy, some times."""

    def __init__(self, times: int) -> None:
        super().__init__(Objects())
        self.times = times

    def put_new(self, name: str, data: bytes | bytearray | memoryview) -> bool:
        self.times -= 1
        if self.times >= 0:
            raise UnavailableError("503")
        return super().put_new(name, data)


def test_an_object_is_put_again_where_the_store_was_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nosync.job.parquet_outputs._PAUSES_S", (0.0, 0.0))
    bucket = _Busy(2)
    put(bucket, "epoch=1/part", b"rows")
    put(bucket, "epoch=1/part", b"rows")  # it was put, and the answer was lost
    assert bucket.get("epoch=1/part") == b"rows"
    with pytest.raises(StorageError, match="another job writes into this output"):
        put(bucket, "epoch=1/part", b"others")
    with pytest.raises(RemoteError, match="503"):
        put(_Busy(3), "epoch=1/part", b"rows")


def test_a_delta_table_of_a_relative_path_stays_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deltalake")
    monkeypatch.chdir(tmp_path)
    sink = nosync.DeltaSink("orders")
    monkeypatch.chdir("/")
    assert sink.path == str(tmp_path / "orders")
    assert nosync.DeltaSink("s3://bucket/orders").path == "s3://bucket/orders"


def test_a_database_of_a_relative_path_stays_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sqlalchemy")
    monkeypatch.chdir(tmp_path)
    sink = nosync.SqlSink("sqlite:///orders.db", "orders")
    monkeypatch.chdir("/")
    assert sink._connected.url.database == str(tmp_path / "orders.db")
    assert nosync.SqlSink("sqlite://", "orders")._connected.url.database is None
