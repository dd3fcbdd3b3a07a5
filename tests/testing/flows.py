"""Flows with many operators, for those who compare what runs them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

import nosync
from nosync import Stage

WORDS, PLACES, LINKS = (
    "word string, n bigint, x double, at timestamp",
    "word string, place string",
    "node string, next string",
)
NOON = datetime(2026, 7, 4, 12, tzinfo=UTC)


def with_length(rows: pa.Table) -> pa.Table:
    return rows.append_column("length", pc.utf8_length(rows["word"]).cast(pa.int64()))


def short(rows: pa.Table) -> pa.ChunkedArray:
    return pc.less(rows["length"], 4)


def letters(rows: pa.Table) -> pa.Table:
    words = rows["word"].to_pylist()
    return pa.table({"letter": pa.array([letter for word in words for letter in word or ""], pa.string())})


def newest_place(changes: pa.Table, state: pa.Table) -> pa.Table:
    found = {row["word"]: row["place"] for row in sorted(changes.to_pylist(), key=lambda row: row["place"])}
    return pa.table({"word": pa.array(found, pa.string()), "place": pa.array(found.values(), pa.string())})


def collected(key: Any, changes: list[dict[str, Any]], state: dict[str, Any] | None) -> dict[str, Any]:
    words, times = (list(state["words"]), dict(state["times"])) if state else ([], {})
    for row in changes:
        words.append(row["word"])
        times[row["word"] or ""] = times.get(row["word"] or "", 0) + 1
    return {"words": sorted(words, key=str), "times": sorted(times.items())}


def seen(key: tuple[Any, ...], changes: list[dict[str, Any]], state: dict[str, Any] | None) -> dict[str, Any]:
    return {"times": (state["times"] if state else 0) + len(changes)}


def watched(
    key: tuple[Any, ...], changes: list[dict[str, Any]], state: dict[str, Any] | None
) -> tuple[dict[str, Any] | None, dict[str, list[dict[str, Any]]]]:
    """Says so once no row of a word came for some time."""
    if not changes:
        return None, {"silent": [{"silent_word": key[0], "rows": state["n"] if state else 0}]}
    due = max(row["at"] for row in changes) + timedelta(hours=2)
    return {"n": (state["n"] if state else 0) + len(changes), "due": due}, {}


def stateless_and_keyed() -> nosync.Dataflow:
    """Maps, expressions, unions, aggregates, dedupes, updates and joins of all kinds."""
    flow = nosync.Dataflow("many")
    words, places = flow.source("words", WORDS), flow.source("places", PLACES)
    mapped = words.map("mapped", with_length)
    few = mapped.filter("few", short)
    big = words.where("big", "n > 1 AND word <> 'the'").select("doubled", "word", "n * 2 AS m", "n % 3 AS rest")
    big.aggregate("by_rest", key=["rest"], total=nosync.sum("m"), top=nosync.top_k("m", 2))
    words.flat_map("letters", letters).aggregate("by_letter", key=["letter"], count=nosync.count())
    totals = few.aggregate("totals", key=["word"], total=nosync.sum("n"), mean=nosync.mean("x"), least=nosync.min("n"))
    totals.where("large", "total >= 4 OR least IS NULL", persist="none").select("named", "word AS name", "total")
    words.aggregate("overall", key=[], rows=nosync.count(), words=nosync.count_distinct("word"))
    where = places.update("where", key=["word"], state="place string", fn=newest_place)
    often = places.update_per_key("seen", key=["place"], state="times bigint", fn=seen, ttl=1)
    often.where("seen_often", "times > 0").aggregate("places_seen", key=[], n=nosync.count())
    places.update_per_key("seen_lately", key=["place"], state="times bigint", fn=seen, ttl=1, expiry="retract")
    places.update_per_key(
        "words_at", key=["place"], state="words array<string>, times map<string, bigint>", fn=collected
    )
    for how in ("inner", "left", "full"):
        totals.join(f"joined_{how}", where, on=["word"], how=how)
    words.dedupe("distinct", key=["word", "n"])
    words.union("both", mapped.select("same", "word", "n", "x", "at")).aggregate(
        "of_both", key=["n"], rows=nosync.count()
    )
    return flow


def windows() -> nosync.Dataflow:
    """Windows of all kinds, with late rows and a watermark for each input."""
    flow = nosync.Dataflow("windows")
    a, b = flow.source("words", WORDS), flow.source("others", WORDS)
    a.window("tumbling", key=["word"], time="at", size="10 minutes", watermark="5 minutes", total=nosync.sum("n"))
    a.window("sliding", key=["word"], time="at", size="10 minutes", slide="5 minutes", rows=nosync.count())
    both = a.union("both", b)
    words = a.where("words_there", "word IS NOT NULL")
    words.window(
        "final", key=["word"], time="at", size="10 minutes", watermark="5 minutes", emit="final", n=nosync.count()
    )
    words.dedupe("once", key=["word"], time="at", watermark="5 minutes", within="20 minutes")
    silent = words.update_per_key(
        "watched", key=["word"], state="n bigint, due timestamp", fn=watched, time="at", watermark="5 minutes",
        timer="due", ttl="5 hours", outputs={"silent": "silent_word string, rows bigint"},
    ).output("silent")  # fmt: skip
    silent.aggregate("silences", key=["silent_word"], times=nosync.count())
    named = b.select("named", "word", "n AS m", "at AS then")
    for how in ("inner", "full"):
        words.join(
            f"near_{how}", named, on=["word"], how=how, time=("at", "then"), within=("-5 minutes", "10 minutes"),
            watermark="10 minutes",
        )  # fmt: skip
    words.join_asof(
        "newest", named, on=["word"], how="left", time=("at", "then"), within="40 minutes", watermark="10 minutes"
    )
    both.window("sessions", key=["word"], time="at", gap="5 minutes", watermark="10 minutes", rows=nosync.count())
    return flow


def loop() -> nosync.Dataflow:
    """What can be reached from roots."""
    flow = nosync.Dataflow("loop")
    roots, links = flow.source("roots", "node string"), flow.source("links", LINKS)

    def follow(reached: Stage) -> Stage:
        return reached.join("hops", links, on=["node"]).select("following", "next AS node")

    roots.iterate("reached", follow).aggregate("count", key=[], nodes=nosync.count())
    return flow


def words_of(t: int) -> list[tuple[Any, ...]]:
    """Rows of an epoch, some of them equal, some late, some with nulls."""
    names = ["the", "fox", "a", "lazy", "dog", "ox"]
    rows: list[tuple[Any, ...]] = [
        (names[(t + i) % 6], (i * i + t) % 7, i / 3 - t, NOON + timedelta(minutes=7 * t + 3 * i - 8 * (i % 4 == 3)))
        for i in range(12)
    ]
    return [*rows, rows[0], (None, None, None, None), ("the", None, float("nan"), NOON + timedelta(hours=t))]


def places_of(t: int) -> list[tuple[str, str]]:
    return [("fox", f"den {t}"), ("dog", "house"), ("bird", "tree")][t % 2 :]


INPUTS: dict[str, list[dict[str, list[tuple[Any, ...]]]]] = {
    "many": [{"words": words_of(t), "places": places_of(t)} for t in range(4)],
    "windows": [{"words": words_of(t), "others": words_of(t + 1) if t != 1 else []} for t in range(4)],
    "loop": [
        {"roots": [("a",)], "links": [("a", "b"), ("b", "c"), ("c", "a"), ("x", "y")]},
        {"roots": [], "links": [("c", "x")]},
        {"roots": [("q",)], "links": []},
    ],
}
FLOWS = {"many": stateless_and_keyed, "windows": windows, "loop": loop}
SCHEMAS = {"words": WORDS, "others": WORDS, "places": PLACES, "roots": "node string", "links": LINKS}
