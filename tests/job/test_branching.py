"""Branches: other code from a fork on, against a fresh run of the changed flow; rewinding, promoting, comparing,
deleting.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import nosync
from tests.conftest import OpenStore
from tests.helpers.branched import EPOCHS, FORK, SCHEMA, either, even, make_flow, rows, state

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

STAGES = ("sums", "how_big", "untouched")


def test_a_branch_is_what_a_run_with_the_other_code_would_be(spark: SparkSession, open_store: OpenStore) -> None:
    store, fresh_store = open_store(), open_store("fresh")
    job = nosync.Job(make_flow(), store, spark=spark, shards=2)
    fresh = nosync.Job(make_flow(either), fresh_store, spark=spark, shards=2)
    for t in range(EPOCHS):
        job.advance(t, rows(spark, t))
        fresh.advance(t, rows(spark, t))
    mains = {stage: state(job, stage, EPOCHS - 1) for stage in STAGES}
    files = {layer.path for layer in store.layers()}

    what_if = job.branch("what-if", at=FORK, replace={"kept": even})
    assert {layer.path for layer in store.layers()} == files, "making a branch writes no layer"
    plan = what_if.plan_replay()
    assert (plan.first, plan.last) == (FORK + 1, EPOCHS - 1)
    assert set(plan.computed) == {"kept", "sums", "how_big"}
    assert set(plan.shared) == {"rows", "untouched"}
    steps: list[tuple[int, int]] = []
    first = what_if.replay(FORK + 1)
    rest = what_if.replay(progress=lambda done, of: steps.append((done, of)))
    assert steps == [(i + 1, EPOCHS - FORK - 2) for i in range(EPOCHS - FORK - 2)]
    assert first.layers_computed + rest.layers_computed == 3 * 2 * (EPOCHS - FORK - 1), "changed stages only"
    for stage in STAGES:
        for t in (FORK, EPOCHS - 1):
            assert state(what_if, stage, t) == state(fresh, stage, t)
    assert {stage: state(job, stage, EPOCHS - 1) for stage in STAGES} == mains, "nothing of the parent changed"
    assert sorted(map(tuple, what_if.read("sums", as_of=FORK + 1).collect())) == state(fresh, "sums", FORK + 1)
    new = [layer for layer in store.layers() if layer.path not in files]
    assert {layer.stage for layer in new} == {"kept", "sums", "how_big"}, (
        "the shared stages have no files of the branch"
    )

    # Both go on, each with rows of its own; the store reads either.
    job.advance(EPOCHS, rows(spark, EPOCHS))
    what_if.advance(EPOCHS, rows(spark, EPOCHS, salt=5))
    fresh.advance(EPOCHS, rows(spark, EPOCHS, salt=5))
    for stage in STAGES:
        assert state(what_if, stage, EPOCHS) == state(fresh, stage, EPOCHS)
    assert store.read("sums", branch="what-if").num_rows == len(state(what_if, "sums", EPOCHS))
    assert store.read("untouched").num_rows == len(state(job, "untouched", EPOCHS))
    with pytest.raises(nosync.FlowError, match="inputs of its own"):
        what_if.plan_replay()

    # Merged, closed and opened again, it is the same; what is lost of it is recomputed with its own code.
    store.compact()
    store.close()
    store = open_store()
    job = nosync.Job(make_flow(), store, spark=spark, shards=2)
    what_if = job.branch("what-if", at=FORK, replace={"kept": even})
    mine = what_if.flow_at(EPOCHS - 1).stages["sums"].fingerprint
    victims = [layer for layer in store.layers() if layer.fingerprint == mine]
    for layer in victims:
        Path(layer.path).unlink()
    report = what_if.recover()
    assert (report.lost, report.recomputed) == (2 * (EPOCHS - FORK - 1), 2 * (EPOCHS - FORK - 1))
    for stage in STAGES:
        assert state(what_if, stage, EPOCHS) == state(fresh, stage, EPOCHS)
    with pytest.raises(nosync.FlowError, match="stage kept was recorded with fingerprint"):
        nosync.Job(make_flow(), store, spark=spark, shards=2, branch="what-if")


@pytest.mark.long
def test_comparing_branches(spark: SparkSession, open_store: OpenStore) -> None:
    store = open_store()
    job = nosync.Job(make_flow(), store, spark=spark, shards=2)
    for t in range(EPOCHS):
        job.advance(t, rows(spark, t))
    what_if = job.branch("what-if", at=1, replace={"kept": even})
    what_if.replay()
    left, right = ({r[0]: tuple(r[1:]) for r in state(j, "sums", EPOCHS - 1)} for j in (job, what_if))
    found = {r.word: r for r in nosync.diff(job, what_if, "sums").collect()}
    assert found.keys() == {k for k in left.keys() | right.keys() if left.get(k) != right.get(k)}
    for word, row in found.items():
        assert (row.n_a, row.total_a) == left.get(word, (None, None))
        assert (row.n_b, row.total_b) == right.get(word, (None, None))
        assert row._diff == ("only_a" if word not in right else "only_b" if word not in left else "changed")
    summary = nosync.diff_summary(job, what_if, "sums")
    assert summary.columns["total"].total_a == sum(v[1] for v in left.values())
    assert summary.columns["total"].total_b == sum(v[1] for v in right.values())
    assert summary.changed + summary.only_a + summary.only_b == len(found)
    assert nosync.diff(job, what_if, "untouched").isEmpty()
    assert nosync.diverges_at(job, what_if, "untouched") is None
    assert nosync.diverges_at(job, what_if, "sums") == 2
    only = nosync.diff_changes(job, what_if, "kept", 1, 2).collect()
    assert {r._side for r in only} == {"a", "b"}
    assert job.shared_until(what_if, "sums") == 1
    # Code that comes to the same thing makes other files, but no difference.
    same = job.branch("same", at=1, replace={"kept": lambda t: t.filter(pc.greater(t["n"], 0))})
    same.replay()
    assert nosync.diverges_at(job, same, "sums") is None


@pytest.mark.few(1)
def test_rewinding_and_promoting(spark: SparkSession, open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store()
    withdrawn: list[int] = []
    delivered: list[int] = []
    sinks = {
        "sums": nosync.ParquetSink(tmp_path / "out"),
        "how_big": nosync.CallbackSink(lambda _, t: delivered.append(t), on_withdraw=withdrawn.append),
    }
    job = nosync.Job(make_flow(), store, spark=spark, shards=2, sinks=sinks)
    for t in range(4):
        job.advance(t, rows(spark, t))
    future = state(job, "sums", 3)
    kept = job.rewind(1)
    assert kept == "before-rewind-1"
    assert (job.last_sealed(), withdrawn) == (1, [1])
    assert sorted(p.name for p in (tmp_path / "out").glob("epoch=*")) == ["epoch=0", "epoch=1"]
    for t in (2, 3):
        with pytest.raises(nosync.NotAvailableError, match="branch main is sealed up to 1"):
            store.read("sums", as_of=t)
    job.advance(2, rows(spark, 2, salt=3))
    other = nosync.Job(make_flow(), store, spark=spark, shards=2, branch=kept)
    assert state(other, "sums", 3) == future, "the abandoned future is a branch"
    assert state(job, "sums", 2) != state(other, "sums", 2)
    store.compact("sums")
    assert state(other, "sums", 3) == future
    assert delivered == [0, 1, 2, 3, 2]

    fix = job.branch("fix", at=1, replace={"kept": even})
    with pytest.raises(nosync.FlowError, match=r"replay\(\) it first"):
        job.promote(fix)
    fix.replay()
    fixed = state(fix, "sums", 2)
    job.promote(fix, keep_as="before-fix")
    assert state(job, "sums", 2) == fixed
    assert sorted(p.name for p in (tmp_path / "out").glob("epoch=*")) == ["epoch=0", "epoch=1", "epoch=2"]
    assert withdrawn == [1, 1]
    job.advance(3, rows(spark, 3))
    assert set(store.branches()) == {"main", kept, "before-fix"}

    # Deleting takes what nothing else lists, and no more.
    current, layers = state(job, "sums", 3), len(store.layers())
    assert store.delete_branch("before-fix") > 0
    assert store.delete_branch(kept) > 0
    store.node.collect_garbage()
    assert len(store.layers()) < layers
    assert state(job, "sums", 3) == current
    store.close()
    store = open_store()
    job = nosync.Job(make_flow(even), store, spark=spark, shards=2)
    assert state(job, "sums", 3) == current
    assert job.recover().lost == 0
    with pytest.raises(nosync.InvalidInputError, match="no branch 'fix'; branches: main"):
        nosync.Job(make_flow(), store, spark=spark, branch="fix")


def test_a_replay_does_not_make_up_an_input_that_is_lost(spark: SparkSession, open_store: OpenStore) -> None:
    store = open_store(settings=nosync.StoreSettings(background=False))
    job = nosync.Job(make_flow(), store, spark=spark, shards=2)
    for t in range(3):
        job.advance(t, rows(spark, t))
    branch = job.branch("fix", at=0, replace={"kept": even})
    store.sync()
    (victim,) = [Path(x.path) for x in store.layers() if (x.stage, x.shard, x.lower) == ("rows", 1, 1)]
    victim.unlink()
    with pytest.raises(nosync.HoleError, match="the recorded input is lost, and it is not given again"):
        branch.replay()
    assert branch.last_sealed() == 0
    assert not victim.exists(), "nothing was recorded in its place"
    job.recover(lambda t: rows(spark, t))
    branch.replay()
    assert branch.last_sealed() == 2


def test_branches_that_cannot_be(spark: SparkSession, open_store: OpenStore) -> None:
    store = open_store()
    job = nosync.Job(make_flow(), store, spark=spark, shards=2)
    for t in range(2):
        job.advance(t, rows(spark, t))
    job.branch("taken", at=0, replace={"kept": even})
    refused: list[tuple[dict[str, Any], str]] = [
        ({"at": 7}, "epoch 7 was not run yet"),
        ({"replace": {"keptt": even}}, "no stage 'keptt'"),
        ({"replace": {"kept": 3}}, "a map cannot be replaced by 3"),
        ({"replace": {"kept": lambda t: t.select(["n"])}}, "stage sums: key column 'word' is not in its input kept"),
        ({"replace": {"sums": {"most": nosync.max("n")}}}, "stage big: column 'total' is not in its input sums"),
        ({"drop": ["sums"]}, "stage sums cannot be dropped: big is built on it"),
        ({"add": lambda flow: flow.source("more", SCHEMA)}, "source more is new"),
    ]
    for options, message in refused:
        with pytest.raises(nosync.NosyncError, match=message):
            job.branch("x", **{"at": 0, **options})
    with pytest.raises(nosync.InvalidInputError, match="branch 'taken' exists already"):
        job.branch("taken", at=1)
    with pytest.raises(nosync.SchemaError, match="stage untouched cannot go on from its parent's state"):
        job.branch("y", at=0, replace={"untouched": {"m": nosync.max("n")}})
    with pytest.raises(nosync.FlowError, match="branch\\(\\) first"):
        job.plan_replay()
    with pytest.raises(nosync.NotAvailableError, match="inputs are recorded up to 1"):
        job.branch("taken", at=0, replace={"kept": even}).replay(5)
    assert set(store.branches()) == {"main", "taken"}

    more = job.branch("more", at=0, add=lambda f: f["kept"].aggregate("added", key=["n"], words=nosync.count()))
    more.replay()
    with pytest.raises(nosync.UnknownStageError, match="branch main has no stage added"):
        store.read("added")
    assert sum(r.words for r in more.read("added").collect()) == job.read("kept").count() - job.read("kept", 0).count()


def test_a_branch_may_add_columns(spark: SparkSession, open_store: OpenStore) -> None:
    """A key that was there before has null in them until something comes; wherever the new column stands."""
    flow = nosync.Dataflow("f")
    flow.source("rows", SCHEMA).aggregate("sums", key=["word"], n=nosync.count())
    store = open_store()
    job = nosync.Job(flow, store, spark=spark, shards=2)
    epochs: list[list[tuple[str, int]]] = [[("a", 1), ("b", 2)], [("a", 5)], [], [("b", 7), ("c", 1)]]
    for t, of_epoch in enumerate(epochs):
        job.advance(t, {"rows": spark.createDataFrame(of_epoch, SCHEMA)})
    branch = job.branch("wider", at=0, replace={"sums": {"most": nosync.max("n"), "n": nosync.count()}})
    assert sorted(map(tuple, branch.read("sums", 0).collect())) == [("a", None, 1), ("b", None, 1)]
    branch.replay()
    expected = [("a", 5, 2), ("b", 7, 2), ("c", 1, 1)]
    assert sorted(map(tuple, branch.read("sums").collect())) == expected
    feed = [tuple(row)[1:5] for row in branch.changes("sums", 0, 3).orderBy("_epoch", "word", "_change_type").collect()]
    assert (None, 1, "update_preimage", 1) in feed
    store.sync()
    store.compact()
    assert sorted(map(tuple, branch.read("sums").collect())) == expected


def test_rows_that_are_taken_back_and_never_came(spark: SparkSession, open_store: OpenStore) -> None:
    """A function that says so of rows that it never gave: neither a count below zero nor a stack trace comes of it."""
    flow = nosync.Dataflow("f")
    rows = flow.source("rows", "k string, how string")
    said = rows.update("said", key=["k"], state="how string", fn=lambda new, old: new.select(["k", "how"]))
    wrong = said.map("wrong", lambda t: t.set_column(2, "_change_type", pa.array(["delete"] * t.num_rows, pa.string())))
    wrong.aggregate("counts", key=["how"], n=nosync.count())
    job = nosync.Job(flow, open_store(), spark=spark, shards=1)
    with pytest.raises(
        nosync.StageError, match="stage counts shard 0of1 timestamp 0: a row .* is taken back that never came"
    ):
        job.advance(0, {"rows": spark.createDataFrame([("a", "x")], "k string, how string")})


@pytest.mark.long
def test_a_promoted_branch_of_a_branch(spark: SparkSession, open_store: OpenStore, tmp_path: Path) -> None:
    """Sinks get all epochs that are others than before; also where the job dies in the middle of it."""
    out = nosync.ParquetSink(tmp_path / "out")
    store = open_store()
    job = nosync.Job(make_flow(), store, spark=spark, shards=2, sinks={"sums": out})
    for t in range(5):
        job.advance(t, rows(spark, t))
    first = job.branch("first", at=1, replace={"kept": even})
    first.replay()
    second = first.branch("second", at=3)
    second.replay()
    delivered: list[int] = []

    def dies(_: DataFrame, t: int) -> None:
        delivered.append(t)
        if t == 3:
            raise RuntimeError("the end")

    job._sinks["how_big"] = nosync.CallbackSink(dies)
    for t in range(5):
        job._delivery.marks("how_big").mark(t)
    with pytest.raises(RuntimeError, match="the end"):
        job.promote(second)
    assert delivered == [2, 3], "those from the first fork on are others"
    delivered.clear()
    again = nosync.CallbackSink(lambda _, t: delivered.append(t))
    job = nosync.Job(make_flow(even), store, spark=spark, shards=2, sinks={"sums": out, "how_big": again})
    assert delivered == [3, 4], "where it ended"
    job = nosync.Job(make_flow(even), store, spark=spark, shards=2, sinks={"sums": out, "how_big": again})
    assert delivered == [3, 4], "and once"
    given = spark.read.parquet(str(tmp_path / "out")).drop("epoch").toArrow()
    expected = store.changes("sums", -1, 4)
    columns = ["_epoch", "word", "_change_type"]
    order = [(column, "ascending") for column in columns]
    assert given.select(expected.column_names).sort_by(order).to_pylist() == expected.sort_by(order).to_pylist()


def test_a_sink_that_does_not_say_what_it_has_is_given_a_promoted_branchs_epochs(
    spark: SparkSession, open_store: OpenStore
) -> None:
    class Plain:
        def __init__(self) -> None:
            self.did: list[tuple[str, int]] = []

        def deliver(self, changes: Callable[[], DataFrame], t: int, marks: object) -> None:
            self.did.append(("given", t))

        def withdraw(self, after: int, marks: object) -> None:
            self.did.append(("withdrawn after", after))

    sink = Plain()
    job = nosync.Job(make_flow(), open_store(), spark=spark, shards=2, sinks={"sums": sink})
    for t in range(4):
        job.advance(t, rows(spark, t))
    branch = job.branch("fixed", at=1, replace={"kept": even})
    branch.replay()
    sink.did.clear()
    job.promote(branch)
    assert [t for what, t in sink.did if what == "given"][:2] == [2, 3]
    assert ("withdrawn after", 1) in sink.did[: sink.did.index(("given", 2))]


@pytest.mark.long
def test_a_branch_keeps_its_part_of_the_parents_history(spark: SparkSession, open_store: OpenStore) -> None:
    """With retain=0 everything before the newest epoch may be merged away, but not what a branch begins at."""
    store = open_store(settings=nosync.StoreSettings(retain=0, background=False))
    job = nosync.Job(make_flow(), store, spark=spark, shards=2)
    for t in range(2):
        job.advance(t, rows(spark, t))
    branch = job.branch("kept", at=1)
    before = {stage: state(job, stage, 1) for stage in STAGES}
    for t in range(2, 6):
        job.advance(t, rows(spark, t))
    store.sync()
    assert store.compact() > 0
    assert {stage: state(branch, stage, 1) for stage in STAGES} == before
    branch.replay(2)
    with pytest.raises(nosync.CompactedError):
        state(job, "sums", 0)
    store.delete_branch("kept")
    store.compact()
    with pytest.raises(nosync.CompactedError):
        state(job, "sums", 1)


def sums_by(*columns: str) -> nosync.Dataflow:
    """Sums by each column; the first one says where the source's rows go."""
    flow = nosync.Dataflow("sums")
    source = flow.source("rows", "a bigint, b bigint, v bigint")
    for column in columns:
        source.aggregate(f"by_{column}", key=[column], total=nosync.sum("v"))
    return flow


