"""Views that get another query over the same history: on a branch, by an upgrade, and back."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import nosync
from nosync.cli import main
from nosync.job.upgrade import upgrade_of
from tests.conftest import OpenStore
from tests.views.both_ways import Inputs, flow_over_inputs, frames
from tests.views.test_views import job_of, rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
LONG = pytest.mark.long("make views")


def with_pages(spark: SparkSession, least: int) -> nosync.Dataflow:
    """A view of rows that only come, and two over it."""
    flow = flow_over_inputs()
    flow.sql("pages", f"SELECT page, weight FROM clicks WHERE weight > {least}", spark=spark)
    flow.sql("a_pages", "SELECT upper(page) AS page FROM pages WHERE page LIKE 'a%'", spark=spark)
    flow.sql("how_many", "SELECT page, count(*) AS n, max(weight) AS most FROM pages GROUP BY page", spark=spark)
    return flow


@LONG
def test_a_view_that_only_filters_takes_back_what_its_query_gave_before(
    spark: SparkSession, open_store: OpenStore, tmp_path: Path
) -> None:
    store, names = open_store(retain=100), ("pages", "a_pages", "how_many")
    out = tmp_path / "out"
    job = nosync.Job(with_pages(spark, 3), store, spark=spark, shards=2, sinks={"pages": nosync.ParquetSink(out)})
    for t in range(3):
        job.advance(t, frames(spark, Inputs(3 + t).epoch(t)))
    before = {name: rows(job, name) for name in names}
    branch = job.branch("other", views={"pages": "SELECT page, weight FROM clicks WHERE weight < 6"}, at=1)
    branch.replay()
    for name in names:
        assert branch.verify_view(name).is_equal, str(branch.verify_view(name))
        assert rows(job, name) == before[name]
    assert rows(branch, "pages") != before["pages"]
    job.upgrade(with_pages(spark, 5))
    inputs = Inputs(8)
    for t in (3, 4):
        job.advance(t, frames(spark, inputs.epoch(t)))
    job.upgrade(with_pages(spark, 1))  # what went comes back
    job.advance(5, frames(spark, inputs.epoch(5)))
    assert net_of(spark.read.parquet(str(out)).collect()) == rows(job, "pages")
    for t in (2, 3, 4, 5):
        state = spark.read.format("nosync").option("path", store.directory.root).option("stage", "pages")
        seen = state.option("versionAsOf", t).load().collect()
        assert Counter(map(tuple, seen)) == Counter(map(tuple, job.read("pages", t).collect())), t
        assert net_of(job.changes("pages", -1, t).collect()) == Counter(map(tuple, seen)), t
    assert {name: rows(job, name, 2) for name in names} == before
    assert all(job.verify_view(name).is_equal for name in names)
    now = {name: rows(job, name) for name in names}
    store.sync()
    lose_epoch(store, 5, names)
    report = job.recover()
    assert report.recomputed
    assert not report.unrecoverable
    assert {name: rows(job, name) for name in names} == now


def lose_epoch(store: nosync.Store, t: int, stages: Collection[str]) -> None:
    manifest = store.node.timelines.manifest(t, "main")
    assert manifest is not None
    for entry in manifest.entries:
        if entry.id.trace.stage.partition("__")[0] in stages:
            store.directory.path_of(entry.id).unlink()
            store.directory.forget(entry.id)


def net_of(changes: list[Any]) -> Counter[Any]:
    net = Counter[Any]()
    for row in changes:
        net[row["page"], row["weight"]] += -1 if row["_change_type"] == "delete" else 1
    assert not -net, "no row goes that is not there"
    return +net


def with_internal_stages(spark: SparkSession, least: int) -> nosync.Dataflow:
    """Views whose queries become stages that are named by what they do."""
    flow = flow_over_inputs()
    flow.sql(
        "totals", f"SELECT item FROM orders WHERE price > {least} GROUP BY item HAVING sum(price) > 4", spark=spark
    )
    flow.sql("named", f"SELECT city, price FROM orders JOIN people ON person = pid WHERE price > {least}", spark=spark)
    ranked = "rank() OVER (PARTITION BY item ORDER BY price)"
    flow.sql("places", f"SELECT id, {ranked} AS place FROM orders WHERE price > {least}", spark=spark)
    return flow


@LONG
def test_an_edit_that_is_undone(spark: SparkSession, open_store: OpenStore) -> None:
    """Stages that it dropped come back, over an epoch that they missed."""
    store, names = open_store(retain=100), ("totals", "named", "places")
    job, inputs = job_of(spark, store, with_internal_stages(spark, 2), epochs=2), Inputs(5)
    before = {name: rows(job, name) for name in names}
    dropped = job.upgrade(with_internal_stages(spark, 5)).dropped
    assert len(dropped) >= 3
    job.advance(2, frames(spark, inputs.epoch(2)))
    edited = {name: rows(job, name) for name in names}
    assert {*job.upgrade(with_internal_stages(spark, 2)).begins_anew} >= {*dropped, *names}
    for t in (3, 4):
        job.advance(t, frames(spark, inputs.epoch(t)))
    assert all(job.verify_view(name).is_equal for name in names)
    assert {name: rows(job, name, 1) for name in names} == before
    assert {name: rows(job, name, 2) for name in names} == edited
    now = {name: rows(job, name) for name in names}
    store.sync()
    lose_epoch(store, 3, dropped)
    report = job.recover()
    assert report.recomputed
    assert {name: rows(job, name) for name in names} == now


@LONG
@pytest.mark.parametrize("shards", [2, 3])
def test_views_begin_anew_over_rows_that_lie_in_other_shards_now(
    spark: SparkSession, open_store: OpenStore, shards: int
) -> None:
    """Which aggregates there are says where the rows of a source go, and it says nothing of those that are recorded."""
    random = np.random.default_rng(5)

    def given(n: int) -> dict[str, Any]:
        rows = [
            ("abcdefghij"[k], int(x)) for k, x in zip(random.integers(0, 10, n), random.integers(0, 10, n), strict=True)
        ]
        return {"ev": spark.createDataFrame(rows, "k string, x bigint")}

    def flow_of(key: str | None, least: int, *, more: bool) -> nosync.Dataflow:
        flow = nosync.Dataflow("f")
        source = flow.source("ev", "k string, x bigint")
        if key is not None:
            source.aggregate(f"by_{key}", key=[key], n=nosync.count())
        flow.sql("some", f"SELECT k, x FROM ev WHERE x > {least}", spark=spark)
        flow.sql("all_of_it", f"SELECT count(*) AS n, sum(x) AS total FROM ev WHERE x > {least}", spark=spark)
        if more:
            flow.sql("by_k", "SELECT k, count(*) AS n, sum(x) AS s FROM ev GROUP BY k", spark=spark)
            flow.sql("different", "SELECT DISTINCT k, x FROM ev", spark=spark)
        return flow

    job = nosync.Job(flow_of("x", 2, more=False), open_store(retain=100), spark=spark, shards=2)
    job.advance(0, given(40))
    if shards != 2:
        job.rescale(shards)
    job.upgrade(flow_of("k", 5, more=False))
    job.advance(1, given(5))
    assert all(job.verify_view(name).is_equal for name in ("some", "all_of_it"))
    job.upgrade(flow_of(None, 4, more=True))
    for t in (2, 3):
        job.advance(t, given(5))
    for name in ("some", "all_of_it", "by_k", "different"):
        assert job.verify_view(name).is_equal, str(job.verify_view(name))


@LONG
def test_a_view_that_is_changed_after_it_was_rescaled(spark: SparkSession, open_store: OpenStore) -> None:
    """What goes may be in another shard then than what came: it is said, and what to do."""
    store = open_store(retain=100)
    job = job_of(spark, store, with_pages(spark, 3), epochs=2)
    job.upgrade(with_pages(spark, 5))
    job.advance(2, frames(spark, Inputs(3).epoch(2)))
    job.rescale(3)
    job.upgrade(with_pages(spark, 1))
    with pytest.raises(nosync.StageError, match=r"taken back when it had 2 shards.*rescale\(2\)"):
        job.advance(3, frames(spark, Inputs(3).epoch(3)))
    job.rescale(2)
    job.advance(3, frames(spark, Inputs(3).epoch(3)))
    job.rescale(3)
    job.advance(4, frames(spark, Inputs(3).epoch(4)))
    assert all(job.verify_view(name).is_equal for name in ("pages", "a_pages", "how_many"))


SHAPES = {
    "by_item": "SELECT item, sum(price) AS x FROM orders GROUP BY item",
    "of_a_sum": "SELECT item, sum(price) / 100 AS x FROM orders GROUP BY item",
    "by_two": "SELECT person, item, count(*) AS x FROM orders GROUP BY person, item",
    "filtered": "SELECT id AS x FROM orders WHERE price > 3",
    "times": "SELECT item, max(at) AS x FROM orders GROUP BY item",
    "decimals": "SELECT sum(tax) AS x FROM orders",
    "different": "SELECT DISTINCT item, upper(item) AS x FROM orders",
    "joined": "SELECT item, city AS x FROM orders JOIN people ON person = pid",
    "ranked": "SELECT id, rank() OVER (PARTITION BY item ORDER BY price) AS x FROM orders",
    "only_come": "SELECT page AS x, weight FROM clicks WHERE weight > 2",
}
"""Queries of which no two have the same key and the same columns."""


def shaped(spark: SparkSession, shape: str) -> nosync.Dataflow:
    flow = flow_over_inputs()
    flow.sql("v", SHAPES[shape], spark=spark)
    flow.sql("after_v", "SELECT count(*) AS n, count(DISTINCT x) AS d FROM v", spark=spark)
    return flow


@LONG
def test_an_upgrade_gives_a_view_another_key_and_other_columns(spark: SparkSession, open_store: OpenStore) -> None:
    """What each epoch had stays as it was, with the columns that it had then."""
    store, order, inputs = open_store(retain=100), [*SHAPES, "by_item"], Inputs(11)
    job = nosync.Job(shaped(spark, order[0]), store, spark=spark, shards=2)
    seen: list[tuple[list[str], dict[str, Any]]] = []

    def now(of: nosync.Job, t: int | None = None) -> tuple[list[str], dict[str, Any]]:
        return of.read("v", t).columns, {name: rows(of, name, t) for name in ("v", "after_v")}

    for t, shape in enumerate(order):
        if t == 4:
            job.rescale(3)
        if t:
            plan = job.upgrade(shaped(spark, shape))
            assert plan is not None
            assert {"v", "after_v"} <= {*plan.begins_anew}
        job.advance(t, frames(spark, inputs.epoch(t)))
        for name in ("v", "after_v"):
            assert job.verify_view(name).is_equal, f"{shape}: {job.verify_view(name)}"
        seen.append(now(job))
    last = len(order)
    job.advance(last, frames(spark, inputs.epoch(last)))
    assert job.verify_view("v").is_equal
    seen.append(now(job))
    with pytest.raises(nosync.SchemaError, match=r"other columns from epoch 10 on.*up to 9, and for those after 10"):
        job.changes("v", 8, last)
    with pytest.raises(nosync.SchemaError, match="other columns from epoch 10 on"):
        store.changes("v", 9, last)
    assert Counter(map(tuple, job.changes("v", 10, last).collect())) == Counter(
        tuple(row.values()) for row in store.changes("v", 10, last).to_pylist()
    )
    # Another process sees the same, also where the epoch that began anew is lost, and where layers were merged.
    store.sync()
    again = nosync.Job(shaped(spark, order[-1]), store, spark=spark, shards=3)
    lose_epoch(store, 10, ("v", "after_v"))
    report = again.recover()
    assert report.recomputed
    assert not report.unrecoverable
    for _ in store.node.compact("v"):
        pass
    assert [now(again, t) for t in range(last + 1)] == seen
    state = spark.read.format("nosync").option("path", store.directory.root).option("stage", "v")
    for t in range(last + 1):
        then = state.option("versionAsOf", t).load()
        assert (then.columns, Counter(map(tuple, then.collect()))) == (
            seen[t][0],
            Counter(map(tuple, job.read("v", t).collect())),
        ), t


EDITS = {
    "total": ("SELECT item, sum(person) AS x FROM orders GROUP BY item", "sum(person)", "max(person)"),
    "of_clicks": ("SELECT page, sum(who) AS x FROM clicks GROUP BY page", "sum(who)", "max(who)"),
    "over_all": ("SELECT sum(who) AS x FROM clicks", "sum(who)", "min(who)"),
    "plain": ("SELECT who AS x FROM clicks", "who AS", "who * 2 AS"),
    "kept": ("SELECT who, page FROM clicks WHERE who > 1", "> 1", "< 3"),
    "once": ("SELECT DISTINCT who FROM clicks", "DISTINCT who", "DISTINCT who + 1 AS who"),
    "met": ("SELECT page, city FROM clicks JOIN people ON who = pid", "who = pid", "who = pid + 1"),
    "semi": ("SELECT who, page FROM clicks WHERE who IN (SELECT pid FROM people)", " IN ", " NOT IN "),
    "place": ("SELECT who, rank() OVER (PARTITION BY page ORDER BY weight) AS r FROM clicks", "weight)", "who)"),
    "both": ("SELECT who FROM clicks UNION ALL SELECT pid FROM people", "UNION ALL", "UNION"),
    "apart": ("SELECT explode(array(who, 1)) AS x FROM clicks", "(who, 1)", "(who, 2)"),
    "top": ("SELECT who, page, weight FROM clicks ORDER BY weight, who, page LIMIT 3", "LIMIT 3", "LIMIT 4"),
    "hours": ("SELECT window(seen, '1 hour') AS w, count(*) AS n FROM clicks GROUP BY 1", "1 hour", "2 hours"),
}
"""A query of a view, and what is changed in it: the key and the columns stay."""


@pytest.mark.long("make views")
@pytest.mark.parametrize("how", ["branch", pytest.param("upgrade", marks=LONG)])
def test_an_edit_that_keeps_the_columns_counts_for_all_rows(
    spark: SparkSession, open_store: OpenStore, how: str
) -> None:
    """Also over inputs whose rows only come, where a stage could go on from what the other query had made."""
    before = {name: query for name, (query, _, _) in EDITS.items()}
    after = {name: query.replace(old, new) for name, (query, old, new) in EDITS.items()}
    assert not [name for name in EDITS if before[name] == after[name]]

    def flow_of(queries: Mapping[str, str]) -> nosync.Dataflow:
        flow = flow_over_inputs()
        for name, query in queries.items():
            flow.sql(name, query, spark=spark)
        return flow

    job, inputs = job_of(spark, open_store(retain=100), flow_of(before), epochs=3), Inputs(5)
    if how == "branch":
        job = job.branch("other", at=1, views=after)
        job.replay()
    else:
        job.upgrade(flow_of(after))
        job.advance(3, frames(spark, inputs.epoch(3)))
    for name in EDITS:
        assert job.verify_view(name).is_equal, str(job.verify_view(name))


@pytest.mark.long("make views")
@pytest.mark.parametrize(
    "shape", ["of_a_sum", *(pytest.param(s, marks=LONG) for s in ("by_two", "only_come", "times"))]
)
def test_a_branch_asks_another_question(
    spark: SparkSession, open_store: OpenStore, shape: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the other query is, a branch has its rows from the first epoch after the fork on; the line that it comes from
    has what it had.
    """
    store, inputs = open_store(retain=100), Inputs(12)
    job = nosync.Job(shaped(spark, "by_item"), store, spark=spark, shards=2)
    for t in range(4):
        job.advance(t, frames(spark, inputs.epoch(t)))
    before = rows(job, "v")
    branch = job.branch("other", at=1, views={"v": SHAPES[shape]})
    branch.replay()
    for t in (2, 3):
        for name in ("v", "after_v"):
            assert branch.verify_view(name, as_of=t).is_equal, str(branch.verify_view(name, as_of=t))
    assert (rows(branch, "v", 1), rows(job, "v")) == (rows(job, "v", 1), before)
    assert nosync.diverges_at(job, branch, "v") == 2
    row = branch.read("v").limit(1).toArrow().to_pylist()[0]
    found = branch.explain("v", {name: row[name] for name in branch.stage("v").key or row}, 3)
    assert found.exact
    assert row in found.value.to_pylist()
    assert all(table.num_rows for table in found.inputs.values())
    main(["changes", str(store.directory.root), "v", "--branch", "other", "--json"])
    assert {row["_epoch"] for row in json.loads(capsys.readouterr().out)} == {3}, "those that its query gave"
    if shape == "of_a_sum":
        differs = {row.item: (row.x_a, row.x_b) for row in nosync.diff(job, branch, "v").collect()}
        assert differs == {row.item: (row.x, row.x / 100) for row in job.read("v").collect() if row.x}
        assert differs == {
            row["item"]: (row["x_a"], row["x_b"]) for row in store.diff("v", "main", "other").to_pylist()
        }
        return
    said = "column 'x' is double on one side and timestamp" if shape == "times" else "rows cannot be matched"
    for compare in (lambda: nosync.diff(job, branch, "v"), lambda: store.diff("v", "main", "other")):
        with pytest.raises(nosync.NosyncError, match=said):
            compare()


