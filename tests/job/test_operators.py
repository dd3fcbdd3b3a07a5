"""Operators as Spark runs them: expressions in the JVM, shuffles of several inputs, levels, rescaling, fencing."""

from __future__ import annotations

import datetime
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import nosync
from tests.conftest import OpenStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

ORDERS = "customer string, item string, n bigint, at timestamp"
CUSTOMERS = "customer string, city string"
START = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)


def orders(t: int) -> list[tuple[Any, ...]]:
    minutes = [10 * t + i - 20 * (i == 0) for i in range(7 + t)]  # the first one comes late
    return [
        (f"c{(i + t) % 5}", f"i{i % 3}", i + t, START + datetime.timedelta(minutes=m)) for i, m in enumerate(minutes)
    ]


def customers(t: int) -> list[tuple[Any, ...]]:
    return [(f"c{t}", "Zürich" if t % 2 else "London")]


def frames(spark: SparkSession, t: int) -> dict[str, DataFrame]:
    return {
        "orders": spark.createDataFrame(orders(t), ORDERS),
        "customers": spark.createDataFrame(customers(t), CUSTOMERS),
    }


def everything(spark: SparkSession) -> nosync.Dataflow:
    """One flow with every kind of stage that crosses between Python and the JVM."""
    prices = spark.createDataFrame([("i0", 1.5), ("i1", 2.0), ("i9", 9.0)], "item string, price double")
    flow = nosync.Dataflow("shop")
    source, people = flow.source("orders", ORDERS), flow.source("customers", CUSTOMERS)
    some = source.where("some", "n > 1").select("less", "customer", "item", "n", "at", "n * 2 AS twice")
    priced = some.join_static("priced", prices, on=["item"]).select("money", "customer", "n * price AS money")
    money = priced.aggregate("money_of", key=["customer"], money=nosync.sum("money"), n=nosync.count())
    # The expressions see the rows that come and go of a stage that changes.
    rich = money.where("rich", "money > 10").select("rich_names", "upper(customer) AS name", "money", persist="memory")
    rich.aggregate("how_rich", key=["name"], n=nosync.count(), money=nosync.sum("money"))
    source.join("located", people, on=["customer"], how="left")
    source.select("names", "customer").union("both", people.select("people_names", "customer")).dedupe("known")
    source.window("by_window", key=["item"], time="at", size="10 minutes", slide="5 minutes", watermark="0 minutes",
                  n=nosync.count())  # fmt: skip
    return flow


def expected(until: int) -> dict[str, Any]:
    price = {"i0": 1.5, "i1": 2.0}
    all_orders = [o for t in range(until + 1) for o in orders(t)]
    city = {c: town for t in range(until + 1) for c, town in customers(t)}
    money: Counter[str] = Counter()
    for customer, item, n, _ in all_orders:
        if n > 1 and item in price:
            money[customer] += n * price[item]
    return {
        "money_of": dict(money),
        "how_rich": {c.upper(): m for c, m in money.items() if m > 10},
        "located": Counter((c, i, n, city.get(c)) for c, i, n, _ in all_orders),
        "known": {c for c, *_ in all_orders} | set(city),
    }


def check(store: nosync.Store, t: int) -> None:
    """Without Spark, which takes longer for each read than for an epoch's stage."""
    want = expected(t)
    assert {r["customer"]: r["money"] for r in read(store, "money_of", t)} == want["money_of"]
    assert {r["name"]: r["money"] for r in read(store, "how_rich", t)} == want["how_rich"]
    located = Counter((r["customer"], r["item"], r["n"], r["city"]) for r in read(store, "located", t))
    assert located == want["located"]
    assert {r["customer"] for r in read(store, "known", t)} == want["known"]


