"""explode and its kin: functions over rows that make several of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nosync.kernels.own_function import OwnFunction
from nosync.lsm.columnar.columns import CHANGE_TYPE_COLUMN, as_array
from nosync.lsm.trace.change_feed import DELETE, INSERT, UPDATE_AFTER, UPDATE_BEFORE
from nosync.spark.expressions import quoted
from nosync.spark.plans.catalyst import Node, id_of, items, kind_of, refused
from nosync.spark.plans.expressions import Expressions
from nosync.spark.plans.relation import Relation, Stages, named

_VERSION = "nosync explode 1"


@dataclass(frozen=True)
class Explode(OwnFunction):
    """Makes a row of each element of a list."""

    list: str
    names: tuple[str, ...]
    """The columns of the elements: one, or one for each field of a struct."""
    position: str | None
    outer: bool
    """Says whether a row whose list has no elements stays, with nulls."""

    def __call__(self, rows: pa.Table) -> pa.Table:
        lists = as_array(rows.column(self.list))
        parents, elements = pc.list_parent_indices(lists).to_numpy(), pc.list_flatten(lists)
        starts = np.searchsorted(parents, parents)
        places = pa.array(np.arange(len(parents)) - starts, pa.int32())
        source: pa.Array = pa.array(np.arange(len(parents)))
        if self.outer:
            alone = np.setdiff1d(np.arange(len(lists)), parents)
            parents = np.concatenate([parents, alone])
            order = np.argsort(parents, kind="stable")
            missing = pa.nulls(len(alone), pa.int64())
            source = pa.concat_arrays([source, missing]).take(pa.array(order))
            parents = parents[order]
        made = in_single_changes(rows.drop_columns([self.list])).take(pa.array(parents))
        if self.position is not None:
            made = made.append_column(self.position, places.take(source))
        elements = elements.take(source)
        if len(self.names) == 1:
            return made.append_column(self.names[0], elements)
        for i, name in enumerate(self.names):
            made = made.append_column(name, pc.struct_field(elements, [i]))
        return made


@dataclass(frozen=True)
class Replicate(OwnFunction):
    """Makes as many of each row as a column says."""

    times: str

    def __call__(self, rows: pa.Table) -> pa.Table:
        times = rows.column(self.times).to_numpy()
        at = np.repeat(np.arange(rows.num_rows), np.maximum(times, 0))
        return in_single_changes(rows.drop_columns([self.times])).take(pa.array(at))


def in_single_changes(rows: pa.Table) -> pa.Table:
    """Returns rows in which an update is a deletion and an insertion: what is made of its halves are no pairs."""
    if CHANGE_TYPE_COLUMN not in rows.column_names:
        return rows
    kinds = rows.column(CHANGE_TYPE_COLUMN)
    kinds = pc.if_else(pc.equal(kinds, UPDATE_BEFORE), DELETE, pc.if_else(pc.equal(kinds, UPDATE_AFTER), INSERT, kinds))
    return rows.set_column(rows.schema.get_field_index(CHANGE_TYPE_COLUMN), CHANGE_TYPE_COLUMN, kinds)


def exploded(
    stages: Stages,
    expressions: Expressions,
    relation: Relation,
    generator: Node,
    outputs: Sequence[Node],
    *,
    outer: bool,
) -> Relation:
    """Returns the relation with the elements of a list or a map beside its rows."""
    kind = kind_of(generator)
    if kind not in ("Explode", "PosExplode", "Inline"):
        raise refused(
            generator, "of what makes several rows of one, only explode, posexplode and inline are translated"
        )
    (child,) = items(generator.children())
    text = expressions.of(child, relation)
    is_map = kind_of(child.dataType()) == "MapType"
    if is_map and not isinstance(text, str):
        raise refused(generator, "the map is made by what SQL text cannot say: explode map_entries() of it")
    given = f"map_entries({text})" if is_map else text
    names = [named(str(one.name()), "explode", str(given), str(i)) for i, one in enumerate(outputs)]
    if not relation.types.keys().isdisjoint(names):  # those of the same list, exploded before
        names = [named(name, relation.stage.name) for name in names]
    position = names[0] if kind == "PosExplode" else None
    elements = tuple(names[1:] if position is not None else names)
    as_list = named("list", str(given))
    columns = {name: quoted(name) for name in relation.types}
    with_list = stages.select(relation.stage, {**columns, as_list: given})
    function = Explode(as_list, elements, position, outer)
    types = {**relation.types, **{name: one.dataType() for name, one in zip(names, outputs, strict=True)}}
    schema = {name: str(type_.sql()) for name, type_ in types.items()}
    stage = stages.flat_map("explode", with_list, function, f"{_VERSION} {function!r}", schema)
    by_id = {id_of(one): name for one, name in zip(outputs, names, strict=True)}
    return Relation(stage, {**relation.columns, **by_id}, types)


def replicated(
    stages: Stages, expressions: Expressions, relation: Relation, generator: Node, outputs: Sequence[Node]
) -> Relation:
    """Returns rows as often as their first column says: what is left by EXCEPT ALL and INTERSECT ALL."""
    times, *rest = items(generator.children())
    names = [named(str(one.name()), "replicate", str(i)) for i, one in enumerate(outputs)]
    number = named("times", relation.stage.name)
    texts = {name: expressions.of(one, relation) for name, one in zip(names, rest, strict=True)}
    given = stages.select(relation.stage, {number: expressions.of(times, relation), **texts})
    types = {name: one.dataType() for name, one in zip(names, outputs, strict=True)}
    function = Replicate(number)
    schema = {name: str(type_.sql()) for name, type_ in types.items()}
    stage = stages.flat_map("repeat", given, function, f"{_VERSION} {function!r}", schema)
    return Relation(stage, {id_of(one): name for one, name in zip(outputs, names, strict=True)}, types)
