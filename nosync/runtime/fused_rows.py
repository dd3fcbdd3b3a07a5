"""Fused segments: sources and the keyed stage that takes their rows, in one task (see `BoundFlow.fused`).

The JVM sends each row of a source once, in the shard of the key that it is placed by, with what the expressions between
the source and the keyed stage say of it:

    __side              which source it is of, where there are several
    __ok                whether the expressions let it pass
    __c<n>              the columns of the source, and what expressions make of them; columns that they pass on are not sent
                        twice, and sources share columns of the same type: each that is sent takes time for every row
    _hash64, __place    the hash of the whole row, and of the key that it is placed by, where the task would take longer to
                        hash them (`nosync.lsm.columnar.hashing.is_quick`)

So the rows of the edge are those of the source that pass, in the same order: what they would be had they been shuffled
after the source was recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from nosync.flow.bound_stage import BoundStage, InputEdge
from nosync.flow.fusion import kept_through
from nosync.flow.internal_columns import HASH64_COLUMN
from nosync.lsm.columnar.columns import Indices, conformed
from nosync.lsm.columnar.hashing import is_quick
from nosync.operators.canonical import canonical_order, hashed, one_nan

PLACE_COLUMN, SIDE_COLUMN, OK_COLUMN = "__place", "__side", "__ok"
ALL = -1


@dataclass(frozen=True)
class Carried:
    """Says which columns carry the rows of one source."""

    given: Mapping[str, str]
    """The column that carries each column of the source."""
    made: Mapping[str, str]
    """The column that carries each column which its expressions compute."""


def carried(
    sources: Sequence[BoundStage], edges: Sequence[InputEdge], stages: Mapping[str, BoundStage]
) -> list[Carried]:
    """Returns what carries the rows of each source. The order of the columns is that of the sources, so both sides come
    to the same.
    """
    numbers: dict[tuple[pa.DataType, int, int], int] = {}
    found = []
    for n, source in enumerate(sources):
        used: dict[pa.DataType, int] = {}

        def column(type_: pa.DataType, used: dict[pa.DataType, int] = used, n: int = n) -> str:
            """Returns the next column of the type. Where Spark may have several of a type (collations), it is one of
            the source's own.
            """
            used[type_] = used.get(type_, 0) + 1
            shared_by = ALL if is_quick([type_]) else n
            return f"__c{numbers.setdefault((type_, shared_by, used[type_]), len(numbers))}"

        given = {field.name: column(field.type) for field in source.schema}
        edge, made = edge_of(source, edges), {}
        if edge is not None:
            kept = kept_through(stages, edge)
            rows = stages[edge.jvm[-1]].rows_schema
            made = {field.name: column(field.type) for field in rows if field.name not in kept}
        found.append(Carried(given, made))
    return found


def edge_of(source: BoundStage, edges: Sequence[InputEdge]) -> InputEdge | None:
    """Returns the edge that brings what expressions make of a source."""
    return next((edge for edge in edges if edge.jvm and edge.output.stage == source.name), None)


def split(
    rows: pa.Table, sources: Sequence[BoundStage], edges: Sequence[InputEdge], stages: Mapping[str, BoundStage]
) -> tuple[list[pa.Table], dict[int, pa.Table]]:
    """Parts what the JVM sent.

    Returns the rows of each source in canonical order, with `_hash64` of the whole row; and by number of each edge of
    expressions its rows, with `_hash64` of the key.
    """
    given, fed = [], {}
    for n, (source, columns) in enumerate(zip(sources, carried(sources, edges, stages), strict=True)):
        mine = rows if len(sources) == 1 else rows.filter(pc.equal(rows.column(SIDE_COLUMN), n))
        table = renamed(mine, source.schema, [columns.given[name] for name in source.schema.names])
        table = hashed(table, source.schema.names, sent=mine)
        order = canonical_order(table)
        given.append(table.take(pa.array(order)))
        edge = edge_of(source, edges)
        if edge is not None:
            passed: Indices = order[mine.column(OK_COLUMN).to_numpy()[order]]
            fed[edges.index(edge)] = _made(mine.take(pa.array(passed)), columns, edge, stages)
    return given, fed


def _made(passed: pa.Table, columns: Carried, edge: InputEdge, stages: Mapping[str, BoundStage]) -> pa.Table:
    schema, kept = stages[edge.jvm[-1]].rows_schema, kept_through(stages, edge)
    names = [columns.given[kept[name]] if name in kept else columns.made[name] for name in schema.names]
    return hashed(renamed(passed, schema, names), edge.key, sent=passed, under=PLACE_COLUMN)


def renamed(rows: pa.Table, schema: pa.Schema, names: Sequence[str]) -> pa.Table:
    """Returns the columns of these names, as those of `schema`."""
    columns = [one_nan(conformed(rows.column(name), field.type)) for name, field in zip(names, schema, strict=True)]
    return pa.Table.from_arrays(columns, schema=schema)


def no_rows(schema: pa.Schema) -> pa.Table:
    """Returns no rows, in the form that `split` gives them."""
    return schema.append(pa.field(HASH64_COLUMN, pa.int64())).empty_table()