def read(store: nosync.Store, stage: str, t: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = store.read(stage, as_of=t).to_pylist()
    return rows


def check_with_spark(job: nosync.Job, t: int) -> None:
    want = expected(t)
    assert {r.customer: r.money for r in job.read("money_of", as_of=t).collect()} == want["money_of"]
    # A stateless stage over rows that change reads as the rows that are left.
    assert {r.name: r.money for r in job.read("rich_names", as_of=t).collect()} == want["how_rich"]
    located = job.read("located", as_of=t).collect()
    assert Counter((r.customer, r.item, r.n, r.city) for r in located) == want["located"]


@pytest.mark.long
def test_every_operator_under_rescaling_and_loss(spark: SparkSession, open_store: OpenStore) -> None:
    """2 -> 3 -> 1 shards with live state; then layers of every stage and layout are lost, and recovered."""
    store = open_store()
    for t, shards in enumerate((2, 3, 1)):
        job = nosync.Job(everything(spark), store, spark=spark, shards=shards)
        report = job.advance(t, frames(spark, t))
        assert report.layers_computed == shards * len(job.flow.recorded)
        check(store, t)
    check_with_spark(job, 1)
    assert {s.name for s in job.flow.stages.values() if not s.recorded} == {
        "some", "less", "priced", "money", "rich", "names", "people_names"
    }  # fmt: skip
    late = [r for t in range(3) for r in job.changes("by_window__late", t - 1, t).collect()]
    windows = {(r.item, r.window_start): r.n for r in job.read("by_window").collect()}
    rows = [(o[1], o[3]) for t in range(3) for o in orders(t)]
    assert sum(windows.values()) + len(late) == 2 * len(rows), "each row is in two windows, or late for them"
    assert late

    store.sync()
    before = {(x.stage, x.shard, x.shards, x.lower): x.digest for x in store.layers()}
    assert {x[2] for x in before} == {2, 3, 1}
    sources = {"orders", "customers"}
    victims = [x for i, x in enumerate(store.layers()) if x.stage not in sources and i % 3 == 0]
    for layer in victims:
        Path(layer.path).unlink()
    found = job.recover()
    assert (found.lost, found.recomputed, found.unrecoverable) == (len(victims), len(victims), {})
    assert {(x.stage, x.shard, x.shards, x.lower): x.digest for x in store.layers()} == before
    for t in range(3):
        check(store, t)
    check_with_spark(job, 2)
    # Everything at once but the sources, merged first: the state of old layouts is rebuilt with their own shards.
    store.compact()
    for layer in store.layers():
        if layer.stage not in sources:
            Path(layer.path).unlink()
    assert job.recover().unrecoverable == {}
    check(store, 2)
    store.compact()
    check(store, 2)
    assert job.safe_point() == 2


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda s: s.select("x", "rand() AS r"), "stage x: its expression is not deterministic"),
        (lambda s: s.select("x", "nothing"), "stage x: column 'nothing' is not in its input"),
        (lambda s: s.select("x", "sum(n)"), "stage x: aggregates, generators"),
        (lambda s: s.select("x", "explode(array(n))"), "stage x: aggregates, generators"),
        (
            lambda s: s.select("x", "window(timestamp_seconds(n), '1 hour') AS w"),
            r"stage x: window\(\).*drop rows whose time",
        ),
        (
            lambda s: s.select("x", "session_window(timestamp_seconds(n), '1 hour') AS w"),
            r"stage x: window\(\) and session",
        ),
        (
            lambda s: s.where("x", "window(timestamp_seconds(n), '1 hour').start > at"),
            r"stage x: window\(\) and session",
        ),
        (lambda s: s.select("x", "n", "n"), "stage x: two of its columns have the same name"),
        (lambda s: s.select("x", "n AS _n"), "names that begin with _"),
        (lambda s: s.select("x", "nothing + 1 AS n"), "stage x: Spark cannot evaluate it over its input: .*nothing"),
        (lambda s: s.where("x", "n + 1"), "stage x: Spark cannot evaluate it"),
        (lambda s: s.select("x", "n", persist="none"), "persist='none', and no stage takes its rows"),
        (lambda s: s.map("x", lambda t: t, persist="replicated(2)"), "needs 2 nodes, and this store is embedded"),
        (lambda s: s.window("x", time="n", size="1 hour", n=nosync.count()), "time column 'n' is int64"),
        (lambda s: s.window("x", time="at", gap="1 hour", n=nosync.count()), "session window needs a key"),
        (lambda s: s.join("x", s.flow.source("o", "customer bigint"), on=["customer"]), "cast one"),
        (lambda s: s.join("x", s.select("y", "customer", "n"), on=["customer"]), "both have a column 'n'"),
        (lambda s: s.union("x", s.select("y", "n")), "its inputs have different columns"),
        (lambda s: s.aggregate("x", key=["item"], f=nosync.first("n", by="gone")), "column 'gone' is not in its input"),
    ],
)
def test_flows_that_cannot_run(spark: SparkSession, open_store: OpenStore, build: Any, message: str) -> None:
    flow = nosync.Dataflow("f")
    with pytest.raises((nosync.FlowError, nosync.SchemaError), match=message):  # noqa: PT012 - either may refuse
        build(flow.source("orders", ORDERS))
        nosync.Job(flow, open_store(), spark=spark)


