"""Views as users have them: read, verified, explained, built on each other, changed on a branch or by an upgrade."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import nosync
from nosync.cli import main
from nosync.flow.arguments import JoinArguments, arguments_of
from tests.conftest import OpenStore
from tests.helpers.driver import driver_runs
from tests.views.both_ways import Inputs, flow_over_inputs, frames

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

TOTALS = "SELECT item, sum(price) AS total, count(*) AS n\nFROM orders\nWHERE price > {} GROUP BY item"
CITIES = "SELECT city, sum(n) AS n, count(*) AS items FROM totals JOIN people ON item = city GROUP BY city"
QUERIES = {"totals": TOTALS.format(2), "cities": CITIES, "dear": "SELECT id, price FROM orders WHERE price > 2"}


def declared(spark: SparkSession, **queries: str) -> nosync.Dataflow:
    flow = flow_over_inputs()
    for name, query in (QUERIES | queries).items():
        flow.sql(name, query, spark=spark)
    return flow


def job_of(
    spark: SparkSession, store: nosync.Store, flow: nosync.Dataflow, inputs: Inputs | None = None, epochs: int = 3
) -> nosync.Job:
    job = nosync.Job(flow, store, spark=spark, shards=2)
    inputs = inputs or Inputs(3)
    for t in range(epochs):
        job.advance(t, frames(spark, inputs.epoch(t)))
    return job


def rows(job: nosync.Job, view: str, as_of: int | None = None) -> Counter[Any]:
    return Counter(tuple(row) for row in job.read(view, as_of).collect())


def test_a_view_is_one_aggregate_where_the_query_is(spark: SparkSession) -> None:
    flow = flow_over_inputs()
    flow.sql("totals", "SELECT item, sum(price) AS total, count(*) AS n FROM orders GROUP BY item", spark=spark)
    assert flow["totals"].kind == "aggregate"
    assert [*flow["totals"].aggregates] == ["total", "n"]
    assert [name for name, _ in flow.views["totals"].columns] == ["item", "total", "n"]


def test_what_a_subquery_says_of_one_side_is_asked_before_a_join(spark: SparkSession) -> None:
    """So the join has less to keep."""
    flow = flow_over_inputs()
    query = """SELECT id, city FROM orders JOIN people ON person = pid
               WHERE item IN (SELECT page FROM clicks) AND NOT EXISTS (SELECT 1 FROM clicks WHERE who = pid)"""
    flow.sql("v", query, spark=spark)
    joins = [arguments_of(stage, JoinArguments).how for stage in flow.stages if stage.kind == "join"]
    assert joins == ["left_semi", "left_anti", "inner"]


def test_parts_that_are_the_same_are_one_stage(spark: SparkSession) -> None:
    flow = declared(spark, dearest="SELECT max(price) AS most FROM orders WHERE price > 2")
    shared = {*flow.views["dear"].stages} & {*flow.views["totals"].stages} & {*flow.views["dearest"].stages}
    assert [flow[name].kind for name in shared] == ["where"]
    again = declared(spark)
    assert {*again.views["totals"].stages} <= {stage.name for stage in flow.stages}, "the same text, the same names"


def test_views_are_read_explained_and_verified(spark: SparkSession, open_store: OpenStore) -> None:
    job = job_of(spark, open_store(retain=100), declared(spark))
    for name in QUERIES:
        for t in range(3):
            check = job.verify_view(name, t)
            assert check.is_equal, str(check)
    plan = job.explain_view("cities")
    assert plan.inputs == ("totals", "people")
    shown = str(plan)
    assert "inner join on" in shown
    assert "left, right, rows" in shown
    assert "where" in str(job.explain_view("totals"))
    assert "also in dear" in str(job.explain_view("totals"))
    with pytest.raises(nosync.UnknownStageError, match="no view 'total' .*did you mean 'totals'"):
        job.explain_view("total")
    with pytest.raises(nosync.UnknownStageError, match="no view 'orders'"):
        job.verify_view("orders")


def test_a_view_that_is_wrong_is_found_out(
    spark: SparkSession, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nosync.spark.plans import aggregates

    monkeypatch.setattr(aggregates.functions, "sum", nosync.max)
    flow = flow_over_inputs()
    flow.sql("totals", QUERIES["totals"], spark=spark)
    check = job_of(spark, open_store(retain=100), flow, epochs=1).verify_view("totals")
    assert not check.is_equal
    assert "are not there and" in str(check)
    assert check.missing.num_rows


@pytest.mark.long("make views")
def test_a_changed_query_is_what_it_gives_of_all_rows(spark: SparkSession, open_store: OpenStore) -> None:
    store = open_store(retain=100)
    job = job_of(spark, store, declared(spark))
    before = rows(job, "cities")
    branch = job.branch("strict", views={"totals": TOTALS.format(6)})
    plan = str(branch.plan_replay())
    assert "totals (2)" in plan
    assert "cities" in plan
    assert "dear" not in plan.split("shares", maxsplit=1)[0], "nothing of it changed"
    branch.replay()
    for name in QUERIES:
        assert branch.verify_view(name).is_equal, str(branch.verify_view(name))
    assert rows(branch, "totals") != rows(job, "totals")
    assert rows(job, "cities") == before, "the main line is as it was"
    again = job.branch("strict", views={"totals": TOTALS.format(6)})
    assert rows(again, "totals") == rows(branch, "totals"), "the same call opens it again"

    from_the_begin = job.branch("history", at=0, views={"cities": CITIES.replace("sum(n)", "max(n)")})
    from_the_begin.replay()
    for t in (1, 2):
        assert from_the_begin.verify_view("cities", t).is_equal
    fresh = nosync.Job(declared(spark, totals=TOTALS.format(6)), open_store("fresh", retain=100), spark=spark, shards=2)
    inputs = Inputs(3)
    for t in range(3):
        fresh.advance(t, frames(spark, inputs.epoch(t)))
    assert rows(fresh, "cities") == rows(branch, "cities")


def test_other_queries_that_are_not_for_a_view(spark: SparkSession, open_store: OpenStore) -> None:
    flow = flow_over_inputs()
    flow.sql("pages", "SELECT page FROM clicks WHERE weight > 3", spark=spark)
    job = job_of(spark, open_store(retain=100), flow, epochs=2)
    with pytest.raises(nosync.UnknownStageError, match="no view 'page' .*did you mean 'pages'"):
        job.branch("other", views={"page": "SELECT page FROM clicks"})
    with pytest.raises(nosync.FlowError, match="view pages: .*UNRESOLVED_COLUMN"):
        job.branch("other", views={"pages": "SELECT pag FROM clicks"})


@pytest.mark.long("make views")
def test_an_upgrade_changes_and_adds_views(spark: SparkSession, open_store: OpenStore) -> None:
    inputs = Inputs(4)
    job = job_of(spark, open_store(retain=100), declared(spark), inputs)
    flow = declared(spark, totals=TOTALS.format(5), counts="SELECT person, count(*) AS n FROM orders GROUP BY person")
    job.upgrade(flow)
    job.advance(3, frames(spark, inputs.epoch(3)))
    for name in (*QUERIES, "counts"):
        assert job.verify_view(name).is_equal, str(job.verify_view(name))


def test_only_the_first_rows_are_recorded(spark: SparkSession, open_store: OpenStore) -> None:
    placed = "SELECT id, item, row_number() OVER (PARTITION BY item ORDER BY id) AS place FROM orders"
    store, inputs = open_store(), Inputs(3)
    flow = declared(
        spark,
        few=f"SELECT * FROM ({placed}) WHERE place < 3",
        some="SELECT id FROM orders ORDER BY id LIMIT 4 OFFSET 1",
    )
    with driver_runs(spark):
        job = job_of(spark, store, flow, inputs, epochs=1)
    recorded = {
        name: store.read(name).num_rows for name in store.stages() if name.startswith("over-") and "__" not in name
    }
    of_items = Counter(row["item"] for row in inputs.there["orders"].values())
    assert sorted(recorded.values()) == sorted([5, sum(min(2, n) for n in of_items.values())])
    assert sorted(row.id for row in job.read("some").collect()) == sorted(inputs.there["orders"])[1:5]


@pytest.mark.long("make views")
def test_lost_layers_of_views_come_back(spark: SparkSession, open_store: OpenStore) -> None:
    over = "SELECT id, rank() OVER (PARTITION BY item ORDER BY price) AS place FROM orders"
    store = open_store(retain=100)
    job = job_of(spark, store, declared(spark, places=over))
    before = {name: rows(job, name) for name in (*QUERIES, "places")}
    layers = store.directory.root / "layers"
    lost = [path for path in layers.iterdir() if not path.name.endswith("_changes") and path.name != "clicks"]
    assert any(path.name.startswith("over-") for path in lost)
    for path in lost:
        shutil.rmtree(path)
    report = job.recover()
    assert report.recomputed
    assert not report.unrecoverable
    assert {name: rows(job, name) for name in before} == before
    assert all(job.verify_view(name).is_equal for name in before)


@pytest.mark.long("make views")
def test_functions_of_dataframes_and_of_users(spark: SparkSession, open_store: OpenStore) -> None:
    from pyspark.sql import functions as F

    shout = F.udf(lambda text: None if text is None else text.upper() + "!", "string")
    spark.udf.register("shout", shout)
    flow = flow_over_inputs()
    flow.view("loud", lambda t: t["orders"].select("id", shout("item").alias("item")).where("id > 3"), spark=spark)
    flow.sql(
        "louder", "SELECT item, count(*) AS n FROM (SELECT shout(item) AS item FROM orders) GROUP BY item", spark=spark
    )
    flow.view(
        "cities", lambda t: t["orders"].join(t["people"], F.expr("person = pid")).groupBy("city").count(), spark=spark
    )
    job = job_of(spark, open_store(retain=100), flow, epochs=2)
    for name in flow.views:
        assert job.verify_view(name).is_equal, str(job.verify_view(name))


def test_functions_of_the_same_name_are_told_apart(spark: SparkSession, open_store: OpenStore) -> None:
    from pyspark.sql import functions as F

    flow = flow_over_inputs()
    for n in (1, 2):
        more = F.udf(lambda id, n=n: None if id is None else id + n, "bigint")  # it is asked of nulls, too
        flow.view(f"v{n}", lambda t, more=more: t["orders"].select(more("id").alias("id")), spark=spark)
    job = job_of(spark, open_store(retain=100), flow, epochs=1)
    assert all(job.verify_view(name).is_equal for name in flow.views)
    assert rows(job, "v1") != rows(job, "v2")


@pytest.mark.long("make views")
def test_a_flow_that_is_declared_again_goes_on(spark: SparkSession, open_store: OpenStore) -> None:
    from pyspark.sql import functions as F

    def again() -> nosync.Dataflow:
        shout = F.udf(lambda text: None if text is None else text.upper(), "string")
        flow = declared(
            spark,
            odd="SELECT id, filter(array(person, id), x -> x % 2 = 1) AS odd FROM orders",
            places="SELECT id, lag(transform(array(id), x -> x + 1)[0]) OVER (PARTITION BY upper(item) ORDER BY -id) AS b "
            "FROM orders",
            letters="SELECT id, explode(transform(split(item, ''), x -> upper(x))) AS letter FROM orders",
            hours="SELECT window(seen, '1 hour') AS w, count(*) AS n FROM clicks GROUP BY window(seen, '1 hour')",
        )
        flow.view("loud", lambda t: t["orders"].groupBy(shout("item").alias("item")).count(), spark=spark)
        return flow

    store, inputs = open_store(retain=100), Inputs(5)
    job_of(spark, store, again(), inputs, epochs=1)
    job = nosync.Job(again(), store, spark=spark, shards=2)  # it would be refused with other code
    job.advance(1, frames(spark, inputs.epoch(1)))
    for name in job.flow.stages.keys() & {"odd", "places", "letters", "hours", "loud", *QUERIES}:
        assert job.verify_view(name).is_equal, str(job.verify_view(name))


@pytest.mark.long("make views")
def test_sinks_take_views_and_lists_are_in_order(spark: SparkSession, open_store: OpenStore) -> None:
    flow = declared(spark, prices="SELECT item, collect_list(price) AS prices FROM orders GROUP BY item")
    given: list[tuple[int, int]] = []
    sink = nosync.CallbackSink(lambda changes, t: given.append((t, changes.count())))
    job = nosync.Job(flow, open_store(retain=100), spark=spark, shards=2, sinks={"totals": sink})
    inputs = Inputs(6)
    for t in range(2):
        job.advance(t, frames(spark, inputs.epoch(t)))
    assert given == [(t, job.changes("totals", t - 1, t).count()) for t in range(2)]
    assert all(n for _, n in given)
    lists = [row.prices for row in job.read("prices").collect()]
    assert any(len(one) > 1 for one in lists)
    assert all(one == sorted(one) for one in lists)


def test_what_is_nearly_equal_is_equal_and_no_more() -> None:
    from nosync.spark.plans.verifying import different

    def table(*values: Any) -> pa.Table:
        return pa.table({"k": ["a"] * len(values), "x": pa.array(values, pa.float64())})

    third = 1 / 3
    for mine, theirs in (
        ((third, -0.0), (third + 1e-16, 0.0)),
        ((float("nan"),), (float("nan"),)),
        ((1.0, 1.0), (1.0, 1.0)),
    ):
        assert [rows.num_rows for rows in different(table(*mine), table(*theirs))] == [0, 0]
    extra, missing = different(table(1.0, 1.0, 2.0), table(1.0, 2.001))
    assert (extra["x"].to_pylist(), missing["x"].to_pylist()) == ([1.0, 2.0], [2.001])


@pytest.mark.few(1, "make views")
@pytest.mark.parametrize(
    "query",
    [
        "SELECT person AS item, count(*) AS n FROM orders GROUP BY person, item",
        "SELECT count(*) AS item FROM orders GROUP BY item",
        "SELECT item AS key, count(*) AS name, sum(price) AS persist, max(price) AS self FROM orders GROUP BY item",
        "SELECT item AS n, count(*) AS item, count(*) AS again FROM orders GROUP BY item",
        "SELECT count(*) AS n, item, sum(price) AS person FROM orders GROUP BY item",
    ],
)
def test_columns_may_be_called_as_others_are(spark: SparkSession, open_store: OpenStore, query: str) -> None:
    flow = flow_over_inputs()
    flow.sql("v", query, spark=spark)
    check = job_of(spark, open_store(retain=100), flow, epochs=1).verify_view("v")
    assert check.is_equal, str(check)
    assert check.rows > 1


def test_stages_of_any_name_are_inputs(spark: SparkSession, open_store: OpenStore) -> None:
    flow = flow_over_inputs()
    flow["orders"].where("with-price", "price IS NOT NULL").map("doubled-1", lambda rows: rows)
    flow.sql("made", "SELECT item, count(*) AS n FROM `doubled-1` GROUP BY item", spark=spark)
    flow["made"].map("after", lambda rows: rows)
    job = job_of(spark, open_store(retain=100), flow, epochs=2)
    assert job.verify_view("made").is_equal
    assert rows(job, "after") == rows(job, "made")


@pytest.mark.parametrize(
    ("declare", "said"),
    [
        (lambda flow, spark: flow.sql("orders", "SELECT 1", spark=spark), "two stages are named 'orders'"),
        (lambda flow, spark: flow.sql("A", "SELECT 1", spark=spark), "view name 'A' is not a valid name"),
        (lambda flow, spark: flow.sql("v", 7, spark=spark), "view v: the query is 7, expected SQL text"),
        (lambda flow, spark: flow.view("v", "SELECT 1", spark=spark), "view v: 'SELECT 1' is no function"),
        (lambda flow, spark: flow.view("v", lambda t: 7, spark=spark), "view v: its function returned int"),
        (lambda flow, spark: flow.view("v", lambda t: spark.range(3), spark=spark), "view v: .*no input of the flow"),
        (lambda flow, spark: flow.view("v", lambda t: t["x"], spark=spark), "no input 'x'.*orders, people, clicks"),
        (lambda flow, spark: flow.sql("v", "SELECT * FROM orders", spark="spark"), "SparkSession"),
    ],
)
def test_mistakes_are_told_in_the_call(spark: SparkSession, declare: Any, said: str) -> None:
    flow = flow_over_inputs()
    with pytest.raises(nosync.NosyncError, match=f"(?s){said}"):
        declare(flow, spark)
    assert not flow.views


def test_temporary_views_of_the_session_stay_what_they_were(spark: SparkSession) -> None:
    spark.range(3).createOrReplaceTempView("orders")
    try:
        declared(spark)
        assert spark.table("orders").count() == 3
        assert not {row.tableName for row in spark.sql("SHOW TABLES").collect()} & {"people", "clicks", "totals"}
    finally:
        spark.catalog.dropTempView("orders")


@pytest.mark.long("make views")
@pytest.mark.parametrize("name", ["some", "orders"])
def test_a_query_may_name_what_it_makes_of_an_input(spark: SparkSession, open_store: OpenStore, name: str) -> None:
    """Also by the name of the input, which is the input again for the view after it."""

    def dear(tables: Any) -> DataFrame:
        session = tables["orders"].sparkSession
        tables["orders"].where("price > 2").createOrReplaceTempView(name)
        session.sql(f"SELECT * FROM {name} WHERE id IN (SELECT max(id) FROM {name} GROUP BY item)").createTempView(
            "most"
        )
        try:
            return session.sql("SELECT id, price FROM most WHERE item IS NOT NULL")
        finally:
            session.catalog.dropTempView("most")

    flow = flow_over_inputs()
    flow.view("dear", dear, spark=spark)
    flow.sql("both", "SELECT count(*) AS n, (SELECT count(*) FROM dear) AS dear FROM orders", spark=spark)
    job = job_of(spark, open_store(retain=100), flow, epochs=2)
    orders = job.read("orders")
    most = {row[0] for row in orders.where("price > 2").groupBy("item").agg({"id": "max"}).select("max(id)").collect()}
    kept = Counter((row.id, row.price) for row in orders.where("item IS NOT NULL").collect() if row.id in most)
    assert kept
    assert rows(job, "dear") == kept
    assert rows(job, "both") == Counter([(orders.count(), kept.total())])
    for view in ("dear", "both"):
        assert job.verify_view(view).is_equal, str(job.verify_view(view))


@pytest.mark.long("make views")
def test_whoever_reads_the_store_gets_the_rows_of_a_view_and_not_its_changes(
    spark: SparkSession, open_store: OpenStore, tmp_path: Path
) -> None:
    inputs, store = Inputs(11), open_store()
    flow = declared(spark, joined="SELECT id, price, city FROM orders JOIN people ON item = city WHERE price > 1")
    job = nosync.Job(flow, store, spark=spark, shards=1)
    for t in range(6):
        if t == 3:
            job.rescale(2)  # a row may be taken back in another shard than it came in
        job.advance(t, frames(spark, inputs.epoch(t)))
    kinds = set(store.changes("joined", -1, 5)["_change_type"].to_pylist())
    assert "delete" in kinds, "the test is of rows that go"
    for t in (2, 5):
        expected = Counter(tuple(row) for row in job.read("joined", as_of=t).collect())
        assert expected
        of_store = store.read("joined", t)
        assert of_store.schema == store.schema("joined", t)
        assert Counter(zip(*of_store.to_pydict().values(), strict=True)) == expected
        names = nosync.views(spark, store, t, prefix="seen_")
        assert Counter(tuple(row) for row in spark.sql("SELECT * FROM seen_joined").collect()) == expected
        for name in names.values():
            spark.catalog.dropTempView(name.strip("`"))
        target = tmp_path / f"{t}.parquet"
        assert main_code(["export", store.source_path, "joined", str(target), "--as-of", str(t)]) == 0
        assert Counter(zip(*pq.read_table(target).to_pydict().values(), strict=True)) == expected
    with pytest.raises(nosync.InvalidInputError, match="read whole"):
        store.read("joined", shard=0)


def main_code(words: list[str]) -> int:
    try:
        main(words)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.mark.few(1, "make views")
@pytest.mark.parametrize("how", ["upgrade", "new job", "branch"])
def test_a_changed_view_over_rows_that_only_come_begins_anew(
    spark: SparkSession, open_store: OpenStore, how: str
) -> None:
    """The stage that filters is another one, is not recorded, and takes no rows back: the view begins anew all the same."""
    text = "SELECT k, sum(n) AS total, count(*) AS times FROM rows WHERE n > {} GROUP BY k"

    def flow_of(least: int) -> nosync.Dataflow:
        flow = nosync.Dataflow("plain")
        flow.source("rows", "k string, n int")
        flow.sql("totals", text.format(least), spark=spark)
        return flow

    store = open_store()
    job = nosync.Job(flow_of(0), store, spark=spark, shards=2)
    for t in range(3):
        job.advance(t, {"rows": spark.createDataFrame([("a", t), ("b", 5)], "k string, n int")})
    if how == "branch":
        job = job.branch("other", views={"totals": text.format(2)})
        job.replay()
    elif how == "upgrade":
        plan = job.upgrade(flow_of(2))
        assert plan is not None
        assert plan.begins_anew == ("totals",)
    else:
        job = nosync.Job(flow_of(2), store, spark=spark, shards=2, upgrade=True)
    if how != "branch":
        job.advance(3, {"rows": spark.createDataFrame([("a", 4)], "k string, n int")})
    expected = {("b", 15, 3)} if how == "branch" else {("b", 15, 3), ("a", 4, 1)}
    assert {tuple(row) for row in job.read("totals").collect()} == expected
    assert job.verify_view("totals").is_equal


def test_an_error_of_an_epoch_names_the_view(spark: SparkSession, open_store: OpenStore) -> None:
    flow = nosync.Dataflow("f")
    flow.source("rows", "k int, n bigint")
    flow.sql("running", "SELECT k, sum(n) OVER (PARTITION BY k) AS n FROM rows", spark=spark)
    flow.sql("fine", "SELECT k, count(*) AS c FROM rows GROUP BY k", spark=spark)
    job = nosync.Job(flow, open_store(), spark=spark, shards=1)
    rows = spark.createDataFrame([(1, 2**62), (1, 2**62)], "k int, n bigint")
    with pytest.raises(nosync.StageError, match="^view running: stage over-.* shard 0of1 timestamp 0: ") as raised:
        job.advance(0, {"rows": rows})
    assert raised.value.stage.startswith("over-")
