"""Plans that put several relations together, or make several rows of one: UNION ALL, and what GROUPING SETS read."""

from __future__ import annotations

from collections.abc import Sequence

from nosync.flow.stage import Stage
from nosync.spark.expressions import quoted
from nosync.spark.plans.catalyst import Node, id_of, items
from nosync.spark.plans.expressions import Expressions
from nosync.spark.plans.relation import Expression, Relation, Stages, named


def united(stages: Stages, parts: Sequence[tuple[Relation, Sequence[Node]]], plan: Node) -> Relation:
    """Returns the rows of all parts, with the columns of the plan. `parts`: each with its attributes, in order."""
    outputs = items(plan.output())
    names = [named(str(one.name()), "union", str(i)) for i, one in enumerate(outputs)]
    made = []
    for relation, attributes in parts:
        casts = {
            name: f"CAST({quoted(relation.columns[id_of(attribute)])} AS {one.dataType().sql()})"
            for name, one, attribute in zip(names, outputs, attributes, strict=True)
        }
        made.append(stages.select(relation.stage, casts))
    return _of(stages, made, names, outputs)


def expanded(stages: Stages, expressions: Expressions, relation: Relation, plan: Node) -> Relation:
    """Returns a row for each projection of the plan and each row."""
    outputs = items(plan.output())
    names = [named(str(one.name()), "expand", str(i)) for i, one in enumerate(outputs)]
    made = []
    for projection in items(plan.projections()):
        texts: dict[str, Expression] = {}
        for name, one, e in zip(names, outputs, items(projection), strict=True):
            text = expressions.of(e, relation)
            texts[name] = f"CAST({text} AS {one.dataType().sql()})" if isinstance(text, str) else text
        made.append(stages.select(relation.stage, texts))
    return _of(stages, made, names, outputs)


def _of(stages: Stages, parts: Sequence[Stage], names: Sequence[str], outputs: Sequence[Node]) -> Relation:
    types = {name: one.dataType() for name, one in zip(names, outputs, strict=True)}
    return Relation(stages.union(parts), {id_of(one): name for one, name in zip(outputs, names, strict=True)}, types)
