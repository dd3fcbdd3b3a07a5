"""Projects of Declarative Pipelines as their authors have them: run, run again, edited, rolled back, and wrong."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import nosync
from nosync.cli import main
from nosync.cli.run import _planned
from nosync.pipelines.running import branch_off
from tests.pipelines.projects import Project, Row
from tests.pipelines.texts import MORE, SHOP, SMALL, SQL, counted

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def order(customer: str, item: str, amount: float) -> Row:
    return {"customer": customer, "item": item, "amount": amount}


def change(customer: str, city: str, seq: int, op: str = "U") -> Row:
    return {"customer": customer, "city": city, "seq": seq, "op": op}


@pytest.fixture
def shop(spark: SparkSession, tmp_path: Path) -> Project:
    project = Project(tmp_path / "shop", spark, shop=SHOP, a=SQL, more=MORE)
    project.give("orders", [order("ann", "tea", 5), order("bob", "ink", 20), order("cy", "tea", -1)])
    project.give("feed", [change("ann", "Rome", 1), change("bob", "Bern", 1)])
    project.give("visits", [{"customer": "dee"}])
    project.write_table("items", [{"item": "tea", "kind": "drink"}, {"item": "ink", "kind": "tool"}])
    return project


@pytest.fixture
def small(spark: SparkSession, tmp_path: Path) -> Project:
    project = Project(tmp_path / "small", spark, small=SMALL)
    project.give("orders", [{"customer": "ann", "amount": 5}, {"customer": "bob", "amount": 20}])
    return project


@pytest.mark.long
def test_a_project_runs_and_what_comes_later_is_added(shop: Project) -> None:
    report = shop.run()
    assert report.rows == {
        "orders": 3, "big": 1, "totals": 2, "levels": 1, "seen": 4, "people": 2, "feed_input": 2, "feed": 2,
        "cities": 2, "items": 2, "kinds": 2,
    }  # fmt: skip
    assert shop.rows("totals") == counted(("ann", 1, 5.0), ("bob", 1, 20.0))
    assert shop.rows("levels") == counted((2, 1))
    assert shop.rows("cities") == counted(("Rome", 5.0), ("Bern", 20.0))
    assert shop.rows("kinds") == counted(("drink", 2), ("tool", 1))
    assert shop.rows("seen") == counted(("ann",), ("bob",), ("cy",), ("dee",))

    assert shop.run().epochs == (), "nothing came"
    last = len(report.epochs) - 1
    shop.give("orders", [order("ann", "pen", 30)])
    # Of the same time, too late, deleted, and too late after the deletion.
    late = [change("ann", "Pisa", 2), change("bob", "Bern", 5, "D"), change("bob", "Lund", 4)]
    shop.give("feed", [change("ann", "Oslo", 3), *late])
    kinds = {"tea": "plant", "ink": "tool", "pen": "tool"}
    shop.write_table("items", [{"item": item, "kind": kind} for item, kind in kinds.items()])
    again = shop.run()
    assert len(again.epochs) == 3
    assert shop.rows("totals") == counted(("ann", 2, 35.0), ("bob", 1, 20.0))
    assert shop.rows("people") == counted(("Oslo", "ann"))
    assert shop.rows("cities") == counted(("Oslo", 35.0))
    assert shop.rows("kinds") == counted(("plant", 2), ("tool", 2))
    assert shop.rows("big") == counted((20.0, "bob"), (30.0, "ann"))
    assert shop.rows("kinds", as_of=last) == counted(("drink", 2), ("tool", 1))
    assert shop.rows("people", as_of=last) == counted(("Rome", "ann"), ("Bern", "bob"))


SINKS = """
@dp.table
def orders():
    return spark.readStream.schema("customer string, amount double").json("data/orders")

dp.create_sink("large", "parquet", {"path": "out/large"})

@dp.append_flow(target="large")
def from_orders():
    return spark.readStream.table("orders").where("amount > 10")

dp.create_sink("all", "delta", {"path": "out/all"})

@dp.append_flow(target="all")
def whole():
    return spark.readStream.table("orders").select("customer")