def sums_slowly(column: str, epochs: int) -> list[tuple[int, int]]:
    totals: dict[int, int] = {}
    for t in range(epochs):
        for i in range(60):
            key = {"a": i % 7, "b": i % 5}[column]
            totals[key] = totals.get(key, 0) + i + t
    return sorted(totals.items())


def test_what_was_placed_by_one_key_can_be_asked_for_by_another(spark: SparkSession, open_store: OpenStore) -> None:
    """Where a source's rows are is what it was when they were recorded, whatever a later flow does with them."""

    def epoch(t: int) -> dict[str, DataFrame]:
        columns = ["i % 7 AS a", "i % 5 AS b", f"i + {t} AS v"]
        return {"rows": spark.range(60).withColumnRenamed("id", "i").selectExpr(*columns)}

    store = open_store(settings=nosync.StoreSettings(background=False))
    job = nosync.Job(sums_by("a", "b"), store, spark=spark, shards=2)
    for t in range(3):
        job.advance(t, epoch(t))
    store.sync()
    branch = job.branch(
        "by-b", at=0, drop=["by_a"], add=lambda flow: flow["rows"].aggregate("most", key=["b"], v=nosync.max("v"))
    )
    branch.replay()
    assert state(branch, "by_b", 2) == sums_slowly("b", 3)
    assert state(branch, "most", 2) == [(b, 55 + b + 2) for b in range(5)]

    again = nosync.Job(sums_by("b", "a"), store, spark=spark, shards=2)  # the same stages, in another order
    for lost in [x for x in store.layers() if x.stage in ("by_a", "by_b") and x.lower == 1]:
        Path(lost.path).unlink()
    assert again.recover().recomputed == 4, "both stages, both shards"
    again.advance(3, epoch(3))
    for column in ("a", "b"):
        assert state(again, f"by_{column}", 3) == sums_slowly(column, 4)
    for lost in [x for x in store.layers() if x.stage == "rows"]:
        Path(lost.path).unlink()
    assert again.recover(epoch).unrecoverable == {}, "each epoch's rows go where they went"


