"""Window functions: `OVER (PARTITION BY ... ORDER BY ...)` as a `per_key` of the partitions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import pyarrow as pa
from pyspark.sql.types import StructType

from nosync.kernels.over_partition import PEERS, ROWS, VERSION, WHOLE, Order, OverColumn, OverPartition
from nosync.spark.plans.catalyst import Node, found, id_of, items, kind_of, quoted, refused
from nosync.spark.plans.expressions import Expressions
from nosync.spark.plans.relation import Expression, Relation, Stages, named
from nosync.spark.versions import arrow_schema

_RANKS: Mapping[str, str] = {
    "RowNumber": "row_number", "Rank": "rank", "DenseRank": "dense_rank", "PercentRank": "percent_rank",
    "CumeDist": "cume_dist", "NTile": "ntile",
}  # fmt: skip
_OF_VALUES: Mapping[str, str] = {
    "Count": "count", "Sum": "sum", "Average": "avg", "Min": "min", "Max": "max", "First": "first_value", "Last": "last_value",
}  # fmt: skip
_FRAMES = {
    ("RowFrame", "UnboundedPreceding", "UnboundedFollowing"): WHOLE,
    ("RangeFrame", "UnboundedPreceding", "UnboundedFollowing"): WHOLE,
    ("RowFrame", "UnboundedPreceding", "CurrentRow"): ROWS,
    ("RangeFrame", "UnboundedPreceding", "CurrentRow"): PEERS,
}


class Over:
    """Makes stages of window functions."""

    def __init__(self, stages: Stages, expressions: Expressions) -> None:
        self._stages, self._expressions = stages, expressions

    def of(self, plan: Node, relation: Relation) -> Relation:
        """Returns a relation with the columns that a plan's window functions make."""
        keys: dict[str, Expression] = {}
        for one in items(plan.partitionSpec()):
            text = self._expressions.of(one, relation)
            keys[named("partition", str(text))] = text
        order, given = self._order(relation, items(plan.orderSpec()))
        outputs = items(plan.windowExpressions())
        made = [self._column(output, relation, given, str((keys, order))) for output in outputs]
        columns = [(one, str(output.dataType().sql())) for one, output in zip(made, outputs, strict=True)]
        stage = self._added(relation, keys, given, order, columns)
        by_id = {id_of(output): one.name for one, output in zip(made, outputs, strict=True)}
        types = {one.name: output.dataType() for one, output in zip(made, outputs, strict=True)}
        return Relation(stage.stage, {**relation.columns, **by_id}, {**relation.types, **types})

    def placed(self, relation: Relation, order: Sequence[Node]) -> tuple[Relation, str]:
        """Returns a relation with the place of each row among all rows, in a column that no attribute has."""
        orders, given = self._order(relation, order)
        place = OverColumn(named("place", relation.stage.name, str(orders)), "row_number", pa.int32())
        return self._added(relation, {}, given, orders, [(place, "INT")]), place.name

    def _added(
        self, relation: Relation, keys: Mapping[str, Expression], given: Mapping[str, Expression], order: Sequence[Order],
        columns: Sequence[tuple[OverColumn, str]],
    ) -> Relation:  # fmt: skip
        kept = {name: quoted(name) for name in relation.types}
        before = self._stages.select(relation.stage, {**keys, **kept, **given})
        function = OverPartition(tuple(keys), tuple(order), tuple(one for one, _ in columns), drops=tuple(given))
        schema = {name: str(type_.sql()) for name, type_ in relation.types.items()}
        schema |= {one.name: type_ for one, type_ in columns}
        stage = self._stages.per_key("over", before, list(keys), function, f"{VERSION} {function!r}", schema)
        return relation.with_stage(stage)

    def _order(self, relation: Relation, orders: Sequence[Node]) -> tuple[tuple[Order, ...], dict[str, Expression]]:
        """Returns what rows are ordered by, and the columns to compute for that."""
        given: dict[str, Expression] = {}
        found_orders = []
        for one in orders:
            if kind_of(one.child().dataType()) in ("StructType", "ArrayType", "CalendarIntervalType"):
                raise refused(one, "rows are ordered by numbers, texts, times and the like: name the fields")
            column = self._given(one.child(), relation, given)
            ascending = str(one.direction().sql()) == "ASC"
            found_orders.append(Order(column, ascending, str(one.nullOrdering().sql()).endswith("FIRST")))
        return tuple(found_orders), given

    def _given(self, expression: Node, relation: Relation, given: dict[str, Expression]) -> str:
        """Returns the column of an expression, which is added to those to compute where it is not there."""
        if kind_of(expression) == "AttributeReference" and id_of(expression) in relation.columns:
            return relation.columns[id_of(expression)]
        text = self._expressions.of(expression, relation)
        name = named("given", str(text))
        given[name] = text
        return name

    def _column(self, output: Node, relation: Relation, given: dict[str, Expression], what: str) -> OverColumn:
        window = output.child()
        function = window.windowFunction()
        name = named(str(output.name()), str(window.sql()), relation.stage.name, what)
        type_ = _arrow(output.dataType())
        kind = kind_of(function)
        if kind in _RANKS:
            number = int(items(function.children())[0].eval(None)) if kind == "NTile" else 1
            return OverColumn(name, _RANKS[kind], type_, number=number)
        if kind in ("Lag", "Lead"):
            return self._shifted(name, window, function, type_, relation, given)
        if kind != "AggregateExpression" or kind_of(function.aggregateFunction()) not in _OF_VALUES:
            raise refused(window, "of functions OVER a window, ranks, lag, lead, count, sum, avg, min, max, first_value and "
                          "last_value are translated")  # fmt: skip
        if function.isDistinct() or found(function.filter()) is not None:
            raise refused(window, "DISTINCT and FILTER are not translated OVER a window")
        return self._over_frame(name, window, function.aggregateFunction(), type_, relation, given)

    def _shifted(
        self,
        name: str,
        window: Node,
        function: Node,
        type_: pa.DataType,
        relation: Relation,
        given: dict[str, Expression],
    ) -> OverColumn:
        value, offset, default = items(function.children())[:3]
        if bool(function.ignoreNulls()):
            raise refused(window, "lag and lead that pass over nulls are not translated")
        number = int(offset.eval(None))
        otherwise = None
        if not (kind_of(default) == "Literal" and default.nullable()):
            otherwise = self._given(default, relation, given)
        how = "lag" if kind_of(function) == "Lag" else "lead"
        column = self._given(value, relation, given)
        return OverColumn(name, how, type_, column, number=number, default=otherwise)

    def _over_frame(
        self,
        name: str,
        window: Node,
        function: Node,
        type_: pa.DataType,
        relation: Relation,
        given: dict[str, Expression],
    ) -> OverColumn:
        frame = window.windowSpec().frameSpecification()
        bounds = (kind_of(frame.frameType()), kind_of(frame.lower()), kind_of(frame.upper()))
        if bounds not in _FRAMES:
            raise refused(window, "a frame is the whole partition, or begins with it and ends at the current row")
        children = items(function.children())
        kind = kind_of(function)
        if kind == "Average" and kind_of(children[0].dataType()) == "DecimalType":
            raise refused(
                window, "a running mean of decimals is not translated: cast them to double, or divide sum by count"
            )
        if "Interval" in kind_of(children[0].dataType()) and kind in ("Sum", "Average"):
            raise refused(window, "sums of intervals are not there: sum their seconds")
        if kind == "Count" and len(children) > 1:
            raise refused(window, "count of several columns OVER a window is not translated")
        column = self._given(children[0], relation, given) if kind != "Count" or children[0].nullable() else None
        ignores = kind in ("First", "Last") and bool(function.ignoreNulls())
        return OverColumn(name, _OF_VALUES[kind], type_, column, _FRAMES[bounds], ignores_nulls=ignores)


def _arrow(type_: Node) -> pa.DataType:
    """Returns the type in Arrow of a type of the JVM."""
    field = {"name": "it", "type": json.loads(str(type_.json())), "nullable": True, "metadata": {}}
    return arrow_schema(StructType.fromJson({"type": "struct", "fields": [field]})).field(0).type