def test_a_changed_static_table_is_changed_code(spark: SparkSession, open_store: OpenStore) -> None:
    def flow(price: float) -> nosync.Dataflow:
        prices = spark.createDataFrame([("i0", price)], "item string, price double")
        made = nosync.Dataflow("f")
        made.source("orders", ORDERS).join_static("priced", prices, on=["item"], how="left")
        return made

    store = open_store()
    job = nosync.Job(flow(1.0), store, spark=spark, shards=2)
    job.advance(0, {"orders": spark.createDataFrame(orders(0), ORDERS)})
    assert Counter(r.price for r in job.read("priced").collect()) == {1.0: 3, None: 4}
    nosync.Job(flow(1.0), store, spark=spark, shards=2)
    with pytest.raises(nosync.FlowError, match="stage priced was recorded with fingerprint"):
        nosync.Job(flow(2.0), store, spark=spark, shards=2)


def test_what_a_nondeterministic_stage_returned_first_counts(spark: SparkSession, open_store: OpenStore) -> None:
    def roll(rows: pa.Table) -> pa.Table:
        import secrets

        drawn = [secrets.randbelow(10**9) for _ in range(rows.num_rows)]
        return rows.append_column("dice", pa.array(drawn, pa.int64()))

    def fail_once(rows: pa.Table) -> pa.Table:
        if rows.num_rows and not Path(marker).exists():
            Path(marker).touch()
            raise ValueError("not yet")
        return rows

    store = open_store()
    marker = str(store.directory.root.parent / "marker")
    flow = nosync.Dataflow("f")
    dice = flow.source("orders", ORDERS).map("dice", roll, deterministic=False)
    dice.map("fragile", fail_once).aggregate("sums", key=["item"], total=nosync.sum("dice"))
    job = nosync.Job(flow, store, spark=spark, shards=1)
    given = {"orders": spark.createDataFrame(orders(0), ORDERS)}
    with pytest.raises(nosync.StageError, match="not yet"):
        job.advance(0, given)
    rolled = [x.digest for x in store.layers() if x.stage == "dice"]
    assert len(rolled) == 1, "it was recorded before anything was computed from it"
    job.advance(0, given)
    assert [x.digest for x in store.layers() if x.stage == "dice"] == rolled
    store.sync()
    for layer in store.layers():
        if layer.stage in ("dice", "fragile", "sums"):
            Path(layer.path).unlink()
    report = job.recover()
    assert report.recomputed == 0
    assert len(report.unrecoverable) == 3
    assert "never computed again" in str(report)


def test_a_newer_instance_fences_the_older(spark: SparkSession, open_store: OpenStore) -> None:
    flow = nosync.Dataflow("f")
    flow.source("orders", ORDERS).aggregate("counts", key=["item"], n=nosync.count())
    store = open_store()
    zombie = nosync.Job(flow, store, spark=spark, shards=2)
    zombie.advance(0, {"orders": spark.createDataFrame(orders(0), ORDERS)})
    job = nosync.Job(flow, store, spark=spark, shards=2)
    with pytest.raises(nosync.FencedError, match="instance 1 on .* instance 2 has taken over"):
        zombie.advance(1, {"orders": spark.createDataFrame(orders(2), ORDERS)})
    assert not [x for x in store.layers() if int(x.lower) == 1], "the zombie's tasks published nothing"
    assert job.advance(1, {"orders": spark.createDataFrame(orders(1), ORDERS)}).layers_computed == 4