"""


def _in_files(project: Project, columns: str = "customer, amount, epoch") -> Counter[tuple[Any, ...]]:
    frame = project.spark.read.parquet(str(project.root / "out" / "large"))
    return Counter(tuple(row) for row in frame.selectExpr(*columns.split(", ")).collect())


def test_sinks_get_what_comes_once_and_an_edit_goes_on(spark: SparkSession, tmp_path: Path) -> None:
    project = Project(tmp_path / "p", spark, sinks=SINKS)
    project.give("orders", [{"customer": "ann", "amount": 5}, {"customer": "bob", "amount": 20}])
    report = project.run()
    assert report.rows == {"orders": 2, "large": 1, "all": 2}
    assert _in_files(project) == counted(("bob", 20.0, 0))
    assert project.run().epochs == (), "nothing came"

    project.give("orders", [{"customer": "cy", "amount": 30}, {"customer": "dee", "amount": 8}])
    project.write("sinks", SINKS.replace("amount > 10", "amount > 7"))
    with nosync.open(project.root / "store") as store:
        branch_off(project.declare(), store, "lower", None)
    assert _in_files(project) == counted(("bob", 20.0, 0)), "a branch gives nothing"
    project.run()
    assert _in_files(project) == counted(("bob", 20.0, 0), ("cy", 30.0, 1), ("dee", 8.0, 1))
    assert _in_files(project, "_change_type") == counted(("insert",), ("insert",), ("insert",))
    assert project.rows("large") == counted((20.0, "bob"), (30.0, "cy"), (8.0, "dee"))
    deltalake = pytest.importorskip("deltalake")
    table = deltalake.DeltaTable(str(project.root / "out" / "all")).to_pyarrow_table()
    assert sorted(table["customer"].to_pylist()) == ["ann", "bob", "cy", "dee"]


@pytest.mark.long("make spark")
def test_equal_rows_of_a_table_are_counted_and_one_of_them_may_go(spark: SparkSession, tmp_path: Path) -> None:
    view = "@dp.materialized_view\ndef items():\n    return spark.read.schema('item string, n int').json('data/items.json')"
    project = Project(tmp_path / "p", spark, items=view)
    rows: list[Row] = [
        {"item": "tea"},
        {"item": "tea"},
        {"item": None, "n": 1},
        {"item": None, "n": 1},
        {"item": "ink", "n": 0},
    ]
    project.write_table("items", rows)
    project.run()
    assert project.rows("items") == counted(("tea", None), ("tea", None), (None, 1), (None, 1), ("ink", 0))
    project.write_table("items", [rows[4], rows[1], rows[2]])
    assert [one.rows_in for one in project.run().epochs] == [2], "only the two that went"
    assert project.rows("items") == counted(("tea", None), (None, 1), ("ink", 0))
    project.write_table("items", [])
    project.run()
    assert project.rows("items") == Counter()


@pytest.mark.long
def test_windows_of_a_streaming_table_come_once_when_they_are_over(spark: SparkSession, tmp_path: Path) -> None:
    text = (
        "@dp.table\ndef busy():\n"
        "    clicks = spark.readStream.schema('at timestamp, k string').json('data/clicks').withWatermark('at', '5 minutes')\n"
        "    return clicks.groupBy(F.window('at', '10 minutes'), 'k').agg(F.count('*').alias('n')).select('k', 'n')\n"
    )
    project = Project(tmp_path / "p", spark, busy=text)

    def give(*clicks: tuple[int, str]) -> None:
        project.give("clicks", [{"at": f"2026-01-01T12:{minute:02}:00Z", "k": k} for minute, k in clicks])
        project.run()

    give((0, "a"), (4, "b"), (7, "a"))
    assert project.rows("busy") == Counter()
    give((21, "a"))
    give((22, "a"))
    closed = counted(("a", 2), ("b", 1))
    assert project.rows("busy") == closed
    give((3, "a"), (50, "a"))
    give((51, "b"))
    assert project.rows("busy") == closed + counted(("a", 2)), "what came late counts no more"


def test_a_run_that_died_goes_on_and_no_row_comes_twice(small: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    advance = nosync.Job.advance_batch

    def dying(job: nosync.Job, query: str, batch: int, inputs: Any) -> Any:
        advance(job, query, batch, inputs)  # sealed, and Spark never hears of it
        raise nosync.StorageError("the disk went away")

    small.run(shards=1)
    small.give("orders", [{"customer": "ann", "amount": 30}])
    monkeypatch.setattr(nosync.Job, "advance_batch", dying)
    with pytest.raises(nosync.StorageError, match="the disk went away"):
        small.run()
    monkeypatch.undo()
    assert small.run().epochs == (), "the batch that Spark gives again is passed over"
    assert small.rows("totals") == counted(("ann", 35.0), ("bob", 20.0))
    assert small.rows("orders") == counted((5.0, "ann"), (20.0, "bob"), (30.0, "ann"))


@pytest.mark.long("make spark")
def test_what_an_attempt_recorded_that_died_gives_way_to_other_rows(
    small: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the runs more rows came, which Spark puts into the first batch: nobody saw what the attempt recorded."""

    def dying(sealing: Any, *_: Any) -> Any:
        raise nosync.StorageError("the disk went away")

    monkeypatch.setattr("nosync.job.sealing.Sealing.seal", dying)
    with pytest.raises(nosync.StorageError, match="the disk went away"):
        small.run()
    monkeypatch.undo()
    shutil.rmtree(small.root / "store-checkpoints")
    small.give("orders", [{"customer": "ann", "amount": 30}])
    small.run()
    assert small.rows("totals") == counted(("ann", 35.0), ("bob", 20.0))


