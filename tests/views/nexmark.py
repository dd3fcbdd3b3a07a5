"""NexMark's queries as SQL over persons, auctions and bids, as Beam and Flink have them, and rows of chance for them.

Auctions and persons are tables here, so that they change and go, which NexMark itself does not do.
"""

from __future__ import annotations

import datetime
import random
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from nosync.lsm.columnar.columns import CHANGE_TYPE_COLUMN

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SCHEMAS = {
    "person": "id bigint, name string, email string, city string, state string, at timestamp",
    "auction": (
        "id bigint, item string, initial bigint, reserve bigint, at timestamp, expires timestamp, seller bigint, "
        "category bigint"
    ),
    "bid": "auction bigint, bidder bigint, price bigint, channel string, url string, at timestamp",
    "side_input": "key bigint, value string",
}
KEYS = {"person": ["id"], "auction": ["id"], "side_input": ["key"]}
_DURING = "b.auction = a.id AND b.at BETWEEN a.at AND a.expires"
_DAY = "date_format(at, 'yyyy-MM-dd')"
_FEW, _SOME, _MANY = "price < 10000", "price >= 10000 AND price < 1000000", "price >= 1000000"
_COUNTS = ", ".join(
    f"count({what}) FILTER (WHERE {which}) AS {name}{i}"
    for name, what in (("bids", "*"), ("bidders", "DISTINCT bidder"), ("auctions", "DISTINCT auction"))
    for i, which in enumerate((_FEW, _SOME, _MANY))
)

