"""Structured Streaming and sinks: outputs after any failure equal those of a run without one."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException

import nosync
from nosync.job.epoch_runs import EpochRuns
from nosync.testing.daemon_cluster import eventually
from tests.conftest import OpenStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

SCHEMA = "word string, n bigint"
FILES = 8
KILLS = int(os.environ.get("NOSYNC_STREAM_KILLS", "1"))


def write_input(directory: Path, files: int = FILES) -> None:
    """JSON files whose modification times fix the order in which the stream reads them."""
    directory.mkdir(parents=True)
    choose = random.Random(1)
    for i in range(files):
        rows = [{"word": choose.choice("abcdefgh"), "n": choose.randrange(100)} for _ in range(40)]
        path = directory / f"{i:04}.json"
        path.write_text("\n".join(json.dumps(row) for row in rows))
        os.utime(path, (1_700_000_000 + i, 1_700_000_000 + i))


def totals_of(directory: Path, files: int = FILES) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for path in sorted(directory.iterdir())[:files]:
        for line in path.read_text().splitlines():
            row = json.loads(line)
            n, total = found.get(row["word"], (0, 0))
            found[row["word"]] = (n + 1, total + row["n"])
    return found


def make_job(store: nosync.Store, spark: SparkSession, sinks: dict[str, Any] | None = None) -> nosync.Job:
    flow = nosync.Dataflow("stream")
    flow.source("words", SCHEMA).aggregate("totals", key=["word"], n=nosync.count(), total=nosync.sum("n"))
    return nosync.Job(flow, store, spark=spark, shards=2, sinks=sinks)


def read_stream(spark: SparkSession, directory: Path) -> DataFrame:
    return spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).json(str(directory))


def run_stream(job: nosync.Job, spark: SparkSession, root: Path, **options: Any) -> None:
    options = {"checkpoint": root / "cp", "trigger": {"availableNow": True}, **options}
    query = job.stream({"words": read_stream(spark, root / "in")}, **options)
    assert query.awaitTermination(240)


def replay(rows: list[dict[str, Any]]) -> dict[str, tuple[int, int]]:
    """The state that a change feed leads to; fails where a change does not fit."""
    state: dict[str, tuple[int, int]] = {}
    for row in sorted(rows, key=lambda r: (r["_epoch"], r["_change_type"] not in ("delete", "update_preimage"))):
        value = (row["n"], row["total"])
        if row["_change_type"] in ("delete", "update_preimage"):
            assert state.pop(row["word"]) == value
        else:
            assert row["word"] not in state
            state[row["word"]] = value
    return state


def test_a_stream_is_epochs_and_goes_on_after_a_restart(
    spark: SparkSession, open_store: OpenStore, tmp_path: Path
) -> None:
    write_input(tmp_path / "all")
    (tmp_path / "in").mkdir()
    for path in sorted((tmp_path / "all").iterdir())[:3]:
        os.link(path, tmp_path / "in" / path.name)
    with open_store() as store:
        run_stream(make_job(store, spark), spark, tmp_path)
        assert store.last_sealed() == 2
    for path in sorted((tmp_path / "all").iterdir())[3:]:
        os.link(path, tmp_path / "in" / path.name)
    with open_store() as store:
        job = make_job(store, spark, {"totals": nosync.ParquetSink(tmp_path / "out")})
        run_stream(
            job, spark, tmp_path, checkpoint=(tmp_path / "cp").as_uri()
        )  # the same, on whatever file system it is
        assert store.last_sealed() == FILES - 1
        for t in (2, FILES - 1):
            state = {row.word: (row.n, row.total) for row in job.read("totals", as_of=t).collect()}
            assert state == totals_of(tmp_path / "all", t + 1)
        assert sorted(p.name for p in (tmp_path / "out").glob("epoch=*")) == [f"epoch={t}" for t in range(3, FILES)]
        with pytest.raises(nosync.FlowError, match="new checkpoint"):
            job.stream({"words": read_stream(spark, tmp_path / "in")}, checkpoint=tmp_path / "other")
        with pytest.raises(
            nosync.InvalidInputError, match="cannot look for nowhere://there/cp: No FileSystem for scheme"
        ):
            job.stream({"words": read_stream(spark, tmp_path / "in")}, checkpoint="nowhere://there/cp")
    with open_store("empty") as store, pytest.raises(nosync.InvalidInputError, match="not a streaming one"):
        make_job(store, spark).stream({"words": spark.createDataFrame([("a", 1)], SCHEMA)}, checkpoint=tmp_path / "x")


@pytest.mark.long
def test_the_history_first_and_then_the_stream(spark: SparkSession, open_store: OpenStore, tmp_path: Path) -> None:
    write_input(tmp_path / "all")
    for name in ("history", "in", "more"):
        (tmp_path / name).mkdir()
    for i, path in enumerate(sorted((tmp_path / "all").iterdir())):
        os.link(path, tmp_path / ("history" if i < 3 else "in" if i < 6 else "more") / path.name)
    with open_store() as store:
        job = make_job(store, spark)
        history = spark.read.schema(SCHEMA).json(str(tmp_path / "history")).select("*", "_metadata.file_name")
        report = job.backfill({"words": history}, epoch="CAST(left(file_name, 4) AS INT) + 10")
        assert (report.first, report.last) == (10, 12)
        with pytest.raises(nosync.FlowError, match=r"store is at epoch 12, but .* would be epoch 0: .* first=13"):
            run_stream(job, spark, tmp_path)
        run_stream(job, spark, tmp_path, first=13)
        assert store.last_sealed() == 15
    for path in (tmp_path / "more").iterdir():
        os.link(path, tmp_path / "in" / path.name)
    with open_store() as store:
        job = make_job(store, spark)
        for wrong in (0, 16):  # 16: a batch whose commit Spark did not come to would be an epoch twice
            with pytest.raises(nosync.FlowError, match=f"streamed with first=13, and now with first={wrong}"):
                run_stream(job, spark, tmp_path, first=wrong)
        branch = job.branch("same", at=14)
        branch.replay()
        job.promote(branch)
        run_stream(job, spark, tmp_path, first=13)
        state = {row.word: (row.n, row.total) for row in job.read("totals").collect()}
        assert (store.last_sealed(), state) == (17, totals_of(tmp_path / "all"))
        assert replay([row.asDict() for row in job.changes("totals", 9, 17).collect()]) == state
        assert branch.explain("totals", {"word": "a"}, 12).inputs["words"].num_rows, "it is the main timeline's by now"


@pytest.mark.long
def test_batches_of_epochs_that_came_otherwise(spark: SparkSession, open_store: OpenStore, tmp_path: Path) -> None:
    write_input(tmp_path / "mine" / "in", 3)
    write_input(tmp_path / "other" / "in", 1)
    with open_store("its store") as store:
        run_stream(make_job(store, spark), spark, tmp_path / "other")
    os.link(tmp_path / "mine" / "in" / "0001.json", tmp_path / "other" / "in" / "0001.json")
    with open_store() as store:
        job = make_job(store, spark)
        run_stream(job, spark, tmp_path / "mine", first=4)
        with pytest.raises(nosync.FlowError, match="batch 1 of the stream would be epoch 5, and the store is at 6"):
            run_stream(job, spark, tmp_path / "other", first=4)
        more = spark.createDataFrame([("a", 1)], SCHEMA)
        job.advance(7, {"words": more})
        os.link(tmp_path / "mine" / "in" / "0001.json", tmp_path / "mine" / "in" / "0003.json")
        with pytest.raises(
            nosync.FlowError, match=r"epoch 7 of the store was not streamed, and .* has batches .* first=8"
        ):
            run_stream(job, spark, tmp_path / "mine", first=4)
        assert job.last_sealed() == 7


def test_two_sources_in_one_stream(spark: SparkSession, open_store: OpenStore, tmp_path: Path) -> None:
    write_input(tmp_path / "one", 2)
    write_input(tmp_path / "two", 3)
    flow = nosync.Dataflow("pair")
    for name in ("one", "two"):
        flow.source(name, SCHEMA).aggregate(f"n_{name}", key=["word"], n=nosync.count(), total=nosync.sum("n"))
    with open_store() as store:
        job = nosync.Job(flow, store, spark=spark, shards=2)
        frames = {name: read_stream(spark, tmp_path / name) for name in ("one", "two")}
        query = job.stream(frames, checkpoint=tmp_path / "cp", trigger={"availableNow": True})
        assert query.awaitTermination(240)
        for name in ("one", "two"):
            state = {row.word: (row.n, row.total) for row in job.read(f"n_{name}").collect()}
            assert state == totals_of(tmp_path / name)


DRIVER = """
import sys
import time
from pathlib import Path
import nosync
from nosync.spark.session import local_session
from tests.job.test_streams import make_job, run_stream
root = Path(sys.argv[1])
spark = local_session(2)
with nosync.open(root / "store") as store:
    print("started", flush=True)
    sinks = {"totals": nosync.ParquetSink(root / "out")}
    job = make_job(store, spark, sinks)
    advance = job._epochs.advance
    def announce(t, *rest):
        print("epoch", t, flush=True)
        return advance(t, *rest)
    job._epochs.advance = announce
    run_stream(job, spark, root)
