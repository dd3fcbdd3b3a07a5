"""Events of NexMark from one seed: people register, open auctions, and bid. Every engine reads the same files.

(Tucker, Tufte, Papadimos and Maier, NEXMark: a benchmark for queries over data streams, 2002. Of fifty events one is a person,
three are auctions and 46 are bids, as in Apache Beam's generator.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

PERSONS, AUCTIONS, BIDS = "persons", "auctions", "bids"
STREAMS = {
    PERSONS: "id bigint, name string, city string, state string, ts bigint",
    AUCTIONS: "id bigint, seller bigint, category bigint, ts bigint",
    BIDS: "auction bigint, bidder bigint, price bigint, ts bigint",
}
"""`ts` is in seconds of event time."""
OF_FIFTY = {PERSONS: 1, AUCTIONS: 3, BIDS: 46}
EVENTS_PER_S = 1000
HOT = 4
_STATES = ["AZ", "CA", "ID", "OR", "WA", "WY"]


@dataclass(frozen=True)
class Query:
    """Holds one query: what it reads, its text in the SQL that Spark and Flink have in common, and its columns."""

    name: str
    streams: tuple[str, ...]
    sql: str
    columns: str
    key: int = 0
    """So many columns at the beginning are the key of rows that change; 0: rows only come."""

    @property
    def names(self) -> list[str]:
        """Returns the names of the columns."""
        return [column.split()[0] for column in self.columns.split(", ")]


WINDOW = "(ts - MOD(ts, 10))"
QUERIES = (
    Query(
        "Q1",
        (BIDS,),
        "SELECT auction, bidder, price * 908 AS mills, ts FROM bids",
        "auction bigint, bidder bigint, mills bigint, ts bigint",
    ),
    Query(
        "Q3",
        (PERSONS, AUCTIONS),
        "SELECT p.name, p.city, p.state, a.id AS auction FROM auctions a JOIN persons p ON a.seller = p.id "
        "WHERE a.category = 10 AND p.state IN ('OR', 'ID', 'CA')",
        "name string, city string, state string, auction bigint",
    ),
    Query(
        "Q8",
        (PERSONS, AUCTIONS),
        f"SELECT p.id, p.name, p.w FROM (SELECT id, name, {WINDOW} AS w FROM persons) p "
        f"JOIN (SELECT DISTINCT seller, {WINDOW} AS w FROM auctions) a ON p.id = a.seller AND p.w = a.w",
        "id bigint, name string, w bigint",
    ),
    Query(
        "Q12",
        (BIDS,),
        f"SELECT bidder, {WINDOW} AS w, COUNT(*) AS n FROM bids GROUP BY bidder, {WINDOW}",
        "bidder bigint, w bigint, n bigint",
        key=2,
    ),
)


def epoch_of_events(t: int, events: int, hot: float, seed: int, streams: Collection[str]) -> dict[str, pa.Table]:
    """Returns the events of one epoch, of these streams. `hot`: the share of bids, and of auctions, that a few people
    make.
    """
    first = t * events
    counts = {name: events * share // 50 for name, share in OF_FIFTY.items()}
    known = (t + 1) * counts[PERSONS]  # ids of people who have registered by the end of this epoch

    def ids(name: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.arange(t * counts[name], (t + 1) * counts[name], dtype=np.int64)

    def times(name: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return (first + np.arange(counts[name], dtype=np.int64) * events // counts[name]) // EVENTS_PER_S

    def people(name: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Half of them have registered lately, as people who have something to sell or to buy."""
        n = counts[name]
        late = ids(PERSONS)[np.arange(n) * counts[PERSONS] // n]
        anyone = np.where(random.random(n) < 0.5, late, random.integers(0, known, n))
        return np.where(random.random(n) < hot, random.integers(0, HOT, n), anyone)

    def of_persons() -> pa.Table:
        person = ids(PERSONS)
        return pa.table(
            {
                "id": person,
                "name": [f"person {i}" for i in person],
                "city": [f"city {i}" for i in random.integers(0, 100, len(person))],
                "state": np.array(_STATES)[random.integers(0, len(_STATES), len(person))],
                "ts": times(PERSONS),
            }
        )

    def of_auctions() -> pa.Table:
        auction = ids(AUCTIONS)
        return pa.table(
            {
                "id": auction,
                "seller": people(AUCTIONS),
                "category": random.integers(10, 15, len(auction)),
                "ts": times(AUCTIONS),
            }
        )

    def of_bids() -> pa.Table:
        return pa.table(
            {
                "auction": random.integers(0, (t + 1) * counts[AUCTIONS], counts[BIDS]),
                "bidder": people(BIDS),
                "price": random.integers(1, 10_000_000, counts[BIDS]),
                "ts": times(BIDS),
            }
        )

    rows = {}
    for number, (name, make) in enumerate({PERSONS: of_persons, AUCTIONS: of_auctions, BIDS: of_bids}.items()):
        if name in streams:
            random = np.random.default_rng((seed, t, number))
            rows[name] = make()
    return rows


def write_events(
    root: Path, epochs: int, events: int, hot: float, streams: Collection[str] = tuple(STREAMS), seed: int = 7
) -> str:
    """Writes `root/<stream>/<t>.parquet` for Spark, and `root/csv/<stream>/<t>.csv` for Flink. Returns a digest of all
    rows.
    """
    digest = hashlib.blake2b(digest_size=8)
    for t in range(epochs):
        for name, rows in epoch_of_events(t, events, hot, seed, streams).items():
            for directory, suffix in ((root / name, "parquet"), (root / "csv" / name, "csv")):
                directory.mkdir(parents=True, exist_ok=True)
                path = directory / f"{t:04}.{suffix}"
                if suffix == "parquet":
                    pq.write_table(rows, path)
                else:
                    pa.csv.write_csv(rows, path, pa.csv.WriteOptions(include_header=False))
                    digest.update(path.read_bytes())
    return digest.hexdigest()


def digest_of_rows(rows: Iterable[Iterable[object]]) -> str:
    """Returns a digest that is equal for the same rows in any order."""
    lines = sorted("|".join(map(str, row)) for row in rows)
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()
