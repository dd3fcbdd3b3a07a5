"""Jobs on a real local Spark: results against pandas, determinism, recovery, refusals."""

from __future__ import annotations

import gc
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import nosync
from nosync.lsm.columnar.hashing import hash64
from nosync.lsm.platform.process import numpy_environment
from nosync.spark import java, session
from nosync.spark.java import collector_settings
from nosync.spark.session import conf_set
from tests.conftest import OpenStore
from tests.helpers.oracles import KEY_VALUES
from tests.helpers.word_jobs import (
    SCHEMA,
    SHARDS,
    epochs,
    make_flow,
    rows_of,
    run,
    to_spark,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def oracle(frames: list[pd.DataFrame]) -> dict[str, dict[str, Any]]:
    """What `totals` must hold, by pandas over all rows at once."""
    rows = pd.concat(frames)
    rows = rows[rows["n"] > 0]
    result = {}
    for word, group in rows.groupby("word"):
        x = group["x"].dropna().astype(float)
        result[word] = {
            "n": len(group), "some": len(x), "total": group["n"].sum(),
            "least": x.min() if len(x) else None, "most": x.max() if len(x) else None,
            "mean": x.sum() / len(x) if len(x) else None,
        }  # fmt: skip
    return result


def layers_of(store: nosync.Store) -> dict[tuple[str, int, Any], str]:
    return {(layer.stage, layer.shard, layer.lower): layer.digest for layer in store.layers()}


def test_results_equal_pandas_at_every_epoch(spark: SparkSession, store: nosync.Store) -> None:
    frames = epochs(1, 4)
    job = nosync.Job(make_flow(), store, spark=spark, shards=SHARDS)
    reports = run(job, spark, frames)
    assert [r.rows_in for r in reports] == [300, 300, 300, 300, 0]
    assert [r.layers_computed for r in reports] == [7 * SHARDS] * 5
    for t in range(len(frames)):
        expected = oracle(frames[: t + 1])
        assert rows_of(job.read("totals", as_of=t), "word") == expected
        # An aggregate over a changing input: rows of `totals` come and go.
        big = pd.DataFrame([v for v in expected.values() if v["total"] > 100], columns=["n", "total"])
        by_size = {int(n): {"words": len(g), "total": int(g["total"].sum())} for n, g in big.groupby("n")}
        assert rows_of(job.read("big_by_size", as_of=t), "n") == by_size
    best = rows_of(job.read("best"), "initial")
    assert set(best) == set("abcxy"), "z is forgotten each time"
    final = oracle(frames)
    for initial, state in best.items():
        assert state["best"] == max(v["total"] for w, v in final.items() if w[0] == initial)
    store.sync()
    assert job.safe_point() == 4


def test_the_change_feed_leads_from_one_state_to_the_other(spark: SparkSession, store: nosync.Store) -> None:
    frames = epochs(2, 3)
    job = nosync.Job(make_flow(), store, spark=spark, shards=SHARDS)
    run(job, spark, frames)
    state = rows_of(job.read("totals", as_of=0), "word")
    for row in sorted((r.asDict() for r in job.changes("totals", 0, 2).collect()), key=lambda r: r["_epoch"]):
        kind, word = row.pop("_change_type"), row.pop("word")
        row.pop("_epoch")
        if kind in ("delete", "update_preimage"):
            assert state.pop(word) == row
        else:
            state[word] = row
    assert state == rows_of(job.read("totals", as_of=2), "word")


def test_a_read_can_be_part_of_any_plan(spark: SparkSession, store: nosync.Store) -> None:
    """Coalesced or in a union, tasks have other numbers; each must still read its own shard."""
    job = nosync.Job(make_flow(), store, spark=spark, shards=SHARDS)
    run(job, spark, epochs(2, 2))
    words = sorted(row.word for row in job.read("totals").collect())
    assert len(words) == len(set(words)) > SHARDS
    assert sorted(row.word for row in job.read("totals").coalesce(1).collect()) == words
    both = job.read("best").select("initial").union(job.read("totals").select("word")).collect()
    assert sorted(row.initial for row in both) == sorted([row.initial for row in job.read("best").collect()] + words)
    assert job.changes("totals", -1, 1).coalesce(1).count() == job.changes("totals", -1, 1).count()


@pytest.mark.long
def test_shuffled_input_and_other_tasks_give_the_same_layers(spark: SparkSession, open_store: OpenStore) -> None:
    frames = epochs(3, 2)
    found = []
    for order, partitions in ((None, "4"), (1, "1"), (6, "7")):
        store = open_store(f"store-{order}")
        with conf_set(spark, {"spark.sql.shuffle.partitions": partitions}):
            run(nosync.Job(make_flow(), store, spark=spark, shards=SHARDS), spark, frames, order=order)
        found.append(layers_of(store))
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 7 * SHARDS * 3


def test_recomputing_lost_layers_gives_the_same_digests(spark: SparkSession, store: nosync.Store) -> None:
    """Any subset of computed layers, inner epochs included; exactly those run again, and later ones stay."""
    frames = epochs(4, 5)
    job = nosync.Job(make_flow(), store, spark=spark, shards=SHARDS)
    run(job, spark, frames)
    store.sync()
    before = layers_of(store)
    totals = [rows_of(job.read("totals", as_of=t), "word") for t in range(6)]
    choose = random.Random(5)
    for many in (1, 12):
        computed = [layer for layer in store.layers() if layer.stage != "words"]
        victims = choose.sample(computed, many)
        for layer in victims:
            Path(layer.path).unlink()
        report = job.recover()
        assert (report.lost, report.recomputed, report.unrecoverable) == (len(victims), len(victims), {})
        # The safe point waits for keyed stages; those without state can be computed from them at any time.
        required = [int(layer.lower) for layer in victims if layer.stage in ("totals", "best", "big_by_size")]
        first_lost = min(required, default=6)
        assert report.rolled_back_to == (first_lost - 1 if first_lost else None)
        assert layers_of(store) == before
        assert job.safe_point() == 5
    assert [rows_of(job.read("totals", as_of=t), "word") for t in range(6)] == totals


@pytest.mark.long
def test_a_whole_shard_is_rebuilt_even_after_merges(spark: SparkSession, store: nosync.Store) -> None:
    frames = epochs(6, 5)
    job = nosync.Job(make_flow(), store, spark=spark, shards=SHARDS)
    run(job, spark, frames)
    store.compact("totals")
    state = rows_of(job.read("totals"), "word")
    (merged,) = [layer for layer in store.layers() if layer.stage == "totals" and layer.shard == 1]
    Path(merged.path).unlink()
    report = job.recover()
    assert (report.lost, report.recomputed) == (6, 6), "one stage, one shard, six epochs"
    assert rows_of(job.read("totals"), "word") == state
    assert job.safe_point() == 5


@pytest.mark.parametrize("everything", [True, False])
@pytest.mark.long
def test_recovered_layers_outlive_the_garbage_of_a_merge(
    spark: SparkSession, open_store: OpenStore, everything: bool
) -> None:
    """What a merge replaced waits for its grace to end under the names that recovery writes again."""
    settings = nosync.StoreSettings(background=False, grace_s=3600.0, retry_s=0.0)
    store = open_store(settings=settings)
    flow = nosync.Dataflow("merged")
    flow.source("words", SCHEMA).aggregate("n", key=["word"], n=nosync.count())
    job = nosync.Job(flow, store, spark=spark, shards=1)
    run(job, spark, epochs(3, 5))
    store.sync()
    while store.node.merge_once():
        pass
    state = [rows_of(job.read("n", as_of=t), "word") for t in range(6)]
    files = sorted((store.directory.root / "layers" / "n").rglob("*.layer"))
    merged = [path for path in files if path.name.split("-")[0] != files[-1].name.split("-")[0]]
    assert len(files) > 6, "no merge was done"
    for path in files if everything else merged[:1]:
        path.unlink()
    report = job.recover()
    assert report.unrecoverable == {}
    store.node.parts.garbage.collect(all=True)
    assert store.missing() == []
    assert [rows_of(job.read("n", as_of=t), "word") for t in range(6)] == state
    assert job.recover().lost == 0


def test_recover_looks_again(spark: SparkSession, store: nosync.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is lost while it runs is computed again; what is lost each time is named, and not called recovered."""
    flow = nosync.Dataflow("again")
    flow.source("words", SCHEMA).aggregate("n", key=["word"], n=nosync.count())
    job = nosync.Job(flow, store, spark=spark, shards=1)
    run(job, spark, epochs(3, 2))
    store.sync()
    files = {int(layer.lower): Path(layer.path) for layer in store.layers() if layer.stage == "n"}
    sync, times = store.node.sync, [1]

    def lose_once_more() -> None:
        sync()
        if times[0]:
            times[0] -= 1
            files[1].unlink(missing_ok=True)

    monkeypatch.setattr(store.node, "sync", lose_once_more)
    files[0].unlink()
    report = job.recover()
    assert (report.lost, report.recomputed, report.unrecoverable) == (2, 2, {})
    assert store.missing() == []
    times[0] = 100
    files[1].unlink()
    report = job.recover()
    assert list(report.unrecoverable) == ["stage n shard 0 timestamp 1"]
    assert "was lost again" in report.unrecoverable["stage n shard 0 timestamp 1"]
    assert [m.t for m in store.missing()] == [1]


def test_recovery_computes_exactly_what_is_missing(spark: SparkSession, store: nosync.Store, tmp_path: Path) -> None:
    """The user's functions leave a file each time they run: only the missing (stage, shard) may."""
    calls = tmp_path / "calls"
    calls.mkdir()

    def traced(rows: pa.Table) -> pa.Table:
        if rows.num_rows:
            import uuid

            (calls / uuid.uuid4().hex).write_text(str(rows.num_rows))
        return rows

    flow = nosync.Dataflow("traced")
    source = flow.source("words", SCHEMA)
    source.map("one", traced, version="1").map("two", traced, version="1").aggregate(
        "n", key=["word"], n=nosync.count()
    )
    job = nosync.Job(flow, store, spark=spark, shards=SHARDS)
    run(job, spark, epochs(7, 2))
    store.sync()
    for path in calls.iterdir():
        path.unlink()
    victims = [layer for layer in store.layers() if (layer.stage, layer.shard, layer.lower) == ("one", 1, 1)]
    Path(victims[0].path).unlink()
    report = job.recover()
    assert (report.recomputed, len(list(calls.iterdir()))) == (1, 1)
    assert job.recover().recomputed == 0


def test_only_what_the_wanted_stages_need_is_recovered(spark: SparkSession, open_store: OpenStore) -> None:
    """A lost catalog is rebuilt; of lost layers only those come back that a wanted stage cannot do without."""
    frames = epochs(5, 2)
    with open_store() as store:
        run(nosync.Job(make_flow(), store, spark=spark, shards=SHARDS), spark, frames)
    shutil.rmtree(store.directory.root / "catalog")
    store = open_store()
    job = nosync.Job(make_flow(), store, spark=spark, shards=SHARDS)
    assert job.safe_point() == 2
    lost = ("initials", "best", "big", "big_by_size")
    victims = [layer for layer in store.layers() if layer.stage in lost]
    for layer in victims:
        Path(layer.path).unlink()
    report = job.recover(outputs=["best"])
    assert (report.lost, report.recomputed) == (4 * SHARDS * 3, 2 * SHARDS * 3), "best, and initials that it is made of"
    assert {m.entry.id.trace.stage for m in store.missing()} == {"big", "big_by_size"}
    with pytest.raises(nosync.UnknownStageError, match="no stage 'bets'"):
        job.recover(outputs=["bets"])
    assert job.recover().recomputed == 2 * SHARDS * 3
    assert job.safe_point() == 2


def test_lost_sources_come_back_only_if_given_again(spark: SparkSession, store: nosync.Store) -> None:
    frames = epochs(8, 2)
    job = nosync.Job(make_flow(), store, spark=spark, shards=SHARDS)
    run(job, spark, frames)
    before = layers_of(store)
    for layer in store.layers():
        if layer.lower == 1:
            Path(layer.path).unlink()
    report = job.recover()
    assert report.recomputed == 0
    assert "neither recorded nor given again" in next(iter(report.unrecoverable.values()))
    assert "unrecoverable   21" in str(report)
    report = job.recover(lambda t: {"words": to_spark(spark, frames[t], order=3)})
    assert (report.recomputed, report.unrecoverable) == (21, {})
    assert layers_of(store) == before


def test_a_driver_that_dies_in_the_middle_goes_on(spark: SparkSession, open_store: OpenStore) -> None:
    frames = epochs(9, 3)

    def failing(rows: pa.Table) -> pa.Table:
        raise ValueError("not today")

    flow = nosync.Dataflow("f")
    flow.source("words", SCHEMA).map("m", failing, schema=SCHEMA, version="1").aggregate(
        "a", key=["word"], n=nosync.count()
    )
    with open_store() as store:
        job = nosync.Job(flow, store, spark=spark, shards=SHARDS)
        with pytest.raises(
            nosync.StageError, match="stage m shard .of3 timestamp 0: its function raised ValueError: not today"
        ):
            job.advance(0, {"words": to_spark(spark, frames[0])})
        assert store.last_sealed() is None
    fixed = nosync.Dataflow("f")
    fixed.source("words", SCHEMA).map("m", lambda t: t, schema=SCHEMA, version="1").aggregate(
        "a", key=["word"], n=nosync.count()
    )
    with open_store() as store:
        job = nosync.Job(fixed, store, spark=spark, shards=SHARDS)
        report = job.advance(0, {"words": to_spark(spark, frames[0], order=2)})
        assert report.layers_reused >= 1
        assert report.layers_computed + report.layers_reused == 3 * SHARDS
        with pytest.raises(nosync.DeterminismError, match="stage words .* computed twice"):
            job.advance(0, {"words": to_spark(spark, frames[1])})
        again = job.advance(0, {"words": to_spark(spark, frames[0])})
        assert again.layers_computed == 0


def test_the_session_collects_in_parallel(spark: SparkSession) -> None:
    beans = spark._jvm.java.lang.management.ManagementFactory.getGarbageCollectorMXBeans()
    names = " ".join(bean.getName() for bean in beans)
    assert ("PS " in names) == bool(collector_settings()), names


def test_modules_are_kept_out_of_the_workers_garbage_collections(spark: SparkSession, store: nosync.Store) -> None:
    def frozen(_: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pydict({"n": [gc.get_freeze_count()]})

    flow = nosync.Dataflow("f")
    flow.source("words", SCHEMA)
    job = nosync.Job(flow, store, spark=spark, shards=SHARDS)
    job.advance(0, {"words": to_spark(spark, epochs(1, 1)[0])})
    found = [row.n for row in spark.range(0, 4, 1, 4).mapInArrow(frozen, "n bigint").collect()]
    assert max(found) > 10_000


def test_workers_are_told_of_the_processor(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(_: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pydict({"told": [os.environ.get("NPY_DISABLE_CPU_FEATURES")]})

    (row,) = spark.range(0, 1, 1, 1).mapInArrow(told, "told string").collect()
    expected = os.environ | numpy_environment()
    assert row.told == expected.get("NPY_DISABLE_CPU_FEATURES")

    monkeypatch.setattr(java, "numpy_environment", lambda: {"OF_ANY_PROCESSOR": "yes"})
    session.local_session(2, "nosync-tests")  # the one that there is, with the settings of a new one
    assert spark.conf.get("spark.executorEnv.OF_ANY_PROCESSOR") == "yes"
    spark.conf.unset("spark.executorEnv.OF_ANY_PROCESSOR")


def test_keys_and_shards_agree_with_the_jvm(spark: SparkSession) -> None:
    """Spark's xxhash64 is the oracle of ours, for every key type and for several columns."""
    choose = random.Random(11)
    for name, (type_, _) in KEY_VALUES.items():
        if name == "null":
            continue
        values = _examples(type_, choose)
        table = pa.table({"a": pa.array(values, type_), "b": pa.array(range(len(values)), pa.int64())})
        frame = spark.createDataFrame(table)
        for columns in (["a"], ["b", "a"]):
            jvm = [row[0] for row in frame.selectExpr(f"xxhash64({', '.join(columns)})", "b").orderBy("b").collect()]
            ours = hash64([table.column(c).combine_chunks() for c in columns]).view(np.int64).tolist()
            assert ours == jvm, name
    nans = spark.sql("SELECT xxhash64(double('NaN'), float('NaN'), 1L)").collect()[0][0]
    other_nan = np.array([0xFFF8000000000001], np.uint64).view(np.float64)  # the JVM knows one
    row = [pa.array(other_nan), pa.array(other_nan.astype(np.float32)), pa.array([1], pa.int64())]
    assert hash64(row).view(np.int64).tolist() == [nans]


def _examples(type_: pa.DataType, choose: random.Random) -> list[Any]:
    import datetime
    import decimal

    t = pa.types
    if t.is_boolean(type_):
        return [True, False, None]
    if t.is_decimal(type_):
        digits = type_.precision
        numbers = [0, 1, -1, 127, 128, -128, -129, 10**digits - 1, -(10**digits) + 1]
        numbers += [choose.randrange(-(10**digits) + 1, 10**digits) >> choose.randrange(3 * digits) for _ in range(50)]
        with decimal.localcontext(prec=50):
            return [decimal.Decimal(n).scaleb(-type_.scale) for n in numbers] + [None]
    if t.is_integer(type_):
        half = 2 ** (type_.bit_width - 1)
        return [0, -1, half - 1, -half, None] + [choose.randrange(-half, half) for _ in range(20)]
    if t.is_floating(type_):
        return [0.0, -0.0, 1.5, -1e300, float("inf"), None]
    if t.is_date(type_):
        return [datetime.date(1900, 1, 1) + datetime.timedelta(days=choose.randrange(100_000)) for _ in range(20)] + [
            None
        ]
    if t.is_timestamp(type_):
        start = datetime.datetime(1900, 1, 1, tzinfo=datetime.UTC)
        return [start + datetime.timedelta(microseconds=choose.randrange(10**16)) for _ in range(20)] + [None]
    lengths = [*range(70), 200]
    texts = ["".join(choose.choice("abcé\u20ac😀 ") for _ in range(n)) for n in lengths]
    return [*texts, None] if t.is_string(type_) else [*(text.encode() for text in texts), None]
