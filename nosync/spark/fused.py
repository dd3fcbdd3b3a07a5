"""The rows of a fused segment (nosync.fusing), as the JVM makes them of the inputs that an epoch is given.

One text of SQL for each source: Spark analyzes a query each time something is built on it, and every part of it that is a
Python object is a call to the JVM, which adds up where an epoch takes a fraction of a second.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from functools import reduce

from pyspark.sql import DataFrame

from nosync.dataflow import SELECT, WHERE
from nosync.fusing import PLACE_COLUMN, SIDE_COLUMN, made_column, ok_column, source_column
from nosync.operators import HASH64_COLUMN
from nosync.plan import BoundStage, Feed, kept_through
from nosync.spark.expressions import hash_of, is_star, quoted


def given_rows(
    sources: Sequence[BoundStage],
    feeds: Sequence[Feed],
    stages: Mapping[str, BoundStage],
    inputs: Mapping[str, DataFrame],
) -> DataFrame:
    """Each source's rows, with what expressions say of them."""
    frames = []
    for n, source in enumerate(sources):
        given = inputs[source.name]
        text = _text(n, source, [f for f in feeds if f.jvm and f.emission.stage == source.name], stages)
        view = f"nosync_{uuid.uuid4().hex}"
        given.createOrReplaceTempView(view)
        try:
            frames.append(given.sparkSession.sql(f"WITH __given AS (TABLE {view}) {text}"))
        finally:
            given.sparkSession.catalog.dropTempView(view)
    return reduce(lambda a, b: a.unionByName(b, allowMissingColumns=True), frames)


def _text(n: int, source: BoundStage, feeds: Sequence[Feed], stages: Mapping[str, BoundStage]) -> str:
    columns = [quoted(name) for name in source.schema.names]
    sent = {
        PLACE_COLUMN: hash_of(source.placed_by),
        HASH64_COLUMN: hash_of(source.schema.names),
        SIDE_COLUMN: str(n),
        **{source_column(n, name): quoted(name) for name in source.schema.names},
    }
    begin = [f"{value} AS {quoted(name)}" for name, value in sent.items()]
    if not feeds:
        return f"SELECT {', '.join(begin)} FROM __given"
    (feed,) = feeds
    keep, ok = [quoted(name) for name in sent], ok_column(n)
    text = f"SELECT {', '.join([*begin, f'TRUE AS {ok}', *columns])} FROM __given"
    for name in feed.jvm:
        stage = stages[name]
        text = _applied(stage, text, columns, keep, ok)
        columns = [quoted(column) for column in stage.rows_schema.names]
    kept = kept_through(stages, feed)
    made = [name for name in stages[feed.jvm[-1]].rows_schema.names if name not in kept]
    return _select([*keep, ok, *(f"{quoted(name)} AS {quoted(made_column(n, name))}" for name in made)], text)


def _applied(stage: BoundStage, rows: str, columns: Sequence[str], keep: Sequence[str], ok: str) -> str:
    """A stage over `rows`, whose columns are `columns` beside those to keep.

    Rows that do not pass stay, for they are the source's; expressions after that see nulls in their place.
    """
    expressions: Sequence[str] = stage.options["expressions"]
    if stage.kind == WHERE:
        passes = f"{ok} AND coalesce(({expressions[0]}\n), FALSE) AS {ok}"
        rows = _select([*keep, passes, *columns], rows)
        return _select([*keep, ok, *(f"IF({ok}, {column}, NULL) AS {column}" for column in columns)], rows)
    assert stage.kind == SELECT, stage.kind
    chosen = [", ".join(columns) if is_star(expression) else expression for expression in expressions]
    return _select([*keep, ok, *chosen], rows)


def _select(columns: Sequence[str], rows: str) -> str:
    # A line for each: an expression may end in a comment.
    return "SELECT " + "\n, ".join(columns) + f"\nFROM ({rows})"
