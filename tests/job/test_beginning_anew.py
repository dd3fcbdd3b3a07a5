"""Stages that begin anew on a branch: with other code behind rows that change, from all rows that are there."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import nosync
from nosync.lsm.manifests.branches import ChangedStages
from nosync.lsm.node.node import Node
from tests.conftest import OpenStore
from tests.helpers.branched import EPOCHS, FORK, SCHEMA, either, even, make_flow, rows, state
from tests.helpers.oracles import weights

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def joined(flow: nosync.Dataflow) -> nosync.Stage:
    return flow["rows"].join("both", flow["sums"].select("other", "word", "total"), on=["word"])


def doubled(rows: pa.Table) -> pa.Table:
    return rows.set_column(rows.column_names.index("total"), "total", pc.multiply(rows["total"], 2))


def is_small(rows: pa.Table) -> pa.ChunkedArray:
    return pc.less(rows["total"], 12)


def is_large(rows: pa.Table) -> pa.ChunkedArray:
    return pc.greater(rows["total"], 8)


Change = dict[str, Any]
"""As `branch` takes it."""


def big_from_two(flow: nosync.Dataflow) -> object:
    return flow["sums"].where("big", "total > 2").aggregate("how_big", key=["n"], words=nosync.count())


def two_more(flow: nosync.Dataflow) -> object:
    flow["sums"].where("small", "total < 5")
    return flow["sums"].aggregate("new", key=["n"], words=nosync.count(), most=nosync.max("total"))


def several(flow: nosync.Dataflow) -> object:
    flow["big"].dedupe("firsts", key=["n"])
    return [two_more(flow), joined(flow)]  # of rows that change, and with a log


ANEW: dict[str, tuple[Change, list[str]]] = {
    "a where that is not recorded, one that is, what takes rows of a map that is not, and new stages": (
        {"replace": {"big": "total > 3", "large": "total > 3", "odd": is_large}, "add": several},
        ["how_big", "large", "odd", "firsts", "small", "new", "both"],
    ),
    "an aggregate, and what comes before": (
        {
            "replace": {
                "kept": either,
                "large": "total > 3",
                "how_big": {"words": nosync.count(), "most": nosync.max("total")},
            }
        },
        ["large", "how_big"],
    ),
    "stages under their own names": ({"drop": ["big", "how_big"], "add": big_from_two}, ["how_big"]),
}


@pytest.mark.long
@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[] if i == 1 else [pytest.mark.long]) for i, what in enumerate(ANEW)]
)
def test_what_follows_rows_that_change_begins_anew_from_all_that_is_there(
    spark: SparkSession, open_store: OpenStore, what: str
) -> None:
    """As a run of the changed flow has it that saw all epochs. Replayed, advanced, lost and recovered, promoted."""
    options, stages = ANEW[what]
    store, fresh = open_store(), open_store("fresh")
    flow = make_flow()
    flow["sums"].where("large", "total > 7")
    mapped = flow["sums"].select("named", "word", "total").map("mapped", doubled, persist="none")
    mapped.filter("odd", is_small)
    changed = flow.changed(options.get("replace"), options.get("add"), options.get("drop", ()))
    job = nosync.Job(flow, store, spark=spark, shards=2)
    oracle = nosync.Job(changed, fresh, spark=spark, shards=2)
    for t in range(EPOCHS):
        job.advance(t, rows(spark, t))
        oracle.advance(t, rows(spark, t))
    before = {name: rows_left(job, name, FORK) for name in stages if name in job.flow.stages}
    branch = job.branch("other", at=FORK, **options)
    branch.replay()
    own = job.branch("own", at=EPOCHS - 2, **options)  # the first epoch is given, and not replayed
    own.advance(EPOCHS - 1, rows(spark, EPOCHS - 1))
    for name in stages:
        for t in range(FORK + 1, EPOCHS):
            assert rows_left(branch, name, t) == rows_left(oracle, name, t), (name, t)
        if "kept" not in options.get("replace", {}):  # whose code changes at FORK, and where rows only come
            assert rows_left(own, name, EPOCHS - 1) == rows_left(oracle, name, EPOCHS - 1), name
        if name in before:
            columns = {*job.flow.stages[name].output.names, "_change_type"}  # of which there may be more on the branch
            assert rows_left(branch, name, FORK, columns) == before[name], "what came before the fork is the parent's"
    assert store.begun_anew("other") == dict.fromkeys(store.branches()["other"].anew, FORK + 1)
    assert store.begun_anew() == {}
    again = job.branch("other", at=FORK, **options)
    lost = lose(store, again, FORK + 1, stages)
    report = again.recover()
    assert (report.lost, report.recomputed) == (lost, lost)
    for name in stages:
        assert rows_left(again, name, EPOCHS - 1) == rows_left(oracle, name, EPOCHS - 1), name
    job.promote(again)
    job.advance(EPOCHS, rows(spark, EPOCHS))
    oracle.advance(EPOCHS, rows(spark, EPOCHS))
    assert FORK + 1 in store.begun_anew().values()
    for name in stages:
        assert rows_left(job, name, EPOCHS) == rows_left(oracle, name, EPOCHS), name
    later = nosync.Job(changed, store, spark=spark, shards=2)
    lost = lose(store, later, FORK + 1, stages)
    assert later.recover().recomputed == lost


def rows_left(job: nosync.Job, name: str, t: int, columns: set[str] | None = None) -> Counter[str]:
    """How often each row is there, without Spark. `columns`: those that count; None: all."""
    stage, branch = job.flow.stages[name], job.branch_name
    if stage.keyed:
        found = job._store.read(name, t, branch=branch)
    else:
        found = job._store.changes(name, -1, t, branch=branch).drop_columns(["_epoch"])
    return weights(found if columns is None else found.select([n for n in found.column_names if n in columns]))


def lose(store: nosync.Store, job: nosync.Job, t: int, stages: list[str]) -> int:
    """Removes the layers of an epoch. Returns how many."""
    store.sync()
    manifest = store.node.timelines.manifest(t, job.branch_name)
    assert manifest is not None
    ids = [entry.id for entry in manifest.entries if entry.id.trace.stage.partition("__")[0] in stages]
    for id in ids:
        store.directory.path_of(id).unlink()
        store.directory.forget(id)
    assert ids
    return len(ids)


def test_a_join_that_begins_anew_needs_all_rows_of_its_inputs(spark: SparkSession, open_store: OpenStore) -> None:
    flow = nosync.Dataflow("f")
    source = flow.source("rows", SCHEMA, at_safe_point="drop")
    source.aggregate("sums", key=["word"], total=nosync.sum("n"))
    job = nosync.Job(flow, open_store(), spark=spark, shards=2)
    job.advance(0, rows(spark, 0))
    with pytest.raises(
        nosync.FlowError, match="stage both begins anew on the branch, from all rows of source rows, which are"
    ):
        job.branch("more", at=0, add=joined)


@pytest.mark.long
def test_a_branch_that_leaves_its_parent_before_that_began_begins_what_its_parent_did(
    spark: SparkSession, open_store: OpenStore
) -> None:
    store, fresh = open_store(), open_store("fresh")
    options: Change = {"replace": {"big": "total > 3"}, "add": two_more}
    job = nosync.Job(make_flow(), store, spark=spark, shards=2)
    oracle = nosync.Job(make_flow().changed(options["replace"], two_more), fresh, spark=spark, shards=2)
    for t in range(4):
        job.advance(t, rows(spark, t))
        oracle.advance(t, rows(spark, t))
    parent = job.branch("parent", at=2, **options)
    early, earlier = parent.branch("early"), parent.branch("earlier", at=1)
    for branch in (parent, early, earlier):
        branch.replay()
        late = branch.branch(f"after-{branch.branch_name}", at=3, replace={"kept": even})
        assert store.branches()[late.branch_name].anew == (), "it has begun already"
        for name in ("how_big", "small", "new"):
            assert rows_left(branch, name, 3) == rows_left(oracle, name, 3), (branch.branch_name, name)


def test_layers_that_are_shared_do_not_begin_anew(spark: SparkSession, open_store: OpenStore) -> None:
    store = open_store()
    flow = make_flow()
    flow["big"].update("running", key=["word"], state="n bigint", fn=lambda new, old: new.select(["word", "n"]))
    job = nosync.Job(flow, store, spark=spark, shards=2)
    for t in range(3):
        job.advance(t, rows(spark, t))

    def renamed(flow: nosync.Dataflow) -> object:
        return flow["sums"].where("big2", "total > 10").aggregate("how_big", key=["n"], words=nosync.count())

    branch = job.branch("same", at=1, drop=["running", "how_big", "big"], add=renamed)
    assert branch.replay().layers_computed == 0
    assert store.branches()["same"].anew == ()
    parent = job.branch("parent", at=0)  # its own inputs give all sources other fingerprints
    parent.advance(1, rows(spark, 1))
    same = parent.branch("same-as-parent", replace={"big": "total > 10"})
    assert store.branches()[same.branch_name].anew == ()


def test_of_what_takes_rows_that_are_not_recorded_all_begins_anew_or_nothing(
    spark: SparkSession, open_store: OpenStore
) -> None:
    flow = make_flow()
    mapped = flow["sums"].select("named", "word", "total").map("mapped", doubled, persist="none")
    mapped.filter("odd", is_small)
    mapped.filter("same", is_small)
    job = nosync.Job(flow, open_store(), spark=spark, shards=2)
    job.advance(0, rows(spark, 0))
    with pytest.raises(nosync.FlowError, match="stage mapped cannot be fed .*: it is not recorded .*: persist it"):
        job.branch("more", at=0, replace={"odd": is_large})
    job.branch("both", at=0, replace={"odd": is_large, "same": is_large})


def with_time_and_rounds(condition: str) -> nosync.Dataflow:
    """Behind rows that change: windows that close, what they give in the end, and a loop that goes through a join."""
    flow = make_flow()
    big = flow["sums"].where("over", condition)
    timed = big.select("timed", "word", "total", "timestamp_seconds(total) AS at")
    times: dict[str, Any] = {"key": [], "time": "at", "watermark": "3 seconds"}
    timed.window("by_total", size="5 seconds", n=nosync.count(), **times)
    final = timed.window("closed", size="5 seconds", n=nosync.count(), emit="final", **times)
    final.aggregate("all_closed", key=[], n=nosync.sum("n"))
    there = big.select("there", "total - 1 AS total", "total AS next")
    big.where("lowest", "total % 3 = 0").select("first", "total").iterate(
        "chain", lambda chain: chain.join("steps", there, on=["total"]).select("moved", "next AS total")
    ).aggregate("in_chain", key=[], n=nosync.count())
    return flow


@pytest.mark.long
def test_windows_that_close_and_loops_begin_anew_and_are_recovered(spark: SparkSession, open_store: OpenStore) -> None:
    """What windows make of it is checked in tests/property/test_beginning_anew_by_time.py."""
    store = open_store()
    job = nosync.Job(with_time_and_rounds("total > 8"), store, spark=spark, shards=2)
    always = nosync.Job(with_time_and_rounds("total > 3"), open_store("always"), spark=spark, shards=2)
    for t in range(FORK + 2):
        job.advance(t, rows(spark, t))
        always.advance(t, rows(spark, t))
    branch = job.branch("more", at=FORK - 1, replace={"over": "total > 3"})
    assert {"by_total", "closed", "all_closed", "chain", "steps"} <= {
        name.partition("__")[0] for name in store.branches()["more"].anew
    } | {"all_closed"}, "what follows rows that are given once goes on"
    branch.replay()
    for t in range(FORK, FORK + 2):
        for name in ("chain", "in_chain"):
            assert state(branch, name, t) == state(always, name, t)
        assert state(branch, "chain", t) != state(job, "chain", t)
    stages = ["by_total", "closed", "chain", "steps", "in_chain", "all_closed"]
    before = {name: state(branch, name, FORK + 1) for name in stages if name != "steps"}
    lost = lose(store, branch, FORK, stages)
    report = branch.recover()
    assert (report.lost, report.recomputed) == (lost, lost)
    assert before == {name: state(branch, name, FORK + 1) for name in before}
    words = sum(n for *_, n in state(branch, "closed", FORK + 1))
    assert state(branch, "all_closed", FORK + 1) == [(words,)]


def newest_total(changes: pa.Table, state: pa.Table) -> pa.Table:
    came = changes.filter(pc.is_in(changes["_change_type"], pa.array(["insert", "update_postimage"])))
    return came.select(["word", "total"]).rename_columns(["word", "newest"])


def with_state_after_big(condition: str) -> nosync.Dataflow:
    flow = make_flow()
    big = flow["sums"].where("bigger", condition)
    big.update("newest", key=["word"], state="newest bigint", fn=newest_total)
    big.select("timed", "word", "total", "timestamp_seconds(total) AS at").window(
        "by_total", key=[], time="at", size="10 seconds", n=nosync.count()
    )
    return flow


@pytest.mark.long
def test_updates_and_windows_begin_anew_from_all_rows_that_are_there(
    spark: SparkSession, open_store: OpenStore
) -> None:
    job = nosync.Job(with_state_after_big("total > 8"), open_store(), spark=spark, shards=2)
    always = nosync.Job(with_state_after_big("total > 3"), open_store("always"), spark=spark, shards=2)
    for t in range(FORK + 2):
        job.advance(t, rows(spark, t))
        always.advance(t, rows(spark, t))
    branch = job.branch("more", at=FORK - 1, replace={"bigger": "total > 3"})
    branch.replay()
    for t in range(FORK, FORK + 2):
        for name in ("newest", "by_total"):
            assert state(branch, name, t) == state(always, name, t)
            assert state(branch, name, t) != state(job, name, t)


def test_a_branch_whose_new_update_began_without_a_state_goes_on_so(spark: SparkSession, open_store: OpenStore) -> None:
    """Versions before let no update begin anew: the log of branches lists none."""
    store = open_store()
    job = nosync.Job(make_flow(), store, spark=spark, shards=2)
    for t in range(4):
        job.advance(t, rows(spark, t))
    assert isinstance(store.node, Node)
    store.node.create_branch("old", "main", 1, ChangedStages(("newest",)))

    def add(flow: nosync.Dataflow) -> object:
        return flow["sums"].update("newest", key=["word"], state="newest bigint", fn=newest_total)

    old, new = (job.branch(name, at=1, add=add) for name in ("old", "new"))
    old.replay()
    new.replay()
    before = {word for word, *_ in state(job, "sums", 1)}
    changed = {row["word"] for row in store.changes("sums", 1, 3).to_pylist()}
    assert {word for word, _ in state(new, "newest", 3)} >= before
    assert {word for word, _ in state(old, "newest", 3)} == changed