@pytest.mark.long
def test_a_checkpoint_and_a_store_that_are_not_of_one_another_are_refused(small: Project) -> None:
    small.run()
    small.give("orders", [{"customer": "ann", "amount": 30}])
    small.run()
    checkpoints = small.root / "store-checkpoints"
    kept = checkpoints.rename(small.root / "kept")
    with pytest.raises(nosync.FlowError, match="rows would come twice"):
        small.run()
    kept.rename(checkpoints)
    with nosync.open(small.root / "store") as store:
        store.rewind(0)
    with pytest.raises(nosync.FlowError, match="no batch again that was committed"):
        small.run()
    shutil.rmtree(small.root / "store")
    with pytest.raises(nosync.FlowError, match="has none"):
        small.run()


def test_an_edited_project_goes_on_with_views_anew_and_streaming_tables_as_they_are(small: Project) -> None:
    small.run()
    small.write(
        "small",
        SMALL.replace("amount > 0", "amount > 10").replace('"amount > 10")\n\n@dp.temp', '"amount > 1")\n\n@dp.temp'),
    )
    report = small.run()
    assert report.upgrade is not None
    assert report.upgrade.begins_anew == ("totals",)
    assert "big" in report.upgrade.goes_on
    assert [one.rows_in for one in report.epochs] == [0], "an epoch of no rows shows what the edit gives"
    assert small.rows("totals") == counted(("bob", 20.0))
    small.give("orders", [{"customer": "dee", "amount": 12}, {"customer": "ann", "amount": 2}])
    small.run()
    assert small.rows("totals") == counted(("bob", 20.0), ("dee", 12.0))
    assert small.rows("big") == counted((20.0, "bob"), (12.0, "dee"), (2.0, "ann")), "5.0 came before"


@pytest.mark.long
def test_a_view_that_is_edited_may_have_other_columns(small: Project) -> None:
    """Each epoch has the columns that it had."""
    small.run()
    halves = "SELECT customer, count(*) AS n, sum(amount) / 2 AS total FROM good GROUP BY customer, amount > 10"
    small.write("small", SMALL.replace("SELECT customer, sum(amount) AS total FROM good GROUP BY customer", halves))
    small.give("orders", [{"customer": "ann", "amount": 30}, {"customer": "ann", "amount": 1}])
    report = small.run()
    assert report.upgrade is not None
    assert "totals" in report.upgrade.begins_anew
    assert small.rows("totals") == counted(("ann", 2, 3.0), ("ann", 1, 15.0), ("bob", 1, 10.0))
    assert small.rows("totals", as_of=0) == counted(("ann", 5.0), ("bob", 20.0))