@LONG
def test_a_branch_of_a_branch_asks_a_third_question_and_one_is_promoted(
    spark: SparkSession, open_store: OpenStore
) -> None:
    store, inputs = open_store(retain=100), Inputs(12)
    job = nosync.Job(shaped(spark, "by_item"), store, spark=spark, shards=2)
    for t in range(4):
        job.advance(t, frames(spark, inputs.epoch(t)))
    seen = {t: rows(job, "v", t) for t in range(4)}
    branch = job.branch("other", at=1, views={"v": SHAPES["by_two"]})
    branch.replay()
    deeper = branch.branch("third", at=2, views={"v": SHAPES["decimals"]})
    deeper.replay()
    assert deeper.verify_view("v").is_equal
    assert rows(deeper, "v", 2) == rows(branch, "v", 2)
    assert rows(deeper, "v", 1) == seen[1]
    job.promote(branch, keep_as="first")
    job.advance(4, frames(spark, inputs.epoch(4)))
    assert job.verify_view("v").is_equal
    assert {t: rows(job, "v", t) for t in (0, 1)} == {t: seen[t] for t in (0, 1)}
    with pytest.raises(nosync.FlowError, match="main was rewound to 1, which other code"):
        job.rewind(1)
    job = nosync.Job(shaped(spark, "by_item"), store, spark=spark, shards=2)
    assert rows(job, "v") == seen[1]
    job.advance(2, frames(spark, Inputs(12).epoch(2)))
    assert job.verify_view("v").is_equal


