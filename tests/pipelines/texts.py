"""The files of the projects that tests run."""

from __future__ import annotations

from collections import Counter
from typing import Any

SHOP = """
@dp.table
def orders():
    return spark.readStream.schema("customer string, item string, amount double").json("data/orders")

@dp.table(name="big", comment="the large ones")
def large_orders():
    return spark.readStream.table("orders").where("amount > 10").select("customer", "amount")

@dp.temporary_view
def good():
    return SparkSession.active().read.table("orders").where("amount > 0")

@dp.materialized_view
def totals():
    return spark.read.table("good").groupBy("customer").agg(F.sum("amount").alias("total"), F.count("*").alias("n"))

@dp.materialized_view(schema="n bigint, customers int")
def levels():
    return spark.sql("SELECT n, count(*) AS customers FROM totals GROUP BY n")

dp.create_streaming_table("seen")

@dp.append_flow(target="seen")
def from_orders():
    return spark.readStream.table("orders").select("customer")

@dp.append_flow(target="seen")
def from_visits():
    return spark.readStream.schema("customer string").json("data/visits")

dp.create_streaming_table("people")
dp.create_auto_cdc_flow(
    target="people", source="feed", keys=["customer"], sequence_by="seq", apply_as_deletes="op = 'D'",
    except_column_list=["seq", "op"],
)
"""


SQL = """-- The rest is in SQL.
CREATE STREAMING TABLE feed AS SELECT * FROM STREAM raw_feed;
CREATE TEMPORARY VIEW raw_feed AS SELECT customer, city, seq, op FROM STREAM feed_input WHERE seq IS NOT NULL;

CREATE MATERIALIZED VIEW cities AS
WITH known AS (SELECT * FROM people)
SELECT city, sum(total) AS total FROM totals JOIN known USING (customer) GROUP BY city;

CREATE MATERIALIZED VIEW kinds AS
SELECT kind, count(*) AS n FROM orders JOIN items USING (item) GROUP BY kind;
"""


SMALL = """
@dp.table
def orders():
    return spark.readStream.schema("customer string, amount double").json("data/orders")

@dp.table
def big():
    return spark.readStream.table("orders").where("amount > 10")

@dp.temporary_view
def good():
    return spark.table("orders").where("amount > 0")

@dp.materialized_view
def totals():
    return spark.sql("SELECT customer, sum(amount) AS total FROM good GROUP BY customer")
"""


MORE = """
@dp.table
def feed_input():
    return spark.readStream.schema("customer string, city string, seq int, op string").json("data/feed")

@dp.materialized_view
def items():
    return spark.read.schema("item string, kind string").json("data/items.json")
"""


def counted(*rows: tuple[Any, ...]) -> Counter[tuple[Any, ...]]:
    return Counter(rows)
