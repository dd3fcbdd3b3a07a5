"""The short suite that runs on the oldest and on the newest of what the metadata allow: see tests.compat.run."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyspark
import pytest
from pyspark.sql import functions as F

import nosync
from nosync.flow.stage import Stage
from tests.checkpoints import ordinary_queries
from tests.conftest import OpenStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

ORDERS = "customer string, item string, n bigint, price decimal(10,2), at timestamp"
CUSTOMERS = "customer string, city string"
START = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)
ROUNDS = 4


def orders(t: int) -> list[tuple[Any, ...]]:
    minutes = [10 * t + i - 20 * (i == 0) for i in range(7 + t)]  # the first one comes late
    return [
        (f"c{(i + t) % 5}", f"i{i % 3}", i + t, i + t, START + datetime.timedelta(minutes=m))
        for i, m in enumerate(minutes)
    ]


def inputs(spark: SparkSession, t: int) -> dict[str, DataFrame]:
    rows = spark.createDataFrame(orders(t), "customer string, item string, n bigint, price bigint, at timestamp")
    return {
        "orders": rows.withColumn("price", rows.price.cast("decimal(10,2)")),
        "customers": spark.createDataFrame([(f"c{t}", "Zürich")], CUSTOMERS),
    }


def doubled(rows: pa.Table) -> pa.Table:
    return rows.set_column(rows.schema.get_field_index("n"), "n", pc.multiply(rows["n"], 2))


def repeated(rows: pa.Table) -> pa.Table:
    return pa.concat_tables([rows, rows])


def is_large(rows: pa.Table) -> pa.ChunkedArray:
    return pc.greater(rows["n"], 2)


def counted_down(rows: pa.Table) -> pa.Table:
    left = pc.subtract(rows["left"], 1)
    return pa.table({"left": left}).filter(pc.greater_equal(left, 0))


def most(changes: pa.Table, state: pa.Table) -> pa.Table:
    both = pa.concat_tables([changes.select(["item", "n"]), state.select(["item", "n"])])
    return both.group_by("item").aggregate([("n", "max")]).rename_columns(["item", "n"])


def total_of(key: tuple[Any, ...], changes: list[dict[str, Any]], state: dict[str, Any] | None) -> dict[str, Any]:
    return {"total": sum(row["n"] for row in changes) + (state["total"] if state else 0)}


def every_operator(spark: SparkSession) -> nosync.Dataflow:
    prices = spark.createDataFrame([("i0", 1.5), ("i1", 2.0)], "item string, cost double")
    flow = nosync.Dataflow("operators")
    source, people = flow.source("orders", ORDERS), flow.source("customers", CUSTOMERS)
    source.map("mapped", doubled).filter("filtered", is_large).flat_map("flat", repeated)
    some = source.where("some", "n > 1").select("less", "customer", "item", "n", "n * 2 AS twice")
    some.join_static("priced", prices, on=["item"]).aggregate("costs", key=["customer"], cost=nosync.sum("cost"))
    source.aggregate("sums", key=["item"], n=nosync.count(), total=nosync.sum("price"), mean=nosync.mean("n"),
                     last=nosync.last("n", by="at"), different=nosync.count_distinct("customer"))  # fmt: skip
    source.join("located", people, on=["customer"], how="left")
    source.select("names", "customer").union("both", people.select("people_names", "customer")).dedupe("known")
    source.window("by_window", key=["item"], time="at", size="10 minutes", watermark="0 minutes", n=nosync.count())
    source.update("most", key=["item"], state="n bigint", fn=most)
    source.update_per_key("totals", key=["item"], state="total bigint", fn=total_of)

    def body(reached: Stage) -> Stage:
        return reached.map("next", counted_down)

    source.select("rounds", f"least(n, {ROUNDS}L) AS left").iterate("reached", body)
    return flow


def test_timestamps_are_in_utc() -> None:
    from pyspark.sql.types import StructType, TimestampNTZType, TimestampType

    from nosync.spark.versions import arrow_schema

    inside = StructType().add("at", TimestampType())
    schema = arrow_schema(StructType().add("at", TimestampType()).add("plain", TimestampNTZType()).add("s", inside))
    utc, plain = pa.timestamp("us", tz="UTC"), pa.timestamp("us")
    assert schema.types == [utc, plain, pa.struct([("at", utc)])]


def test_a_job_of_every_operator(spark: SparkSession, open_store: OpenStore) -> None:
    store = open_store()
    job = nosync.Job(every_operator(spark), store, spark=spark, shards=2)
    for t in range(2):
        job.advance(t, inputs(spark, t))
    rows = [row for t in range(2) for row in orders(t)]
    check_state(store, rows)

    def read(stage: str) -> list[Any]:
        return job.read(stage).collect()

    assert {r["customer"] for r in read("known")} == {row[0] for row in rows}
    assert {r["left"] for r in read("reached")} == set(range(ROUNDS + 1))
    windows = {(r["item"], r["window_start"]): r["n"] for r in read("by_window")}
    assert sum(windows.values()) + len(job.changes("by_window__late", -1, 1).collect()) == len(rows)
    store.sync()
    lost = [Path(layer.path) for layer in store.layers() if layer.stage not in ("orders", "customers")]
    for path in lost:
        path.unlink()
    assert job.recover().unrecoverable == {}
    check_state(store, rows)


def check_state(store: nosync.Store, rows: list[tuple[Any, ...]]) -> None:
    def read(stage: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = store.read(stage).to_pylist()
        return found

    items = sorted({row[1] for row in rows})
    of_item = {item: [row for row in rows if row[1] == item] for item in items}
    totals = {item: sum(row[2] for row in found) for item, found in of_item.items()}
    assert {r["item"]: r["n"] for r in read("sums")} == {item: len(found) for item, found in of_item.items()}
    assert {r["item"]: int(r["total"]) for r in read("sums")} == totals
    assert {r["item"]: r["total"] for r in read("totals")} == totals
    assert {r["item"]: r["n"] for r in read("most")} == {item: max(r[2] for r in of_item[item]) for item in items}
    cost = {"i0": 1.5, "i1": 2.0}
    costs: Counter[str] = Counter()
    for customer, item, n, *_ in rows:
        if n > 1 and item in cost:
            costs[customer] += cost[item]  # type: ignore[assignment]
    assert {r["customer"]: r["cost"] for r in read("costs")} == dict(costs)
    assert Counter(r["n"] for r in read("flat")) == Counter(2 * r[2] for r in rows if 2 * r[2] > 2 for _ in range(2))
    located = Counter((r["n"], r["city"]) for r in read("located"))
    assert located == Counter((r[2], "Zürich" if r[0] in ("c0", "c1") else None) for r in rows)


def test_a_stream(spark: SparkSession, open_store: OpenStore, tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    for i in range(3):
        (source / f"{i}.json").write_text("\n".join(json.dumps({"word": f"w{j % 3}", "n": i + 1}) for j in range(9)))
    flow = nosync.Dataflow("stream")
    flow.source("words", "word string, n bigint").aggregate("totals", key=["word"], total=nosync.sum("n"))
    store = open_store()
    sinks = {"totals": nosync.ParquetSink(tmp_path / "out")}
    job = nosync.Job(flow, store, spark=spark, shards=2, sinks=sinks)
    frame = spark.readStream.schema("word string, n bigint").option("maxFilesPerTrigger", 1).json(str(source))
    query = job.stream({"words": frame}, checkpoint=tmp_path / "cp", trigger={"availableNow": True})
    assert query.awaitTermination(240)
    assert {r["word"]: r["total"] for r in store.read("totals").to_pylist()} == {f"w{j}": 18 for j in range(3)}
    assert store.last_sealed() == 2
    assert spark.read.parquet(str(tmp_path / "out")).where("epoch = 2").count() == 6


def test_the_data_source(spark: SparkSession, open_store: OpenStore, tmp_path: Path) -> None:
    nosync.register(spark)
    store = open_store()
    for t in range(2):
        at = pa.array([START] * 2, pa.timestamp("us", tz="UTC"))
        store.append("kv", t=t, rows=pa.table({"k": [t, 9], "v": [1.5, float(t)], "at": at}), key=["k"])
        store.seal(t)
    path = str(store.directory.root)
    reader = spark.read.format("nosync").option("stage", "kv")
    assert sorted(tuple(row) for row in reader.load(path).select("k", "v").collect()) == [(0, 1.5), (1, 1.5), (9, 1.0)]
    (row,) = reader.option("asOf", 0).load(path).where("k = 9").collect()
    assert row.v == 0.0
    assert row["at"].timestamp() == START.timestamp()
    feed = spark.readStream.format("nosync").option("stage", "kv").option("readChangeFeed", "true").load(path)
    query = (
        feed.writeStream.format("memory")
        .queryName("fed")
        .option("checkpointLocation", str(tmp_path / "cp"))
        .trigger(availableNow=True)
        .start()
    )
    try:
        assert query.awaitTermination(240)
        found = Counter(row._change_type for row in spark.sql("SELECT _change_type FROM fed").collect())
    finally:
        spark.catalog.dropTempView("fed")
    assert found == {"insert": 3, "update_preimage": 1, "update_postimage": 1}


@pytest.mark.timeout(600)
def test_the_checkpoint_of_an_ordinary_query_is_kept_and_gone_on_from(tmp_path: Path) -> None:
    names = ("aggregate", "arbitrary")
    for side in "ab":
        (tmp_path / "source" / side).mkdir(parents=True)
        for i in range(5):
            at = [f"2026-01-01T00:00:{10 * i + j:02}Z" for j in range(10)]
            rows = [json.dumps({"k": f"k{j % 3}", "n": i + j, "ts": ts}) for j, ts in enumerate(at)]
            path = tmp_path / "source" / side / f"{i}.json"
            path.write_text("\n".join(rows))
            os.utime(path, (1.7e9 + i, 1.7e9 + i))

    def run(checkpoints: Path, output: Path) -> dict[str, dict[int, Any]]:
        output.mkdir()
        arguments = (checkpoints, output, tmp_path / "source", "v2", ",".join(names))
        command = [sys.executable, ordinary_queries.__file__, *map(str, arguments)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr[-3000:]
        return {
            name: {int(p.stem): json.loads(p.read_text()) for p in (output / name).glob("*.json")} for name in names
        }

    watches = [nosync.checkpoints.watch(tmp_path / "ck" / name, tmp_path / "data", name=name) for name in names]
    free = run(tmp_path / "ck", tmp_path / "free")
    for watch in watches:
        watch.close()
    for name in names:
        assert nosync.checkpoint(name, tmp_path / "data").status().safe == max(free[name])
        assert nosync.checkpoint(name, tmp_path / "data").restore(tmp_path / "again" / name, 1).batch == 1
    assert run(tmp_path / "again", tmp_path / "out") == {
        name: {t: rows for t, rows in batches.items() if t > 1} for name, batches in free.items()
    }


def test_views_are_what_spark_gives(spark: SparkSession, open_store: OpenStore) -> None:
    flow = nosync.Dataflow("views")
    flow.source("orders", ORDERS)
    flow.table("customers", CUSTOMERS, key=["customer"])
    flow.sql(
        "cities",
        "SELECT city, count(DISTINCT item) AS items, sum(price) AS total FROM orders LEFT JOIN customers USING (customer) "
        "WHERE n > (SELECT avg(n) FROM orders) GROUP BY city",
        spark=spark,
    )
    flow.sql("places", "SELECT customer, rank() OVER (PARTITION BY item ORDER BY n) AS place FROM orders", spark=spark)
    flow.sql(
        "strangers", "SELECT customer FROM orders WHERE customer NOT IN (SELECT customer FROM customers)", spark=spark
    )
    minutes = "SELECT item, count(*) AS n FROM orders WATERMARK at DELAY OF INTERVAL 1 HOUR "
    minutes += "GROUP BY item, window(at, '3 minutes')"
    flow.sql("minutes", minutes, spark=spark)
    middles = ("percentile(price / 10, 0.3) AS p", "median(price / 7) AS m")
    flow.sql(
        "named",
        "SELECT item FROM orders WHERE n > (WITH d AS (SELECT min(n) AS m FROM orders) SELECT m FROM d)",
        spark=spark,
    )
    flow.sql("piped", "FROM orders |> WHERE n > 1 |> AGGREGATE count(*) AS many GROUP BY item", spark=spark)
    by_group = "SELECT n > (SELECT min(n) FROM orders) AS above, sum(n - (SELECT max(n) FROM orders)) AS s FROM orders GROUP BY 1"
    flow.sql("groups", by_group, spark=spark)
    with pytest.raises(nosync.FlowError, match="a view is a query"):
        flow.sql("nothing", "DROP TABLE orders", spark=spark)
    with pytest.raises(nosync.FlowError, match="wider type"):
        flow.sql("sums", "SELECT try_sum(n) AS s FROM orders", spark=spark)
    flow.sql("middles", f"SELECT item, {', '.join(middles)} FROM orders GROUP BY item", spark=spark)
    job = nosync.Job(flow, open_store(retain=10), spark=spark, shards=2)
    for t in range(2):
        job.advance(t, inputs(spark, t))
        for name in flow.views:
            assert job.verify_view(name).is_equal, str(job.verify_view(name))
    orders = inputs(spark, 0)["orders"].union(inputs(spark, 1)["orders"])
    expected = Counter(orders.groupBy("item").agg(*map(F.expr, middles)).collect())
    if tuple(map(int, pyspark.__version__.split(".")[:2])) >= (4, 3):  # before that the last digit was another one
        assert Counter(job.read("middles").collect()) == expected
    with pytest.raises(nosync.FlowError, match="line 2: it is another value each time"):
        flow.sql("random", "SELECT n,\nrand() AS r FROM orders", spark=spark)


def test_a_pipelines_project(spark: SparkSession, tmp_path: Path) -> None:
    from pyspark import pipelines

    from tests.pipelines.projects import Project

    text = """
