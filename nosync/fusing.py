"""Fused segments: sources and the keyed stage that takes their rows, in one task (see `BoundFlow.fused`).

The JVM sends each row of a source once, in the shard of the key that it is placed by, with what the expressions between the
source and the keyed stage say of it:

    __place, _hash64        the hash of that key, and of the whole row
    __side                  which source it is of, where there are several
    __<n>_is_<column>       the columns of the n-th source
    __<n>_ok                whether the expressions let it pass
    __<n>_made_<column>     what they compute; columns that they pass on are not sent twice

So the rows of the feed are those of the source that pass, in the same order: what they would be had they been shuffled
after the source was recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from nosync.lsm.columns import conformed
from nosync.operators import HASH64_COLUMN, canonical_order
from nosync.plan import BoundStage, Feed, kept_through

PLACE_COLUMN, SIDE_COLUMN = "__place", "__side"


def source_column(source: int, name: str) -> str:
    return f"__{source}_is_{name}"


def ok_column(source: int) -> str:
    return f"__{source}_ok"


def made_column(source: int, name: str) -> str:
    return f"__{source}_made_{name}"


def split(
    rows: pa.Table, sources: Sequence[BoundStage], feeds: Sequence[Feed], stages: Mapping[str, BoundStage]
) -> tuple[list[pa.Table], dict[int, pa.Table]]:
    """What the JVM sent: the rows of each source in canonical order with `_hash64` of the whole row, and by number of each
    feed of expressions its rows, with `_hash64` of the key.
    """
    given, fed = [], {}
    for n, source in enumerate(sources):
        mine = rows if len(sources) == 1 else rows.filter(pc.equal(rows.column(SIDE_COLUMN), n))
        table = _renamed(mine, source.schema, [source_column(n, name) for name in source.schema.names])
        table = table.append_column(HASH64_COLUMN, mine.column(HASH64_COLUMN))
        order = canonical_order(table)
        given.append(table.take(pa.array(order)))
        for i, feed in enumerate(feeds):
            if feed.jvm and feed.emission.stage == source.name:
                mine = mine.take(pa.array(order[mine.column(ok_column(n)).to_numpy()[order]]))
                fed[i] = _made(mine, n, feed, stages)
    return given, fed


def _made(passed: pa.Table, source: int, feed: Feed, stages: Mapping[str, BoundStage]) -> pa.Table:
    schema, kept = stages[feed.jvm[-1]].rows_schema, kept_through(stages, feed)
    names = [source_column(source, kept[n]) if n in kept else made_column(source, n) for n in schema.names]
    return _renamed(passed, schema, names).append_column(HASH64_COLUMN, passed.column(PLACE_COLUMN))


def _renamed(rows: pa.Table, schema: pa.Schema, names: Sequence[str]) -> pa.Table:
    """The columns of these names, as those of `schema`."""
    columns = [conformed(rows.column(name), field.type) for name, field in zip(names, schema, strict=True)]
    return pa.Table.from_arrays(columns, schema=schema)


def no_rows(schema: pa.Schema) -> pa.Table:
    """As `split` gives them."""
    return schema.append(pa.field(HASH64_COLUMN, pa.int64())).empty_table()