@LONG
def test_a_sink_is_given_rows_with_the_same_columns_for_ever(
    spark: SparkSession, open_store: OpenStore, tmp_path: Path
) -> None:
    store, inputs = open_store(retain=100), Inputs(13)
    sinks = {"v": nosync.ParquetSink(tmp_path / "out")}
    job = nosync.Job(shaped(spark, "by_item"), store, spark=spark, shards=2, sinks=sinks)
    for t in range(3):
        job.advance(t, frames(spark, inputs.epoch(t)))
    branch = job.branch("two", views={"v": SHAPES["by_two"]})
    branch.replay()
    with pytest.raises(nosync.SchemaError, match=r"stage v gets another key.*a sink has the rows"):
        job.promote(branch)
    with pytest.raises(nosync.SchemaError, match=r"stage v gets another key.*a sink has the rows"):
        job.upgrade(shaped(spark, "by_two"))
    with pytest.raises(nosync.SchemaError, match=r"stage v gets another key.*a sink has the rows"):
        upgrade_of(shaped(spark, "by_two"), store, spark)  # no job is there, and so no sink
    job.advance(3, frames(spark, inputs.epoch(3)))
    assert job.verify_view("v").is_equal
    assert spark.read.parquet(str(tmp_path / "out")).where("_epoch = 3").count() > 0