print("done", flush=True)
"""


@pytest.mark.long("make kills")
@pytest.mark.timeout(3600)
def test_killing_the_driver_changes_no_output(spark: SparkSession, open_store: OpenStore, tmp_path: Path) -> None:
    files = max(FILES, 7 * KILLS)  # more than are done between two kills
    write_input(tmp_path / "in", files)
    seed = random.randrange(10**9)
    print(f"seed {seed}")
    choose = random.Random(seed)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    kills = 0
    while True:
        driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(tmp_path)],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment, start_new_session=True,
        )  # fmt: skip
        assert driver.stdout is not None
        epochs_until_kill = choose.randrange(1, 4) if kills < KILLS else files + 2
        said = []
        for line in driver.stdout:
            said.append(line.strip())
            if sum(word.startswith("epoch") for word in said) >= epochs_until_kill:
                import threading

                threading.Event().wait(choose.random())  # at any moment of the epoch
                break
        if "done" in said:
            driver.wait()
            break
        os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
        kills += 1
    assert kills >= KILLS
    with open_store() as store:
        job = make_job(store, spark)
        # A kill between the logs of Spark and of its file source makes one batch of two files.
        assert files - kills <= store.last_sealed() + 1 <= files
        state = {row.word: (row.n, row.total) for row in job.read("totals").collect()}
    assert state == totals_of(tmp_path / "in", files)
    output = spark.read.parquet(*(str(p) for p in (tmp_path / "out").glob("epoch=*"))).collect()
    assert replay([row.asDict() for row in output]) == state, "each epoch is in the output exactly once"


# --- sinks and their guarantees ------------------------------------------------------------------------------------


class Delivered:
    """A function that records what it is given, and can die before or after it has done so."""

    def __init__(self) -> None:
        self.epochs: list[int] = []
        self.rows: list[list[Any]] = []
        self.die = ""

    def __call__(self, changes: DataFrame, t: int) -> None:
        if self.die == "before":
            raise RuntimeError("died before it had written")
        self.rows.append(sorted(map(repr, changes.collect())))
        self.epochs.append(t)
        if self.die == "after":
            raise RuntimeError("died after it had written")


def _epochs(spark: SparkSession, count: int) -> list[DataFrame]:
    return [spark.createDataFrame(pa.table({"word": ["a", "b"], "n": [t, 2 * t]})) for t in range(count)]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("guarantee", "die", "expected"),
    [
        ("at_least_once", "before", [0, 1, 2]),
        ("at_least_once", "after", [0, 1, 1, 2]),
        ("gap", "before", [0, 2]),
        ("gap", "after", [0, 1, 2]),
    ],
)
def test_guarantees_of_a_callback(
    spark: SparkSession, open_store: OpenStore, guarantee: str, die: str, expected: list[int]
) -> None:
    store, delivered = open_store(), Delivered()
    job = make_job(store, spark, {"totals": nosync.CallbackSink(delivered, guarantee)})
    frames = _epochs(spark, 3)
    job.advance(0, {"words": frames[0]})
    delivered.die = die
    with pytest.raises(RuntimeError, match="died"):
        job.advance(1, {"words": frames[1]})
    delivered.die = ""
    job.advance(1, {"words": frames[1]})
    job.advance(2, {"words": frames[2]})
    job.advance(2, {"words": frames[2]})
    assert delivered.epochs == expected
    if delivered.epochs.count(1) == 2:
        assert delivered.rows[1] == delivered.rows[2], "repeats are identical"


def test_the_parquet_sink_is_precise(spark: SparkSession, open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store()
    job = make_job(store, spark, {"totals": nosync.ParquetSink(tmp_path / "out")})
    frames = _epochs(spark, 2)
    job.advance(0, {"words": frames[0]})
    (tmp_path / "out" / ".staged-1").mkdir()  # an attempt that died while it wrote
    job.advance(1, {"words": frames[1]})
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*.parquet")}
    job.advance(1, {"words": frames[1]})
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*.parquet")} == before
    assert sorted(p.name for p in (tmp_path / "out").glob("epoch=*")) == ["epoch=0", "epoch=1"]
    rows = [row.asDict() for row in spark.read.parquet(str(tmp_path / "out")).collect()]
    assert replay(rows) == {"a": (2, 1), "b": (2, 2)}


def test_sinks_that_cannot_be(spark: SparkSession, open_store: OpenStore) -> None:
    with pytest.raises(nosync.InvalidInputError, match="idempotent by t"):
        nosync.CallbackSink(lambda changes, t: None, "precise")
    with pytest.raises(nosync.UnknownStageError, match="'nope'"):
        make_job(open_store(), spark, {"nope": nosync.ParquetSink("x")})


def test_a_checkpoint_without_its_store_is_refused(spark: SparkSession, open_store: OpenStore, tmp_path: Path) -> None:
    """Or the rows of its batches would be in no store."""
    write_input(tmp_path / "in", files=2)
    run_stream(make_job(open_store(), spark), spark, tmp_path)
    with pytest.raises(nosync.FlowError, match="has no epoch yet, and .* has batches"):
        run_stream(make_job(open_store("another"), spark), spark, tmp_path)


@pytest.mark.long
def test_a_new_checkpoint_whose_first_batch_died_goes_on(
    spark: SparkSession, open_store: OpenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_input(tmp_path / "in", files=2)
    store = open_store()
    job = make_job(store, spark)
    run_stream(job, spark, tmp_path)
    job.rewind(0)

    finish = EpochRuns.finish

    def dies_before(*_: object, **__: object) -> None:
        raise OSError("killed")

    def dies_after(*given: Any, **more: Any) -> None:
        finish(*given, **more)
        raise OSError("killed")

    again = {"checkpoint": tmp_path / "cp2", "first": 1}
    for dies in (dies_before, dies_after):  # the epoch is not sealed; it is, and its batch is not committed
        with monkeypatch.context() as patch:
            patch.setattr(EpochRuns, "finish", dies)
            with pytest.raises(StreamingQueryException):
                run_stream(make_job(store, spark), spark, tmp_path, **again)
    run_stream(make_job(store, spark), spark, tmp_path, **again)
    assert store.last_sealed() == 2
    assert sum(row["n"] for row in store.read("totals").to_pylist()) == 3 * 40, "epoch 0, and both files again"


def test_sources_of_any_name_are_streamed_together(spark: SparkSession, open_store: OpenStore, tmp_path: Path) -> None:
    write_input(tmp_path / "in", files=1)
    flow = nosync.Dataflow("f")
    one, other = flow.source("_source", SCHEMA), flow.source("other", SCHEMA)
    one.union("both", other).aggregate("totals", key=["word"], n=nosync.count())
    store = open_store()
    rows = {name: read_stream(spark, tmp_path / "in") for name in ("_source", "other")}
    job = nosync.Job(flow, store, spark=spark, shards=2)
    query = job.stream(rows, checkpoint=tmp_path / "cp", trigger={"availableNow": True})
    assert query.awaitTermination(240)
    assert sum(row["n"] for row in store.read("totals").to_pylist()) == 80


def test_a_stream_does_not_go_on_over_a_store_that_was_rewound(
    spark: SparkSession, open_store: OpenStore, tmp_path: Path
) -> None:
    """Spark would give it none of the rows again that were taken back."""
    write_input(tmp_path / "in", 3)
    with open_store() as store:
        job = make_job(store, spark)
        run_stream(job, spark, tmp_path)
        job.rewind(0)
        with pytest.raises(nosync.FlowError, match="has batches up to 2, which is epoch 2, and the store is at 0"):
            run_stream(job, spark, tmp_path)
        job.rewind(0)
        assert store.last_sealed() == 0


def test_several_queries_fill_a_job_by_turns_and_none_of_their_batches_twice(
    spark: SparkSession, open_store: OpenStore, tmp_path: Path
) -> None:
    flow = nosync.Dataflow("two")
    flow.source("words", SCHEMA).aggregate("totals", key=["word"], n=nosync.count(), total=nosync.sum("n"))
    flow.source("people", "name string").aggregate("names", key=[], n=nosync.count())
    store = open_store(retain=100)
    job = nosync.Job(flow, store, spark=spark, shards=2)

    def words(*rows: tuple[str, int]) -> dict[str, DataFrame]:
        return {"words": spark.createDataFrame(list(rows), SCHEMA)}

    people = {"people": spark.createDataFrame([("ann",), ("bob",)], "name string")}
    first = job.advance_batch("w", 0, words(("a", 1)))
    assert first is not None
    assert first.t == 0
    assert job.advance_batch("p", 0, people) is not None
    assert job.advance_batch("w", 0, words(("a", 1))) is None, "Spark gives it again after a failure"
    job.advance(2, {**words(("b", 5)), "people": people["people"].limit(0)})  # what comes otherwise forgets no query
    assert job.advance_batch("p", 0, people) is None
    assert job.advance_batch("w", 4, words(("a", 2))) is not None, "batches without rows may be left out"
    assert totals(job) == {"a": (2, 3), "b": (1, 5)}
    assert [tuple(row) for row in job.read("names").collect()] == [(2,)]

    branch = job.branch("more", at=1, add=lambda f: f["words"].aggregate("count", key=[], n=nosync.count()))
    branch.replay()
    assert branch.advance_batch("w", 4, words(("a", 2))) is None, "a branch has the batches that it replayed"
    job.rewind(1)
    again = job.advance_batch("w", 4, words(("a", 9)))
    assert again is not None
    assert again.t == 2
    assert totals(job) == {"a": (2, 10)}
    store.close()
    job = nosync.Job(flow, open_store(), spark=spark, shards=2)
    assert job.advance_batch("w", 4, words(("a", 9))) is None, "the store says it, not the job"
    for query, batch, said in [("", 0, "query is ''"), ("w", -1, "batch is -1"), ("w", True, "batch is True")]:
        with pytest.raises(nosync.InvalidInputError, match=said):
            job.advance_batch(query, batch, people)
    with pytest.raises(nosync.InvalidInputError, match="'poeple' is not a source"):
        job.advance_batch("p", 1, {"poeple": people["people"]})


def totals(job: nosync.Job) -> dict[str, tuple[int, int]]:
    return {row["word"]: (row["n"], row["total"]) for row in job.read("totals").collect()}


def test_a_stream_that_is_stopped_in_a_batch_ends_quietly_and_goes_on(
    spark: SparkSession, open_store: OpenStore, tmp_path: Path
) -> None:
    write_input(tmp_path / "in", 2)
    started, go_on = tmp_path / "started", tmp_path / "go on"

    def wait(rows: pa.Table) -> pa.Table:
        started.touch()
        end = time.monotonic() + 60
        while not go_on.exists() and time.monotonic() < end:
            time.sleep(0.05)
        return rows

    flow = nosync.Dataflow("stream")
    words = flow.source("words", SCHEMA).map("waited", wait, schema=SCHEMA)
    words.aggregate("totals", key=["word"], n=nosync.count(), total=nosync.sum("n"))
    job = nosync.Job(flow, open_store(), spark=spark, shards=2)
    options: dict[str, Any] = {"checkpoint": tmp_path / "cp", "trigger": {"availableNow": True}}
    query = job.stream({"words": read_stream(spark, tmp_path / "in")}, **options)
    eventually("a batch runs", started.exists)
    with pytest.raises(nosync.FlowError, match=r"already active in this SparkSession: stop\(\) it first"):
        job.stream({"words": read_stream(spark, tmp_path / "in")}, **options)
    jvm: Any = spark._jvm
    before, printed = jvm.System.err, jvm.java.io.ByteArrayOutputStream()
    jvm.System.setErr(jvm.java.io.PrintStream(printed))
    try:
        query.stop()
    finally:
        jvm.System.setErr(before)
        go_on.touch()
    assert (query.isActive, query.exception(), printed.toString()) == (False, None, "")
    run_stream(job, spark, tmp_path)
    assert {r["word"]: (r["n"], r["total"]) for r in job.read("totals").collect()} == totals_of(tmp_path / "in", 2)