@pytest.mark.long
@pytest.mark.parametrize("to", [0, 1])
def test_main_rewound_to_before_a_promoted_branch(spark: SparkSession, open_store: OpenStore, to: int) -> None:
    """The code that recorded what is left goes on; the promoted one is refused, and told why."""
    store, got = open_store(), list[int]()
    sink = {"sums": nosync.CallbackSink(lambda _, t: got.append(t), on_withdraw=lambda t: got.append(-t))}
    job = nosync.Job(make_flow(), store, spark=spark, shards=2, sinks=sink)
    for t in range(4):
        job.advance(t, rows(spark, t))
    branch = job.branch("b", at=1, replace={"kept": even})
    branch.replay()
    job.promote(branch, keep_as="old")
    got.clear()
    with pytest.raises(nosync.FlowError, match=f"main was rewound to {to}, which other code"):
        job.rewind(to)
    assert store.last_sealed() == to
    with pytest.raises(nosync.FencedError):
        job.advance(to + 1, rows(spark, to + 1))
    job = nosync.Job(make_flow(), store, spark=spark, shards=2, sinks=sink)
    assert got == [-to], "what was given is withdrawn"
    job.advance(to + 1, rows(spark, to + 1))
    assert got == [-to, to + 1]
    with pytest.raises(nosync.FlowError):
        nosync.Job(make_flow(even), store, spark=spark, shards=2)