QUERIES = {
    "q0": "SELECT auction, bidder, price, at FROM bid",
    "q1": "SELECT auction, bidder, 0.908 * price AS price, at FROM bid",
    "q2": "SELECT auction, price FROM bid WHERE auction % 3 = 0",
    "q3": """SELECT p.name, p.city, p.state, a.id FROM auction a JOIN person p ON a.seller = p.id
        WHERE a.category = 10 AND p.state IN ('OR', 'ID', 'CA')""",
    "q4": f"""SELECT category, avg(final) AS mean FROM (
        SELECT a.id, a.category, max(b.price) AS final FROM auction a JOIN bid b ON {_DURING} GROUP BY a.id, a.category)
        GROUP BY category""",
    "q5": """WITH hot AS (SELECT auction, count(*) AS n, window.start AS begin FROM bid
            GROUP BY auction, window(at, '10 seconds', '2 seconds'))
        SELECT hot.auction, hot.n, hot.begin FROM hot
        JOIN (SELECT max(n) AS most, begin FROM hot GROUP BY begin) m ON hot.begin = m.begin AND hot.n >= m.most""",
    "q6": f"""SELECT seller, avg(final) OVER (PARTITION BY seller ORDER BY at, id
            ROWS BETWEEN 10 PRECEDING AND CURRENT ROW) AS mean
        FROM (SELECT a.id, a.seller, max(b.price) AS final, max(b.at) AS at FROM auction a JOIN bid b ON {_DURING}
            GROUP BY a.id, a.seller)""",
    "q7": """SELECT b.price, b.auction, b.bidder, b.at FROM bid b
        JOIN (SELECT max(price) AS most, window.end AS until FROM bid GROUP BY window(at, '10 seconds')) m
        ON b.price = m.most AND b.at BETWEEN m.until - INTERVAL '10' SECOND AND m.until""",
    "q8": """SELECT p.id, p.name, p.begin
        FROM (SELECT id, name, window.start AS begin FROM person GROUP BY id, name, window(at, '10 seconds')) p
        JOIN (SELECT seller, window.start AS begin FROM auction GROUP BY seller, window(at, '10 seconds')) a
        ON p.id = a.seller AND p.begin = a.begin""",
    "q9": f"""SELECT id, item, seller, bidder, price, bid_at FROM (
        SELECT a.*, b.bidder, b.price, b.at AS bid_at,
            row_number() OVER (PARTITION BY a.id ORDER BY b.price DESC, b.at, b.bidder) AS place
        FROM auction a JOIN bid b ON {_DURING}) WHERE place = 1""",
    "q10": f"SELECT auction, bidder, price, at, {_DAY} AS day, date_format(at, 'HH:mm') AS minute FROM bid",
    "q12": "SELECT bidder, count(*) AS n, window.start AS begin FROM bid GROUP BY bidder, window(at, '10 seconds')",
    "q13": """SELECT b.auction, b.bidder, b.price, b.at, s.value FROM bid b
        JOIN side_input s ON b.auction % 7 = s.key""",
    "q14": """SELECT auction, bidder, 0.908 * price AS price,
        CASE WHEN hour(at) BETWEEN 8 AND 18 THEN 'day' WHEN hour(at) <= 6 OR hour(at) >= 20 THEN 'night'
        ELSE 'other' END AS time, at, length(url) - length(replace(url, 'e', '')) AS es FROM bid
        WHERE 0.908 * price > 1000""",
    "q15": f"SELECT {_DAY} AS day, count(*) AS n, {_COUNTS} FROM bid GROUP BY {_DAY}",
    "q16": f"""SELECT channel, {_DAY} AS day, max(date_format(at, 'HH:mm')) AS minute, count(*) AS n, {_COUNTS}
        FROM bid GROUP BY channel, {_DAY}""",
    "q17": f"""SELECT auction, {_DAY} AS day, count(*) AS n, count(*) FILTER (WHERE {_FEW}) AS few, min(price) AS least,
        max(price) AS most, avg(price) AS mean, sum(price) AS total FROM bid GROUP BY auction, {_DAY}""",
    "q18": """SELECT auction, bidder, price, channel, url, at FROM (
        SELECT *, row_number() OVER (PARTITION BY bidder, auction ORDER BY at DESC, price) AS place FROM bid)
        WHERE place <= 1""",
    "q19": """SELECT * FROM (
        SELECT *, row_number() OVER (PARTITION BY auction ORDER BY price DESC, at, bidder) AS place FROM bid)
        WHERE place <= 10""",
    "q20": """SELECT b.auction, b.bidder, b.price, b.channel, a.item, a.reserve, a.expires, a.seller FROM bid b
        JOIN auction a ON b.auction = a.id WHERE a.category = 10""",
    "q21": r"""SELECT auction, bidder, price, channel, CASE WHEN lower(channel) = 'apple' THEN '0'
        WHEN lower(channel) = 'google' THEN '1' WHEN lower(channel) = 'facebook' THEN '2'
        ELSE regexp_extract(url, '(&|^)channel_id=([^&]*)', 2) END AS channel_id FROM bid
        WHERE regexp_extract(url, '(&|^)channel_id=([^&]*)', 2) <> '' OR lower(channel) IN ('apple', 'google', 'facebook')""",
    "q22": """SELECT auction, bidder, price, split_part(url, '/', 4) AS dir1, split_part(url, '/', 5) AS dir2,
        split(url, '/')[5] AS dir3 FROM bid""",
}  # fmt: skip
Q11 = "SELECT bidder, count(*) AS n FROM bid GROUP BY bidder, session_window(at, '10 seconds')"
"""Sessions take a watermark, which users write in Python: `sessions` does."""


def sessions(tables: Any) -> DataFrame:
    from pyspark.sql import functions as F

    bids = tables["bid"].withWatermark("at", "1 hour")
    counted: DataFrame = bids.groupBy("bidder", F.session_window("at", "10 seconds")).agg(F.count("*").alias("n"))
    return counted.select("bidder", "n")


_TYPES = {"bigint": pa.int64(), "string": pa.string(), "timestamp": pa.timestamp("us", "UTC")}
_CHANNELS = ("apple", "Google", "facebook", "baidu", "channel-9")


