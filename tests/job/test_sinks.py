"""Sinks and fences over changes of the main timeline: what is given, taken back, refused, and by whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

import nosync
from nosync.job.delivery import Delivery
from nosync.lsm.facts.deliveries import DeliveryLog
from tests.conftest import OpenStore

pytestmark = pytest.mark.spark
SCHEMA = "k string, v bigint"


def flow_of() -> nosync.Dataflow:
    flow = nosync.Dataflow("f")
    flow.source("rows", SCHEMA).aggregate("sums", key=["k"], total=nosync.sum("v"))
    return flow


def given(spark: SparkSession, *rows: tuple[str, int]) -> dict[str, DataFrame]:
    return {"rows": spark.createDataFrame(list(rows), SCHEMA)}


def job_on(spark: SparkSession, store: nosync.Store, **sinks: Any) -> nosync.Job:
    return nosync.Job(flow_of(), store, spark=spark, shards=1, sinks=sinks)


def epochs(out: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("epoch=")) for path in out.glob("epoch=*"))


def totals(store: nosync.Store) -> dict[str, int]:
    return {row["k"]: row["total"] for row in store.read("sums").to_pylist()}


class Killed(BaseException):
    """As `kill -9`: nothing of the job runs after it."""


def test_the_first_epoch_of_a_new_sink_is_given_by_the_next_job(
    spark: SparkSession, open_store: OpenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> None:
        raise Killed

    out, got = tmp_path / "out", list[int]()
    sinks = {"rows": nosync.ParquetSink(out), "sums": nosync.CallbackSink(lambda _, t: got.append(t))}
    store = open_store()
    for t in (0, 1):  # the first epoch of all, and the first one that a sink has in a store that goes on
        if t:
            out, sinks["rows"] = tmp_path / "new", nosync.ParquetSink(tmp_path / "new")
        job = job_on(spark, store, **sinks)
        with monkeypatch.context() as patch:
            patch.setattr(Delivery, "deliver", die)
            with pytest.raises(Killed):
                job.advance(t, given(spark, ("a", 1)))
        job_on(spark, store, **sinks)
        assert (epochs(out), got) == ([t], list(range(t + 1)))


def test_the_first_epoch_is_given_again_where_the_job_died_after_its_mark(
    spark: SparkSession, open_store: OpenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = DeliveryLog.mark

    def die(marks: DeliveryLog, t: int) -> None:
        mark(marks, t)
        raise Killed

    store, out = open_store(), tmp_path / "out"
    job = job_on(spark, store, sums=nosync.ParquetSink(out))
    with monkeypatch.context() as patch:
        patch.setattr(DeliveryLog, "mark", die)
        with pytest.raises(Killed):
            job.advance(0, given(spark, ("a", 1)))
    assert epochs(out) == []
    job_on(spark, store, sums=nosync.ParquetSink(out))
    assert epochs(out) == [0]


def test_the_output_of_another_store_is_neither_taken_for_ones_own_nor_withdrawn(
    spark: SparkSession, open_store: OpenStore, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    one, other = open_store("one"), open_store("two")
    first = job_on(spark, one, sums=nosync.ParquetSink(out))
    for t in range(3):
        first.advance(t, given(spark, ("a", t)))
    with pytest.raises(nosync.StorageError, match="has the output of another store or stage"):
        job_on(spark, other, sums=nosync.ParquetSink(out))
    with pytest.raises(nosync.StorageError, match="has the output of another store or stage"):
        job_on(spark, one, sums=nosync.ParquetSink(out), rows=nosync.ParquetSink(out))
    assert epochs(out) == [0, 1, 2]
    (out / "_nosync").unlink()  # as an earlier version wrote it
    with pytest.raises(nosync.StorageError, match="has the output of another"):
        job_on(spark, other, sums=nosync.ParquetSink(out))
    job_on(spark, one, sums=nosync.ParquetSink(out)).advance(3, given(spark, ("a", 3)))
    assert epochs(out) == [0, 1, 2, 3]
    assert (out / "_nosync").exists()


def test_a_sink_that_fell_behind_is_told_of_what_was_merged_away(
    spark: SparkSession, open_store: OpenStore, tmp_path: Path
) -> None:
    store, got = open_store(retain=2), list[int]()
    out, sink = tmp_path / "out", nosync.CallbackSink(lambda _, t: got.append(t))
    job_on(spark, store, sums=sink, rows=nosync.ParquetSink(out)).advance(0, given(spark, ("a", 1)))
    without = job_on(spark, store)
    for t in range(1, 6):
        without.advance(t, given(spark, ("a", 1)))
    store.sync()
    store.compact()
    oldest = store.since() + 1
    assert oldest > 1
    for sinks in ({"sums": sink}, {"rows": nosync.ParquetSink(out)}):
        with pytest.raises(nosync.CompactedError, match=f"not given the epochs 1 to {oldest - 1}, .* is {oldest}"):
            job_on(spark, store, **sinks)
    assert (got, epochs(out)) == ([0], [0])
    job_on(spark, store, sums=nosync.CallbackSink(sink.function, "gap"), rows=nosync.ParquetSink(tmp_path / "new"))
    job_on(spark, store, sums=sink).advance(6, given(spark, ("a", 1)))
    assert got == [0, *range(oldest, 7)]


@pytest.mark.long
def test_a_promotion_that_sinks_could_not_follow_changes_nothing(
    spark: SparkSession, open_store: OpenStore, tmp_path: Path
) -> None:
    store, out = open_store(retain=2), tmp_path / "out"
    job = job_on(spark, store, sums=nosync.ParquetSink(out))
    for t in range(3):
        job.advance(t, given(spark, ("a", t)))
    fix = job.branch("fix", at=1, replace={"sums": {"total": nosync.max("v")}})
    for t in range(3, 7):
        job.advance(t, given(spark, ("a", t)))
    fix.replay()
    store.sync()
    store.compact()
    assert store.since() > 1
    with pytest.raises(nosync.CompactedError, match="cannot promote fix: its sinks would be given the epochs after 1"):
        job.promote(fix)
    assert (epochs(out), totals(store)) == ([*range(7)], {"a": 21})
    job.advance(7, given(spark, ("a", 7)))
    fix.replay()
    job_on(spark, store).promote(fix)
    assert totals(store) == {"a": 7}


def test_a_callback_is_given_again_all_that_it_was_told_to_withdraw(spark: SparkSession, open_store: OpenStore) -> None:
    table: dict[int, int] = {}

    def take(changes: DataFrame, t: int) -> None:
        table[t] = max((row.total for row in changes.collect() if row._change_type != "update_preimage"), default=0)

    def withdraw(after: int) -> None:
        for t in [t for t in table if t > after]:
            del table[t]

    store = open_store()
    sink = nosync.CallbackSink(take, on_withdraw=withdraw)
    with_sink = job_on(spark, store, sums=sink)
    for t in range(5):
        with_sink.advance(t, given(spark, ("a", 1)))
    without = job_on(spark, store)
    without.rewind(1)
    for t in range(2, 5):
        without.advance(t, given(spark, ("a", 10)))
    store.sync()
    damaged = Path(store.directory.root) / "manifests" / "main" / "1.json"  # from before the fork
    text = damaged.read_bytes()
    store.close()
    damaged.write_bytes(text[:-10] + b"0000000000")
    store = open_store()
    again = job_on(spark, store, sums=sink)
    damaged.write_bytes(text)
    again.advance(5, given(spark, ("a", 10)))
    assert table == {0: 1, 1: 2, 2: 12, 3: 22, 4: 32, 5: 42}


@pytest.mark.parametrize("how", ["rewind", "promote"])
def test_a_job_that_was_replaced_stays_fenced_when_main_is_another_line(
    spark: SparkSession, open_store: OpenStore, how: str
) -> None:
    store = open_store()
    old = job_on(spark, store)
    for t in range(3):
        old.advance(t, given(spark, ("a", t + 1)))
    old = job_on(spark, store)  # with a number that is greater than those of a new line
    new = job_on(spark, store)
    if how == "rewind":
        new.rewind(2)
    else:
        fix = new.branch("fix", at=0, replace={"sums": {"total": nosync.max("v")}})
        fix.replay()
        new.promote(fix)
    before = totals(store)
    for call in (
        lambda: old.advance(3, given(spark, ("a", 9))),
        old.recover,
        lambda: old.advance(2, given(spark, ("a", 3))),
    ):
        with pytest.raises(nosync.FencedError, match="Make a new Job"):
            call()
    assert totals(store) == before
    new.advance(3, given(spark, ("a", 5)))
    assert totals(store) == ({"a": 11} if how == "rewind" else {"a": 5})


def test_a_name_that_a_full_disk_cut_off_is_none(
    spark: SparkSession, open_store: OpenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output is the sink's own, and goes on as soon as there is space."""
    out, store = tmp_path / "out", open_store()
    job = job_on(spark, store, sums=nosync.ParquetSink(out))
    whole = Path.write_text

    def full(path: Path, text: str) -> int:
        whole(path, text[:0])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(nosync.StorageError, match="No space left"):
            job.advance(0, given(spark, ("a", 1)))
    (out / "_nosync").write_text("")  # as an earlier version left it
    job.advance(0, given(spark, ("a", 1)))
    job_on(spark, store, sums=nosync.ParquetSink(out)).advance(1, given(spark, ("a", 1)))
    assert epochs(out) == [0, 1]


def test_a_job_on_a_branch_has_no_sinks(spark: SparkSession, open_store: OpenStore, tmp_path: Path) -> None:
    """Its epochs would get into the output of main."""
    store = open_store()
    job = job_on(spark, store)
    job.advance(0, given(spark, ("a", 1)))
    job.branch("b", at=0)
    sinks = {"sums": nosync.ParquetSink(tmp_path / "out")}
    with pytest.raises(nosync.FlowError, match="sinks are given the epochs of 'main'"):
        nosync.Job(flow_of(), store, spark=spark, shards=1, branch="b", sinks=sinks)