@pytest.mark.long
def test_maps_and_large_whole_numbers_are_compared(spark: SparkSession, open_store: OpenStore) -> None:
    """Spark compares no maps, and sums of such numbers overflow."""
    flow = nosync.Dataflow("f")
    kept = flow.source("rows", "k int, big bigint").map("kept", lambda t: t)
    kept.aggregate("sums", key=["k"], big=nosync.max("big"))
    kept.aggregate("totals", key=["k"], total=nosync.sum("big"))
    maps = kept.select("maps", "k", "map('a', big) AS m", persist="disk")
    maps.update("last", key=["k"], state="m map<string, bigint>", fn=lambda new, old: new.select(["k", "m"]))
    job = nosync.Job(flow, open_store(), spark=spark, shards=2)
    large = 9 * 10**18
    for t, of_epoch in enumerate(([(1, 1)], [(1, large), (2, large)])):
        job.advance(t, {"rows": spark.createDataFrame(of_epoch, "k int, big bigint")})
    branch = job.branch("b", at=0, replace={"kept": lambda t: t.filter(pc.not_equal(t["k"], 1))})
    branch.replay()
    summary = nosync.diff_summary(job, branch, "sums")
    big = summary.columns["big"]
    assert (summary.changed, big.total_a, big.total_b) == (1, None, None), "maxima cannot be added up"
    assert (big.median_a, big.median_b, big.largest_difference) == (large, (large + 1) / 2, 1.0 - large)
    assert "total" not in str(summary)
    totals = nosync.diff_summary(job, branch, "totals").columns["total"]
    assert (totals.total_a, totals.total_b, totals.median_a) == (2.0 * large + 1, large + 1.0, None)
    assert nosync.diverges_at(job, branch, "last") == 1
    (row,) = nosync.diff_changes(job, branch, "last", 0, 1).where("_change_type = 'update_postimage'").collect()
    assert (row.k, row.m, row._side) == (1, {"a": large}, "a")
    for compare in (nosync.diff, nosync.diff_summary):
        with pytest.raises(nosync.FlowError, match="stage maps has no key, and column 'm' is of maps"):
            compare(job, branch, "maps")
    assert nosync.diverges_at(job, branch, "maps") == 1
