"""An upgrade in one call: the next epochs have other code, and what is recorded stays what it is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.errors import StreamingQueryException

import nosync
from tests.conftest import OpenStore
from tests.job.test_streams import FILES, read_stream, totals_of, write_input

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
SHARDS = 2


def double(rows: pa.Table) -> pa.Table:
    return rows.set_column(1, "n", pc.multiply(rows["n"], 2))


def triple(rows: pa.Table) -> pa.Table:
    return rows.set_column(1, "n", pc.multiply(rows["n"], 3))


def flow_of(
    fn: Any = double, *, columns: str = "k string, n bigint", extra: bool = False, level: int = 10, sums: bool = True
) -> nosync.Dataflow:
    flow = nosync.Dataflow("shop")
    made = flow.source("rows", columns).map("made", fn)
    if sums:
        totals = made.aggregate("totals", key=["k"], n=nosync.count(), total=nosync.sum("n"))
        totals.where("large", f"total >= {level}").aggregate("larges", key=[], large=nosync.count())
    else:
        made.aggregate("other", key=["k"], n=nosync.count())
    if extra:
        made.aggregate("by_place", key=["place"], n=nosync.count())
    return flow


def give(job: nosync.Job, t: int, rows: list[tuple[Any, ...]], columns: str = "k string, n bigint") -> None:
    job.advance(t, {"rows": job._spark.createDataFrame(rows, columns)})


def state(job: nosync.Job, stage: str, as_of: int | None = None) -> set[tuple[Any, ...]]:
    return {tuple(row) for row in job.read(stage, as_of).collect()}


def test_a_stage_goes_on_from_its_state_with_the_new_code(spark: SparkSession, open_store: OpenStore) -> None:
    """In the running job; then one that has only the new code goes on, and the old one is refused with the cure."""
    store = open_store()
    job = nosync.Job(flow_of(), store, spark=spark, shards=SHARDS)
    give(job, 0, [("a", 1), ("b", 2)])
    plan = job.upgrade(flow_of(triple))
    assert plan is not None
    once_more = job.upgrade(flow_of(triple))
    assert once_more is not None
    assert not once_more.is_needed, "nothing ran since"
    assert (plan.at, plan.goes_on, plan.begins_anew, plan.new) == (0, ("made", "totals", "larges"), (), ())
    give(job, 1, [("a", 1)])
    assert state(job, "totals") == {("a", 2, 2 + 3), ("b", 1, 4)}
    assert state(job, "totals", 0) == {("a", 1, 2), ("b", 1, 4)}, "what was is what it was"
    assert {row["k"]: row["total"] for row in store.read("totals", 0, branch=str(plan.keep_as)).to_pylist()} == {
        "a": 2,
        "b": 4,
    }
    with pytest.raises(
        nosync.FlowError, match=r"stage made was recorded .* Job\(\.\.\., upgrade=True\) or `nosync upgrade`"
    ):
        nosync.Job(flow_of(), store, spark=spark, shards=SHARDS)
    again = nosync.Job(flow_of(triple), store, spark=spark, shards=SHARDS)
    give(again, 2, [("b", 1)])
    assert state(again, "totals") == {("a", 2, 5), ("b", 2, 7)}
    nothing = again.upgrade(flow_of(triple))
    assert nothing is not None
    assert not nothing.is_needed
    assert store.node.timelines.refs.names.keys() == {"main", "before-upgrade-0"}


@pytest.mark.long
def test_only_the_new_code_is_needed_and_what_follows_changes_begins_anew(
    spark: SparkSession, open_store: OpenStore
) -> None:
    """`large` filters rows that change: with another bound it counts all that are there, and not only new ones."""
    store = open_store()
    job = nosync.Job(flow_of(), store, spark=spark, shards=SHARDS)
    give(job, 0, [("a", 4), ("b", 6), ("c", 1)])
    assert state(job, "larges") == {(1,)}
    upgraded = nosync.Job(flow_of(level=8), store, spark=spark, shards=SHARDS, upgrade=True)
    with pytest.raises(nosync.FencedError):
        give(job, 1, [("a", 1)])
    give(upgraded, 1, [("d", 1)])
    assert state(upgraded, "larges") == {(2,)}
    assert state(upgraded, "larges", 0) == {(1,)}


def kept_as(factor: int) -> Callable[[pa.Table, pa.Table], pa.Table]:
    def newest_totals(changes: pa.Table, state: pa.Table) -> pa.Table:
        came = changes.filter(pc.is_in(changes["_change_type"], pa.array(["insert", "update_postimage"])))
        return pa.table({"k": came["k"], "newest": pc.multiply(came["total"], factor)})

    return newest_totals


def with_update(level: int, factor: int = 1, *, counted: bool = True) -> nosync.Dataflow:
    """`newest` keeps what a key had when `large` had it last; it does nothing when the key goes."""
    flow = flow_of(level=level)
    flow["large"].update("newest", key=["k"], state="newest bigint", fn=kept_as(factor))
    return flow if counted else flow.changed(drop=["larges"])


@pytest.mark.long
def test_an_update_behind_another_filter_begins_anew_and_goes_on_through_restarts(
    spark: SparkSession, open_store: OpenStore
) -> None:
    store = open_store()
    job = nosync.Job(with_update(10), store, spark=spark, shards=SHARDS)
    give(job, 0, [("a", 4), ("b", 6), ("c", 1)])
    assert state(job, "newest") == {("b", 12)}
    upgraded = nosync.Job(with_update(8), store, spark=spark, shards=SHARDS, upgrade=True)
    give(upgraded, 1, [("d", 1)])
    assert state(upgraded, "newest") == {("a", 8), ("b", 12)}
    again = nosync.Job(with_update(8), store, spark=spark, shards=SHARDS)
    give(again, 2, [("b", 1)])
    assert state(again, "newest") == {("a", 8), ("b", 14)}
    plan = again.upgrade(with_update(8, factor=10))
    assert plan is not None
    assert (plan.goes_on, plan.begins_anew) == (("newest",), ()), "the code before is there"
    give(again, 3, [("b", 1)])
    assert state(again, "newest") == {("a", 8), ("b", 160)}


@pytest.mark.long
def test_an_update_goes_on_where_it_is_known_that_only_its_function_is_another(
    spark: SparkSession, open_store: OpenStore
) -> None:
    store = open_store()
    job = nosync.Job(with_update(10), store, spark=spark, shards=SHARDS)
    give(job, 0, [("b", 6)])
    by_what_is_beside = nosync.Job(with_update(10, factor=10), store, spark=spark, shards=SHARDS, upgrade=True)
    give(by_what_is_beside, 1, [("c", 7)])
    assert state(by_what_is_beside, "newest") == {("b", 12), ("c", 140)}
    alone = by_what_is_beside.upgrade(with_update(10, factor=10, counted=False))
    assert alone is not None
    give(by_what_is_beside, 2, [("d", 1)])
    unknown = nosync.Job(with_update(10, factor=100, counted=False), store, spark=spark, shards=SHARDS, upgrade=True)
    give(unknown, 3, [("d", 1)])
    assert state(unknown, "newest") == {("b", 1200), ("c", 1400)}, "the filter may be another one: it begins anew"


def test_a_source_gets_more_columns_and_stages_come_and_go(spark: SparkSession, open_store: OpenStore) -> None:
    store = open_store()
    columns = "k string, n bigint, place string"
    job = nosync.Job(flow_of(), store, spark=spark, shards=SHARDS)
    give(job, 0, [("a", 1)])
    plan = job.plan_upgrade(flow_of(columns=columns, extra=True))
    assert plan is not None
    assert (plan.new, plan.new_columns) == (("by_place",), {"rows": ("place",)})
    assert "rows.place" in str(plan)
    assert state(job, "totals") == {("a", 1, 2)}, "it was only asked"
    job.upgrade(flow_of(columns=columns, extra=True), keep_as="narrow")
    give(job, 1, [("a", 1, "Rome"), ("b", 1, None)], columns)
    assert state(job, "by_place") == {("Rome", 1), (None, 1)}
    assert state(job, "totals") == {("a", 2, 4), ("b", 1, 2)}
    assert {tuple(row) for row in job.read("rows").collect()} == {("a", 1, None), ("a", 1, "Rome"), ("b", 1, None)}
    again = nosync.Job(flow_of(columns=columns, extra=True), store, spark=spark, shards=SHARDS)
    give(again, 2, [("b", 5, "Oslo")], columns)
    dropped = again.upgrade(flow_of(columns=columns, sums=False))
    assert dropped is not None
    assert set(dropped.dropped) == {"totals", "larges", "by_place"}
    give(again, 3, [("b", 5, "Oslo")], columns)
    assert state(again, "other") == {("b", 1)}, "a new stage begins with the next epoch"
    assert store.missing() == []


@pytest.mark.long
def test_a_recorded_stage_is_not_recorded_any_more(spark: SparkSession, open_store: OpenStore) -> None:
    """A select is recorded where nothing follows it, and so is its code; what follows it now has both."""

    def flow(expression: str, *, followed: bool) -> nosync.Dataflow:
        made = nosync.Dataflow("shop")
        clean = made.source("rows", "k string, n bigint").select("clean", "k", f"{expression} AS n")
        if followed:
            clean.aggregate("totals", key=["k"], total=nosync.sum("n"))
        return made

    store = open_store()
    give(nosync.Job(flow("n", followed=False), store, spark=spark, shards=SHARDS), 0, [("a", 1)])
    job = nosync.Job(flow("n + 1", followed=True), store, spark=spark, shards=SHARDS, upgrade=True)
    give(job, 1, [("a", 1)])
    assert state(job, "totals") == {("a", 2)}
    give(nosync.Job(flow("n + 1", followed=True), store, spark=spark, shards=SHARDS, upgrade=True), 2, [("a", 1)])


def test_what_cannot_go_on_is_refused_and_nothing_changed(spark: SparkSession, open_store: OpenStore) -> None:
    store = open_store()
    job = nosync.Job(flow_of(), store, spark=spark, shards=SHARDS)
    give(job, 0, [("a", 1)])
    with pytest.raises(
        nosync.SchemaError, match="source rows: column 'n' was int64 and is now double: declare another"
    ):
        job.upgrade(flow_of(lambda rows: rows, columns="k string, n double"))
    other = nosync.Dataflow("shop")
    other.source("rows", "k string").map("made", lambda rows: rows)
    with pytest.raises(nosync.SchemaError, match="source rows: column 'n' is recorded and not declared any more"):
        job.upgrade(other)
    keyed = nosync.Dataflow("shop")
    made = keyed.source("rows", "k string, n bigint").map("made", double)
    made.aggregate("totals", key=["n"], total=nosync.count())
    with pytest.raises(nosync.SchemaError, match=r"stage totals cannot go on .*its key was \(k\) and is now \(n\)"):
        job.upgrade(keyed)
    log = nosync.Dataflow("shop")
    log.source("rows", "k string, n bigint").map("made", double).select("totals", "k", "n")
    with pytest.raises(
        nosync.FlowError, match="stage totals was an aggregate and is now one that treats rows by themselves"
    ):
        job.upgrade(log)
    typed = nosync.Dataflow("shop")
    typed.source("rows", "k string, n bigint").map(
        "made", lambda rows: rows.set_column(1, "n", rows["n"].cast("string"))
    )
    with pytest.raises(nosync.SchemaError, match="stage made: its column 'n' was int64 and is now string"):
        job.upgrade(typed)
    assert store.node.timelines.refs.names.keys() == {"main"}
    give(job, 1, [("a", 1)])
    assert state(job, "totals") == {("a", 2, 4)}


@pytest.mark.long
def test_a_source_is_added_and_has_no_rows_before(spark: SparkSession, open_store: OpenStore) -> None:
    """Read as of epochs before, branched after and not before it, lost and recovered."""
    new = flow_of()
    more = new.source("more", "k string, place string")
    new["rows"].join("placed", more, on=["k"])
    store = open_store()
    job = nosync.Job(flow_of(), store, spark=spark, shards=SHARDS)
    give(job, 0, [("a", 1)])
    plan = job.upgrade(new)
    assert plan is not None
    assert set(plan.new) == {"more", "placed"}
    for t in (1, 2):
        rows = {"rows": [("a", t), ("b", 7)], "more": [("a", f"place {t}")]}
        schemas = {"rows": "k string, n bigint", "more": "k string, place string"}
        job.advance(t, {name: spark.createDataFrame(rows[name], schemas[name]) for name in rows})
    assert state(job, "more", 0) == state(job, "placed", 0) == set()
    assert state(job, "more", 1) == {("a", "place 1")}
    expected = {("a", n, f"place {t}") for n in (1, 2) for t in (1, 2)}
    assert state(job, "placed") == expected, "new stages begin with the epoch after"
    with pytest.raises(nosync.FlowError, match="cannot branch at 0: source more is not recorded there"):
        job.branch("early", at=0, replace={"made": triple})
    branch = job.branch("late", at=1, replace={"made": triple})
    branch.replay()
    assert state(branch, "placed") == expected
    assert state(branch, "totals") == {("a", 3, 2 + 2 + 6), ("b", 2, 14 + 21)}
    store.close()
    for path in (store.directory.root / "layers").rglob("*.layer"):
        if path.relative_to(store.directory.root).parts[1] not in ("more", "rows"):
            path.unlink()
    again = nosync.Job(new, open_store(), spark=spark, shards=SHARDS)
    report = again.recover()
    assert report.recomputed
    assert not report.unrecoverable
    assert state(again, "placed") == expected
    assert state(again, "totals") == {("a", 3, 8), ("b", 2, 28)}


def fails_on_13(rows: pa.Table) -> pa.Table:
    if 13 in rows.column("n").to_pylist():
        raise ValueError("13 is a bad record")
    return rows


def passes_13(rows: pa.Table) -> pa.Table:
    return rows


def of_words(fn: Any) -> nosync.Dataflow:
    flow = nosync.Dataflow("stream")
    flow.source("words", "word string, n bigint").map("checked", fn).aggregate(
        "totals", key=["word"], n=nosync.count(), total=nosync.sum("n")
    )
    return flow


def test_a_bad_record_in_a_stream_is_fixed_and_the_stream_goes_on(
    spark: SparkSession, open_store: OpenStore, tmp_path: Path
) -> None:
    """With the same checkpoint: the batch that failed is the next epoch."""
    write_input(tmp_path / "in")
    rows = read_stream(spark, tmp_path / "in")
    store = open_store()
    job = nosync.Job(of_words(fails_on_13), store, spark=spark, shards=SHARDS)
    how = {"checkpoint": tmp_path / "c", "trigger": {"availableNow": True}}
    with pytest.raises((nosync.StageError, StreamingQueryException), match="13 is a bad record"):
        job.stream({"words": rows}, **how).awaitTermination()
    fixed = nosync.Job(of_words(passes_13), store, spark=spark, shards=SHARDS, upgrade=True)
    fixed.stream({"words": rows}, **how).awaitTermination()
    found = {row.word: (row.n, row.total) for row in fixed.read("totals").collect()}
    assert found == totals_of(tmp_path / "in")
    assert fixed.last_sealed() == FILES - 1


@pytest.mark.long
@pytest.mark.parametrize("change", ["other code", "one more stage", "one stage less"])
def test_a_batch_that_was_sealed_and_not_committed_is_not_run_by_new_code(
    change: str, spark: SparkSession, open_store: OpenStore, tmp_path: Path
) -> None:
    """The driver was killed between the two. Spark gives its last batch again."""
    store, sink = open_store(), nosync.ParquetSink(tmp_path / "out")
    write_input(tmp_path / "in", 3)
    rows = read_stream(spark, tmp_path / "in")
    how: dict[str, Any] = {"checkpoint": tmp_path / "c", "trigger": {"availableNow": True}}
    last = (tmp_path / "in/0002.json").rename(tmp_path / "later.json")
    job = nosync.Job(counted(2), store, spark=spark, shards=SHARDS, sinks={"totals": sink})
    job.stream({"words": rows}, **how).awaitTermination()
    (tmp_path / "c/commits/1").unlink()
    (tmp_path / "c/commits/.1.crc").unlink(missing_ok=True)
    before = {t: sorted(map(str, store.read("totals", t).to_pylist())) for t in range(2)}
    last.rename(tmp_path / "in/0002.json")
    code = {
        "other code": counted(5),
        "one more stage": counted(2, more=True),
        "one stage less": counted(2, large=False),
    }
    new = nosync.Job(code[change], store, spark=spark, shards=SHARDS, upgrade=True, sinks={"totals": sink})
    new.stream({"words": rows}, **how).awaitTermination()
    assert store.last_sealed() == 2
    assert {t: sorted(map(str, store.read("totals", t).to_pylist())) for t in range(2)} == before
    words = store.read("words").num_rows
    assert sum(row["n"] for row in store.read("totals").to_pylist()) == words


def counted(least: int, *, more: bool = False, large: bool = True) -> nosync.Dataflow:
    flow = nosync.Dataflow("stream")
    words = flow.source("words", "word string")
    totals = words.aggregate("totals", key=["word"], n=nosync.count())
    if large:
        totals.where("large", f"n >= {least}").aggregate("larges", key=[], large=nosync.count())
    if more:
        totals.aggregate("all", key=[], n=nosync.sum("n"))
    return flow


def test_shards_change_while_a_stream_runs(spark: SparkSession, open_store: OpenStore, tmp_path: Path) -> None:
    write_input(tmp_path / "in")
    rows = read_stream(spark, tmp_path / "in")
    store = open_store()
    job = nosync.Job(of_words(passes_13), store, spark=spark, shards=2)
    query = job.stream({"words": rows}, checkpoint=tmp_path / "c", trigger={"availableNow": True})
    changed = threading.Event()

    def rescale() -> None:
        while job.last_sealed() is None:
            changed.wait(0.05)
        job.rescale(5)
        changed.set()

    thread = threading.Thread(target=rescale)
    thread.start()
    query.awaitTermination()
    thread.join()
    assert changed.is_set()
    shards = [store.manifest(t).entries[0].id.trace.shard.count for t in range(FILES)]
    assert shards == sorted(shards)
    assert (shards[0], shards[-1]) == (2, 5)
    found = {row.word: (row.n, row.total) for row in job.read("totals").collect()}
    assert found == totals_of(tmp_path / "in")
    with pytest.raises(nosync.FlowError, match="shards is 0, expected 1 to 128"):
        job.rescale(0)


def by_source(name: str) -> nosync.Dataflow:
    flow = nosync.Dataflow("shop")
    for source in ("rows", "others"):
        flow.source(source, "k string, n bigint")
    flow[name].aggregate("totals", key=["k"], total=nosync.sum("n"))
    return flow


def test_another_source_of_the_same_columns_is_other_code(spark: SparkSession, open_store: OpenStore) -> None:
    store = open_store()
    job = nosync.Job(by_source("rows"), store, spark=spark, shards=SHARDS)

    def given(**numbers: int) -> dict[str, Any]:
        return {name: spark.createDataFrame([("a", n)], "k string, n bigint") for name, n in numbers.items()}

    job.advance(0, given(rows=1, others=10))
    with pytest.raises(nosync.FlowError, match="stage totals was recorded .* inputs changed"):
        nosync.Job(by_source("others"), store, spark=spark, shards=SHARDS)
    job.advance(1, given(rows=2, others=20))
    branch = job.branch(
        "other", at=0, drop=["totals"],
        add=lambda flow: flow["others"].aggregate("totals", key=["k"], total=nosync.sum("n")),
    )  # fmt: skip
    branch.replay()
    assert state(branch, "totals") != state(job, "totals") == {("a", 3)}
    upgraded = nosync.Job(by_source("others"), store, spark=spark, shards=SHARDS, upgrade=True)
    upgraded.advance(2, given(rows=4, others=40))
    assert state(upgraded, "totals") == {("a", 43)}