def schema_of(name: str) -> pa.Schema:
    columns = (column.split() for column in SCHEMAS[name].split(","))
    return pa.schema([(column, _TYPES[type_]) for column, type_ in columns])


class Rows:
    """Makes rows, epoch by epoch, and knows those that are there."""

    def __init__(self, seed: int, each: int = 150) -> None:
        self._chance, self._each = random.Random(seed), each
        self._now = datetime.datetime(2026, 1, 1, 23, 58, tzinfo=datetime.UTC)  # a day ends while bids come
        self.there: dict[str, dict[Any, dict[str, Any]]] = {name: {} for name in SCHEMAS}
        self._last = dict.fromkeys(KEYS, 0)

    def epoch(self, t: int) -> dict[str, pa.Table]:
        """Returns the rows of an epoch. After the first one some persons and auctions change or go."""
        given: dict[str, list[dict[str, Any]]] = {name: [] for name in SCHEMAS}
        for key in range(7) if t == 0 else self._chance.sample(range(7), 2):
            given["side_input"].append(self._set("side_input", key, {"key": key, "value": f"{key} at {t}"}))
        for name in ("person", "auction") if t else ():
            picked = self._chance.sample(sorted(self.there[name]), min(4, len(self.there[name])))
            for key in picked[:2]:
                given[name].append({**self.there[name].pop(key), CHANGE_TYPE_COLUMN: "delete"})
            for key in picked[2:]:
                changed = {"state": "OR"} if name == "person" else {"category": 10}
                given[name].append(self._set(name, key, self.there[name][key] | changed))
        for _ in range(self._each):
            name, key, row = self._row()
            given[name].append(self._set(name, key, row))
        return {
            name: pa.Table.from_pylist(
                rows,
                schema_of(name).append(pa.field(CHANGE_TYPE_COLUMN, pa.string())) if name in KEYS else schema_of(name),
            )
            for name, rows in given.items()
        }

    def tables(self) -> dict[str, pa.Table]:
        return {name: pa.Table.from_pylist(list(rows.values()), schema_of(name)) for name, rows in self.there.items()}

    def _set(self, name: str, key: Any, row: dict[str, Any]) -> dict[str, Any]:
        self.there[name][key] = row
        return row

    def _row(self) -> tuple[str, Any, dict[str, Any]]:
        chance = self._chance
        self._now += datetime.timedelta(milliseconds=chance.randint(50, 500))
        persons, auctions = (self._last[name] + 1 for name in ("person", "auction"))
        kind = chance.random()
        if kind < 0.08 or persons < 4:
            key = self._next("person")
            return "person", key, {
                "id": key, "name": f"p{key}", "email": f"{key}@x.y", "city": chance.choice("AB"),
                "state": chance.choice(["OR", "ID", "CA", "NY"]), "at": self._now,
            }  # fmt: skip
        if kind < 0.25 or auctions < 4:
            key = self._next("auction")
            return "auction", key, {
                "id": key, "item": f"i{key}", "initial": chance.randint(1, 50), "reserve": chance.randint(50, 90),
                "at": self._now, "expires": self._now + datetime.timedelta(seconds=chance.randint(5, 60)),
                "seller": chance.randint(1, persons), "category": chance.choice([10, 11, 12]),
            }  # fmt: skip
        channel = chance.choice(_CHANNELS)
        end = f"&channel_id={chance.randint(1, 99)}" if chance.random() < 0.5 else ""
        return "bid", len(self.there["bid"]), {
            "auction": chance.randint(max(1, auctions - 6), auctions), "bidder": chance.randint(1, persons),
            "price": chance.randint(1, 2_000_000), "channel": channel,
            "url": f"https://www.nexmark.com/{channel}/item/{chance.randint(1, 9)}/x.htm?query=1{end}", "at": self._now,
        }  # fmt: skip

    def _next(self, name: str) -> int:
        """Returns a key that was never there: an epoch has one change of each."""
        self._last[name] += 1
        return self._last[name]