def test_a_run_that_died_after_an_upgrade_still_shows_the_edit(small: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    small.run()
    small.write("small", SMALL.replace('table("orders").where("amount > 0")', 'table("orders").where("amount > 10")'))

    def dying(*_: Any) -> Any:
        raise nosync.StorageError("the disk went away")

    monkeypatch.setattr("nosync.pipelines.running.Run._compare_tables", dying)
    with pytest.raises(nosync.StorageError, match="the disk went away"):
        small.run()
    monkeypatch.undo()
    small.run()
    assert small.rows("totals") == counted(("bob", 20.0))
    assert small.run().epochs == ()


@pytest.mark.long
def test_an_edit_is_asked_of_the_recorded_rows_on_a_branch(small: Project) -> None:
    small.run()
    small.give("orders", [{"customer": "ann", "amount": 30}])
    small.run()
    before = small.rows("totals")
    small.write("small", SMALL.replace('table("orders").where("amount > 0")', 'table("orders").where("amount > 10")'))
    small.give("orders", [{"customer": "eve", "amount": 99}])  # not read: a branch is of what is recorded
    with nosync.open(small.root / "store") as store:
        plan, report = branch_off(small.declare(), store, "strict", at=None)
        assert "orders" not in str(plan.computed)
        assert report.replay is not None
        branch_off(small.declare(), store, "strict", at=None)  # the same again changes nothing
        with pytest.raises(nosync.InvalidInputError, match="epoch 9 is not sealed: the store has 0 to 1"):
            branch_off(small.declare(), store, "later", at=9)
        with pytest.raises(nosync.InvalidInputError, match="runs go on"):
            branch_off(small.declare(), store, "main", at=None)
    assert small.rows("totals", branch="strict") == counted(("bob", 20.0), ("ann", 30.0))
    assert small.rows("totals") == before
    small.write(
        "more", "@dp.table\ndef visits():\n    return spark.readStream.schema('customer string').json('data/')\n"
    )
    with (
        nosync.open(small.root / "store") as store,
        pytest.raises(nosync.FlowError, match="source visits-input is not recorded"),
    ):
        branch_off(small.declare(), store, "more", at=None)


@pytest.mark.long("make spark")
def test_a_table_is_added_to_a_project_and_another_taken_out(small: Project) -> None:
    small.write("old", "CREATE MATERIALIZED VIEW many AS SELECT count(*) AS n FROM orders;")
    assert "many" in small.run().rows
    (small.root / "transformations" / "old.sql").unlink()
    small.write(
        "more", "@dp.table\ndef visits():\n    return spark.readStream.schema('customer string').json('data/visits')\n"
    )
    small.give("visits", [{"customer": "ann"}, {"customer": "dee"}])
    report = small.run()
    assert report.rows["visits"] == 2
    assert "many" not in report.rows
    assert small.rows("visits") == counted(("ann",), ("dee",))
    assert small.rows("many", as_of=0) == counted((2,))


@pytest.mark.long("make spark")
def test_what_is_edited_in_a_streaming_table_reads_no_stream_again(small: Project) -> None:
    small.run()
    edited = SMALL.replace('json("data/orders")\n', 'json("data/orders").where("amount > 6")\n', 1)
    small.write("small", edited)
    small.run()
    small.give("orders", [{"customer": "eve", "amount": 1}, {"customer": "eve", "amount": 8}])
    small.run()
    assert small.rows("orders") == counted((5.0, "ann"), (20.0, "bob"), (8.0, "eve"))
    assert small.rows("totals") == counted(("ann", 5.0), ("bob", 20.0), ("eve", 8.0))


def test_an_input_under_another_name_is_refused_and_nothing_changes(small: Project) -> None:
    small.run()
    small.write("small", SMALL.replace("def orders():", "def bills():").replace('"orders"', '"bills"'))
    with pytest.raises(nosync.FlowError, match="input orders-input is gone, and bills-input is new"):
        small.run()
    with nosync.open(small.root / "store") as store:
        assert [*store.branches()] == ["main"]


@pytest.mark.long
def test_datasets_that_are_added_have_what_is_recorded(small: Project) -> None:
    small.run()
    small.write("more", "CREATE MATERIALIZED VIEW large AS SELECT customer FROM orders WHERE amount > 10;")
    text = "@dp.table\ndef names():\n    return spark.readStream.table('orders').select('customer')\n"
    small.write("names", text)
    small.run()
    assert small.rows("large") == counted(("bob",))
    assert small.rows("names") == counted(("ann",), ("bob",))
    small.give("orders", [{"customer": "eve", "amount": 30}])
    small.run()
    assert small.rows("large") == counted(("bob",), ("eve",))
    assert small.rows("names") == counted(("ann",), ("bob",), ("eve",))


@pytest.mark.long
def test_a_streaming_table_takes_no_rows_back_where_a_view_below_it_is_edited(small: Project) -> None:
    """It goes on with the new query. And an edited materialized view that only filters takes rows back."""
    below = (
        "@dp.temporary_view\ndef few():\n    return spark.readStream.table('orders').where('amount > {}')\n"
        "@dp.table\ndef names():\n    return spark.readStream.table('few').select('customer')\n"
    )
    view = "CREATE MATERIALIZED VIEW large AS SELECT customer FROM orders WHERE amount > {};"
    small.write("below", below.format(1))
    small.write("view", view.format(1))
    small.run()
    assert small.rows("large") == small.rows("names") == counted(("ann",), ("bob",))
    small.write("view", view.format(10))
    small.run()
    assert small.rows("large") == counted(("bob",))
    small.write("below", below.format(10))
    small.give("orders", [{"customer": "cy", "amount": 5}, {"customer": "dee", "amount": 20}])
    small.run()
    assert small.rows("names") == counted(("ann",), ("bob",), ("dee",))
    assert small.rows("large") == counted(("bob",), ("dee",))


@pytest.mark.long("make spark")
def test_a_dataset_that_was_taken_out_comes_back_with_what_all_rows_give(small: Project) -> None:
    small.write(
        "more", "CREATE MATERIALIZED VIEW counts AS SELECT customer, count(*) AS n FROM orders GROUP BY customer;"
    )
    small.run()
    more = small.root / "transformations" / "more.sql"
    text = more.read_text()
    more.unlink()
    small.give("orders", [{"customer": "dee", "amount": 40}])
    small.run()
    with nosync.open(small.root / "store") as store, pytest.raises(nosync.UnknownStageError):
        store.read("counts")
    more.write_text(text)
    small.run()
    assert small.rows("counts") == counted(("ann", 1), ("bob", 1), ("dee", 1))


@pytest.mark.long("make spark")
def test_an_input_that_was_taken_out_comes_back_with_its_rows(small: Project) -> None:
    """Also what went from it meanwhile is found."""
    text = "@dp.materialized_view\ndef items():\n    return spark.read.schema('k int').json('data/items')\n"
    small.give("items", [{"k": 1}, {"k": 2}])
    first = next((small.root / "data" / "items").iterdir())
    small.write("items", "from pyspark import pipelines as dp\n\n" + text)
    small.run()
    assert small.rows("items") == counted((1,), (2,))
    (small.root / "transformations" / "items.py").unlink()
    small.give("orders", [{"customer": "dee", "amount": 40}])
    small.run()
    small.give("items", [{"k": 2}, {"k": 3}])
    first.unlink()
    small.write("items", "from pyspark import pipelines as dp\n\n" + text)
    small.run()
    assert small.rows("items") == counted((2,), (3,))


@pytest.mark.long("make spark")
def test_an_auto_cdc_that_is_defined_before_its_table_begins_anew(spark: SparkSession, tmp_path: Path) -> None:
    feed = MORE[: MORE.index("@dp.materialized_view")]
    text = """dp.create_auto_cdc_flow(target="people", source="feed_input", keys=["customer"], sequence_by=F.col("seq"){})
dp.create_streaming_table("people")
"""
    project = Project(tmp_path / "p", spark, feed=feed, cdc=text.format(""))
    project.give("feed", [change("ann", "Rome", 1), change("bob", "Bern", 1)])
    project.run()
    assert project.rows("people") == counted(("Rome", "ann", "U", 1), ("Bern", "bob", "U", 1))
    project.write("cdc", "\n# a line more is no edit\n" + text.format(""))
    assert project.run().upgrade is None
    project.write("cdc", text.format(", apply_as_deletes=\"op = 'D'\""))
    project.give("feed", [change("bob", "Bern", 2, "D")])
    project.run()
    assert project.rows("people") == counted(("Rome", "ann", "U", 1))


def test_a_dataset_without_a_key_is_compared_by_its_rows(small: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """`nosync run --branch` names the command, so it has to work for whatever a dataset is."""
    plain = "\n\n@dp.materialized_view\ndef plain():\n    return spark.table('orders').where('amount > {}')\n"
    small.write("more", plain.format(0))
    small.run()
    small.give("orders", [{"customer": "ann", "amount": 30}])
    small.run()
    small.write("more", plain.format(25))
    with nosync.open(small.root / "store") as store:
        branch_off(small.declare(), store, "strict", at=None)
        assert store.key("plain") == ()
        found = store.diff("plain", "main", "strict")
        of_strict, of_main = (store.read("plain", branch=branch).num_rows for branch in ("strict", "main"))
    assert set(found.column("_diff").to_pylist()) == {"only_a"}
    assert sum(found.column("n_a").to_pylist()) == of_main - of_strict > 0
    main(["diff", str(small.root / "store"), "plain", "main", "strict"])
    assert f"{found.num_rows} only in a, 0 only in b" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["diff", str(small.root / "store"), "plain", "main", "strict", "--html", str(small.root / "page.html")])
    assert "stage plain has no key" in capsys.readouterr().err


def test_a_database_is_part_of_no_name_in_queries(spark: SparkSession, tmp_path: Path) -> None:
    spark.sql("CREATE DATABASE IF NOT EXISTS shop_db")
    try:
        project = Project(tmp_path / "p", spark, b="CREATE MATERIALIZED VIEW b AS SELECT * FROM shop_db.a;")
        project.write("a", "CREATE MATERIALIZED VIEW shop_db.a AS SELECT id FROM range(3);")
        spec = project.root / "spark-pipeline.yml"
        spec.write_text(spec.read_text() + "database: shop_db\n")
        with pytest.raises(
            nosync.FlowError, match=r"shop_db.a: datasets of a project have names of one part here: read a"
        ):
            project.declare()
        spec.write_text(spec.read_text().replace("shop_db", "no_such_db"))
        with pytest.raises(nosync.InvalidInputError, match="no_such_db"):
            project.declare()
    finally:
        spark.sql("DROP DATABASE shop_db CASCADE")


def test_what_a_run_says_names_epochs_and_what_is_read(small: Project) -> None:
    said: list[str] = []
    small.run(said=said.append)
    assert any(text.startswith("epoch 0: ") for text in said)
    assert any("FileSource" in text for text in said)


def test_the_store_of_another_flow_is_left_alone_and_a_plan_makes_none(small: Project) -> None:
    (small.root / "empty").mkdir()
    assert _planned(small.declare(), small.root / "empty", alone=False) is None
    assert not any((small.root / "empty").iterdir())
    with nosync.open(small.root / "store") as store:
        store.append("delays", t=0, rows=pa.table({"k": [1]}), key=["k"])
        store.seal(0)
    with pytest.raises(nosync.FlowError, match="has delays, and nothing of this project"):
        small.run()
    with nosync.open(small.root / "store", read_only=True) as store:
        assert (store.last_sealed(), [*store.branches()]) == (0, ["main"])
