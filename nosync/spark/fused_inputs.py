"""The rows of a fused segment (nosync.runtime.fused_rows), as the JVM makes them of the inputs that an epoch is given.

One projection for each source where that will do, else one text of SQL: Spark analyzes a query each time something is
built on it, and every part of it that is a Python object is a call to the JVM, which adds up where an epoch takes a
fraction of a second.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

from pyspark.sql import DataFrame

from nosync.flow.bound_stage import BoundStage, InputEdge
from nosync.flow.fusion import all_hold, conditions_of
from nosync.flow.internal_columns import HASH64_COLUMN
from nosync.flow.kinds import SELECT, WHERE
from nosync.flow.stage_options import ExpressionOptions
from nosync.operators.canonical import is_hashed_in_tasks
from nosync.runtime.fused_rows import OK_COLUMN, PLACE_COLUMN, SIDE_COLUMN, Carried, carried, edge_of
from nosync.spark.expressions import conditional, hash_of, is_star, place_of, quoted
from nosync.spark.selecting import selected


@dataclass(frozen=True)
class Given:
    """Holds the rows of a segment's sources, and how they get to their shards."""

    rows: DataFrame
    place: str
    """The hash that a row is placed by, in SQL."""
    only_for_place: tuple[str, ...] = ()
    """Columns that tasks need not get."""
    placed_by: Sequence[str] = ()
    """Columns whose hash that is, where tasks compute it as well; else empty."""


def given_rows(
    sources: Sequence[BoundStage],
    edges: Sequence[InputEdge],
    stages: Mapping[str, BoundStage],
    inputs: Mapping[str, DataFrame],
    beside: Sequence[str] = (),
) -> Given:
    """Returns each source's rows with what expressions say of them. `beside`: columns of all rows, which are sent as
    they are.
    """
    frames, places, is_place_wanted, placed_by = [], [], False, tuple[str, ...]()
    for n, (source, columns) in enumerate(zip(sources, carried(sources, edges, stages), strict=True)):
        given = inputs[source.name]
        side = n if len(sources) > 1 else None
        edge = edge_of(source, edges)
        sent = {name: quoted(name) for name in beside} | _sent(side, source, columns)
        is_hash_wanted = edge is not None and not is_hashed_in_tasks(stages[edge.jvm[-1]].rows_schema, edge.key)
        is_place_wanted = is_place_wanted or is_hash_wanted
        if is_hash_wanted or not source.is_placed_by_columns:
            sent[PLACE_COLUMN] = place_of(source)
        conditions = conditions_of(stages, edge) if edge is not None and not columns.made else None
        if edge is None:
            frames.append(selected(given, _named(sent)))
        elif conditions is not None:
            given = given.alias("__given")  # no name of it can be taken for that of a column
            frames.append(selected(given, [*_named(sent), f"{all_hold(conditions)} AS {OK_COLUMN}"]))
        else:
            frames.append(_queried(given, _text(sent, source, columns, edge, stages)))
        is_sent = PLACE_COLUMN in sent
        if not is_sent and is_hashed_in_tasks(source.schema, source.placed_by):
            placed_by = tuple(columns.given[name] for name in source.placed_by)
        places.append(PLACE_COLUMN if is_sent else hash_of([columns.given[name] for name in source.placed_by]))
    rows = reduce(lambda a, b: a.unionByName(b, allowMissingColumns=True), frames)
    cases = " ".join(f"WHEN {n} THEN {place}" for n, place in enumerate(places))
    place = places[0] if len(places) == 1 else f"CASE {SIDE_COLUMN} {cases} END"
    only_for_place = (PLACE_COLUMN,) if PLACE_COLUMN in places and not is_place_wanted else ()
    return Given(rows, place, only_for_place, placed_by if len(places) == 1 else ())


def _sent(side: int | None, source: BoundStage, carried: Carried) -> dict[str, str]:
    """Returns the columns of every row, and what is in them."""
    sent = {carried.given[name]: quoted(name) for name in source.schema.names}
    if side is not None:
        sent[SIDE_COLUMN] = str(side)
    if not is_hashed_in_tasks(source.schema, source.schema.names):
        sent[HASH64_COLUMN] = hash_of(source.schema.names)
    return sent


def _named(sent: Mapping[str, str]) -> list[str]:
    return [f"{value} AS {quoted(name)}" for name, value in sent.items()]


def _queried(given: DataFrame, text: str) -> DataFrame:
    view = f"nosync_{uuid.uuid4().hex}"
    given.createOrReplaceTempView(view)
    try:
        return given.sparkSession.sql(f"WITH __given AS (TABLE {view}) {text}")
    finally:
        # Not by `spark.catalog`, which also drops what is cached of the rows, and whoever gave them may have cached them.
        given.sparkSession._jsparkSession.sessionState().catalog().dropTempView(view)


def _text(
    sent: Mapping[str, str], source: BoundStage, carried: Carried, edge: InputEdge, stages: Mapping[str, BoundStage]
) -> str:
    """Returns the expressions one after the other, each over what the one before returns."""
    columns = [quoted(name) for name in source.schema.names]
    keep = [quoted(name) for name in sent]
    text = f"SELECT {', '.join([*_named(sent), f'TRUE AS {OK_COLUMN}', *columns])} FROM __given"
    is_some_out = False
    for name in edge.jvm:
        stage = stages[name]
        text = _applied(stage, text, columns, keep, is_some_out=is_some_out)
        is_some_out = is_some_out or stage.kind == WHERE
        columns = [quoted(column) for column in stage.rows_schema.names]
    made = [f"{quoted(name)} AS {quoted(column)}" for name, column in carried.made.items()]
    return _select([*keep, OK_COLUMN, *made], text)


def _applied(stage: BoundStage, rows: str, columns: Sequence[str], keep: Sequence[str], *, is_some_out: bool) -> str:
    """Returns a stage over `rows`, whose columns are `columns` beside those to keep.

    Rows that do not pass stay, for they are the source's. `is_some_out`: there may be such rows; expressions are not
    asked of them.
    """
    expressions: Sequence[str] = stage.options_as(ExpressionOptions).expressions
    if stage.kind == WHERE:
        passes = f"IF({OK_COLUMN}, coalesce(({expressions[0]}\n), FALSE), FALSE) AS {OK_COLUMN}"
        rows = _select([*keep, passes, *columns], rows)
        nulls = [f"IF({OK_COLUMN}, {column}, NULL) AS {column}" for column in columns]
        return _select([*keep, OK_COLUMN, *nulls], rows)
    assert stage.kind == SELECT, stage.kind
    chosen = [column for one in expressions for column in (columns if is_star(one) else [one])]
    names = stage.rows_schema.names
    if is_some_out and len(chosen) == len(names):  # not where an expression such as "s.*" makes several columns
        chosen = [conditional(one, name, OK_COLUMN) for one, name in zip(chosen, names, strict=True)]
    return _select([*keep, OK_COLUMN, *chosen], rows)


def _select(columns: Sequence[str], rows: str) -> str:
    # A line for each: an expression may end in a comment.
    return "SELECT " + "\n, ".join(columns) + f"\nFROM ({rows})"