@dp.table
def orders():
    return spark.readStream.schema("customer string, amount double").json("data/orders")

@dp.temporary_view
def good():
    return spark.table("orders").where("amount > 0")
"""
    has_cdc = hasattr(pipelines, "create_auto_cdc_flow")  # Spark has it since 4.2
    if has_cdc:
        text += """
dp.create_streaming_table("people")
dp.create_auto_cdc_flow(target="people", source="orders", keys=["customer"], sequence_by="amount")
"""
    sql = "CREATE MATERIALIZED VIEW totals AS\nSELECT customer, sum(amount) AS total FROM good GROUP BY customer;"
    project = Project(tmp_path / "shop", spark, orders=text, totals=sql)
    project.give("orders", [{"customer": "ann", "amount": 5}, {"customer": "bob", "amount": -1}])
    project.run()
    project.give("orders", [{"customer": "ann", "amount": 2}])
    project.run()
    assert project.rows("totals") == Counter({("ann", 7.0): 1})
    assert project.rows("totals", as_of=0) == Counter({("ann", 5.0): 1})
    if has_cdc:
        assert project.rows("people") == Counter({(5.0, "ann"): 1, (-1.0, "bob"): 1})
    project.write("bad", "CREATE MATERIALIZED VIEW bad AS\nSELECT customer, rand() AS r\nFROM orders;")
    with pytest.raises(nosync.FlowError, match="rand.*line 2"):
        project.declare()
