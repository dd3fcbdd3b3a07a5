"""Window functions: `OVER (PARTITION BY ... ORDER BY ...)` as a `per_key` of the partitions."""

from __future__ import annotations

import decimal
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pyarrow as pa
from pyspark.sql.types import StructType

from nosync.flow.stage import Stage
from nosync.kernels.over_partition import (
    PEERS,
    PLACES,
    ROWS,
    VERSION,
    WHOLE,
    Between,
    Order,
    OverColumn,
    OverPartition,
    Within,
)
from nosync.kernels.top_rows import RANKS, TopRows
from nosync.spark.expressions import quoted
from nosync.spark.plans.catalyst import (
    Node,
    conjuncts,
    found,
    id_of,
    is_attribute,
    items,
    kind_of,
    refuse_null_on_overflow,
    refused,
)
from nosync.spark.plans.event_time import length_us
from nosync.spark.plans.expressions import Expressions, Known
from nosync.spark.plans.relation import Expression, Relation, Stages, named
from nosync.spark.versions import arrow_schema

_RANKS: Mapping[str, str] = {
    "RowNumber": "row_number", "Rank": "rank", "DenseRank": "dense_rank", "PercentRank": "percent_rank",
    "CumeDist": "cume_dist", "NTile": "ntile",
}  # fmt: skip
_OF_VALUES: Mapping[str, str] = {
    "Count": "count", "Sum": "sum", "Average": "avg", "Min": "min", "Max": "max", "First": "first_value", "Last": "last_value",
    "NthValue": "nth_value",
}  # fmt: skip
_FRAMES = {
    ("RowFrame", "UnboundedPreceding", "UnboundedFollowing"): WHOLE,
    ("RangeFrame", "UnboundedPreceding", "UnboundedFollowing"): WHOLE,
    ("RowFrame", "UnboundedPreceding", "CurrentRow"): ROWS,
    ("RangeFrame", "UnboundedPreceding", "CurrentRow"): PEERS,
}

_AT_MOST = ("LessThan", "LessThanOrEqual", "GreaterThan", "GreaterThanOrEqual", "EqualTo")
"""Conditions by which a number is at most another one, that beside it or that before it."""
_MEASURED = ("ByteType", "ShortType", "IntegerType", "LongType", "FloatType", "DoubleType", "DateType")
"""Types of columns that RANGE frames go by, by a number of their own type; of dates, of days."""
_DAY_US = 86_400_000_000
_DIGITS = decimal.Context(prec=80)


class _Given:
    """The columns that window functions take: those of a relation, and expressions that are computed before."""

    def __init__(self, expressions: Expressions, relation: Relation, known: Known = ()) -> None:
        self._expressions, self.relation, self._known = expressions, relation, known
        self.computed: dict[str, Expression] = {}

    def column(self, expression: Node) -> str:
        """Returns the column of an expression, which is computed where it is not there."""
        text = self._expressions.of(expression, self.relation, self._known)
        there = (name for name in self.relation.types if text == quoted(name))
        name = next(there, named("given", str(text)))
        if name not in self.relation.types:
            self.computed[name] = text
        return name

    def order(self, orders: Sequence[Node]) -> tuple[Order, ...]:
        """Returns what rows are ordered by."""
        return tuple(
            order
            for one in orders
            for order in self._ordered_by(
                one, one.child(), str(one.direction().sql()) == "ASC", str(one.nullOrdering().sql()).endswith("FIRST")
            )
        )

    def _ordered_by(self, one: Node, value: Node, ascending: bool, nulls_first: bool) -> list[Order]:
        """Returns the orders for a value; for a struct, those of its fields, one after the other."""
        if kind_of(value.dataType()) in ("ArrayType", "CalendarIntervalType"):
            raise refused(one, "rows are ordered by numbers, texts, times and the like: name the elements")
        if kind_of(value.dataType()) != "StructType":
            return [Order(self.column(value), ascending, nulls_first)]
        orders = [Order(self.column(self._expressions.is_there(value)), nulls_first)] if value.nullable() else []
        for field in self._expressions.fields_of(value):  # null is the smallest value of a field
            orders += self._ordered_by(one, field, ascending, nulls_first=ascending)
        return orders


class Over:
    """Makes stages of window functions."""

    def __init__(self, stages: Stages, expressions: Expressions) -> None:
        self._stages, self._expressions = stages, expressions

    def of(self, plan: Node, relation: Relation, orders: Sequence[Node], most: Mapping[int, int]) -> Relation:
        """Returns a relation with the columns that a plan's window functions make, over rows in an order. `most`: of a rank, by
        the id of its attribute, up to which one rows are asked for.
        """
        texts = [self._expressions.of(one, relation) for one in items(plan.partitionSpec())]
        keys = {named("partition", str(text)): text for text in texts}
        given, zone = _Given(self._expressions, relation), str(plan.conf().sessionLocalTimeZone())
        order = given.order(orders)
        made: dict[int, OverColumn] = {}
        types = dict(relation.types)
        for output in items(plan.windowExpressions()):
            if is_attribute(output):  # Spark passes a column of the rows on here
                continue
            column = _column(output.child(), given, zone)
            what = (relation.stage.name, *keys, *map(repr, order), repr(column))
            made[id_of(output)] = replace(column, name=named(str(output.name()), *what))
            types[made[id_of(output)].name] = output.dataType()
        columns = [(one, str(types[one.name].sql())) for one in dict.fromkeys(made.values())]
        first = next(((made[i].name, number) for i, number in most.items() if i in made), None)
        stage = self._added(given, keys, order, columns, first)
        return Relation(stage, {**relation.columns, **{i: one.name for i, one in made.items()}}, types)

    def placed(self, relation: Relation, order: Sequence[Node], most: int | None, known: Known) -> tuple[Relation, str]:
        """Returns a relation with the place of each row among all rows, in a column that no attribute has. `most`: up to
        which place rows are asked for. `known`: subqueries in the order.
        """
        given = _Given(self._expressions, relation, known)
        orders = given.order(order)
        place = OverColumn(named("place", relation.stage.name, *map(repr, orders)), "row_number", pa.int32())
        first = None if most is None else (place.name, most)
        return relation.with_stage(self._added(given, {}, orders, [(place, "INT")], first)), place.name

    def _added(
        self, given: _Given, keys: Mapping[str, Expression], order: Sequence[Order],
        columns: Sequence[tuple[OverColumn, str]], first: tuple[str, int] | None,
    ) -> Stage:  # fmt: skip
        relation = given.relation
        kept = {name: quoted(name) for name in relation.types}
        before = self._stages.select(relation.stage, {**keys, **kept, **given.computed})
        over = OverPartition(tuple(keys), tuple(order), tuple(one for one, _ in columns), drops=tuple(given.computed))
        function = over if first is None else TopRows(over, *first)
        schema = {name: str(type_.sql()) for name, type_ in relation.types.items()}
        schema |= {one.name: type_ for one, type_ in columns}
        return self._stages.per_key("over", before, list(keys), function, f"{VERSION} {function!r}", schema)


def is_of_sorted(plan: Node) -> bool:
    """Returns whether a plan numbers rows in the order in which they come: what Spark makes of a LIMIT in a correlated
    subquery.
    """
    ranks = (_rank_of(one.child()) for one in items(plan.windowExpressions()) if not is_attribute(one))
    return not items(plan.orderSpec()) and any(rank in RANKS for rank in ranks)


def sorted_below(plan: Node) -> tuple[Node, list[Node]]:
    """Returns what sorts the rows of such a plan, and the projections above it, the lowest first. Raises Refused where nothing
    does.
    """
    below, projects = plan.child(), list[Node]()
    while kind_of(below) in ("Project", "SubqueryAlias"):
        projects += [below] if kind_of(below) == "Project" else []
        below = below.child()
    if kind_of(below) != "Sort":
        raise refused(plan, "LIMIT without ORDER BY takes any rows: add ORDER BY before it")
    return below, projects[::-1]


def most_asked(plan: Node) -> dict[int, int]:
    """Returns, by the id of its attribute, up to which rank a filter leaves rows, where a window function below it made the
    rank and nothing in between asks for other rows.
    """
    most: dict[int, int] = {}
    for condition in conjuncts(plan.condition()):
        asked = _at_most(condition)
        if asked is not None:
            i, number = asked
            most[i] = min(number, most.get(i, number))
    below = plan.child()
    while most and kind_of(below) in ("Project", "SubqueryAlias", "View", "Filter"):
        if kind_of(below) == "Project":
            named_here = {
                id_of(one): _attribute(one.child()) for one in items(below.projectList()) if kind_of(one) == "Alias"
            }
            renamed = {named_here.get(i, i): number for i, number in most.items()}
            most = {i: number for i, number in renamed.items() if i is not None}
        below = below.child()
    if not most or kind_of(below) != "Window":
        return {}
    computed = (one for one in items(below.windowExpressions()) if not is_attribute(one))
    ranks = {id_of(one) for one in computed if _rank_of(one.child()) in RANKS}
    return {i: number for i, number in most.items() if i in ranks}


def _rank_of(window: Node) -> str | None:
    return _RANKS.get(kind_of(window.windowFunction()))


def _at_most(condition: Node) -> tuple[int, int] | None:
    """Returns an attribute's id, and the number that it is at most, by a condition that says that."""
    kind = kind_of(condition)
    if kind not in _AT_MOST:
        return None
    attribute, number = (_attribute(condition.left()), condition.right())
    if kind in ("GreaterThan", "GreaterThanOrEqual") or (kind == "EqualTo" and attribute is None):
        attribute, number = _attribute(condition.right()), condition.left()
    if (
        attribute is None
        or kind_of(number) != "Literal"
        or kind_of(number.dataType()) not in ("IntegerType", "LongType")
    ):
        return None
    value = number.eval(None)
    return None if value is None else (attribute, int(value) - (kind in ("LessThan", "GreaterThan")))


def _attribute(expression: Node) -> int | None:
    """Returns the id of the attribute that an expression is, as it is or as a wider integer."""
    if kind_of(expression) == "Cast" and kind_of(expression.dataType()) == "LongType":
        expression = expression.child()
    return id_of(expression) if kind_of(expression) == "AttributeReference" else None


def _column(window: Node, given: _Given, zone: str) -> OverColumn:
    """Returns the column of a window function, without a name."""
    function = window.windowFunction()
    type_, kind = _arrow(window.dataType()), kind_of(function)
    if kind in _RANKS:
        number = int(items(function.children())[0].eval(None)) if kind == "NTile" else 1
        return OverColumn("", _RANKS[kind], type_, number=number)
    if kind in ("Lag", "Lead"):
        value, offset, default = items(function.children())[:3]
        is_null = kind_of(default) == "Literal" and default.nullable()
        otherwise = None if is_null else given.column(default)
        return OverColumn(
            "", kind.lower(), type_, given.column(value), number=int(offset.eval(None)), default=otherwise,
            ignores_nulls=bool(function.ignoreNulls()),
        )  # fmt: skip
    aggregate = function.aggregateFunction() if kind == "AggregateExpression" else function
    if kind_of(aggregate) not in _OF_VALUES:
        raise refused(
            window,
            "of functions OVER a window, ranks, lag, lead, count, sum, avg, min, max, first_value, last_value and nth_value "
            "are translated",
        )
    if kind == "AggregateExpression" and (function.isDistinct() or found(function.filter()) is not None):
        raise refused(window, "DISTINCT and FILTER are not translated OVER a window")
    return _over_frame(window, aggregate, type_, given, zone)


def _over_frame(window: Node, function: Node, type_: pa.DataType, given: _Given, zone: str) -> OverColumn:
    frame = _frame(window, zone)
    if frame is None:
        raise refused(
            window,
            "frames of RANGE are by a number of the type of the column, or by days or seconds of a date or a time",
        )
    kind, (child, *others) = kind_of(function), items(function.children())
    refuse_null_on_overflow(window, function)
    of_type = kind_of(child.dataType())
    if kind == "Average" and of_type == "DecimalType":
        raise refused(window, "a mean of decimals OVER a window is not translated: cast them to double")
    if "Interval" in of_type and kind in ("Sum", "Average"):
        raise refused(window, "sums of intervals are not there: sum their seconds")
    if kind in ("Min", "Max") and of_type in ("StructType", "ArrayType"):
        raise refused(
            window,
            "lists and structs are not compared OVER a window: say first_value(...) with ORDER BY, or order by the fields",
        )
    if kind == "Count" and others:
        raise refused(window, "count of several columns OVER a window is not translated")
    column = given.column(child) if kind != "Count" or child.nullable() else None
    ignores = _OF_VALUES[kind] in PLACES and bool(function.ignoreNulls())
    number = int(others[0].eval(None)) if kind == "NthValue" else 1
    return OverColumn("", _OF_VALUES[kind], type_, column, frame, number, ignores_nulls=ignores)


def _frame(window: Node, zone: str) -> str | Between | Within | None:
    """Returns the frame of a window function; None for one that is not translated."""
    frame = window.windowSpec().frameSpecification()
    by, lower, upper = (kind_of(one) for one in (frame.frameType(), frame.lower(), frame.upper()))
    if (by, lower, upper) in _FRAMES:
        return _FRAMES[by, lower, upper]
    bounds: list[float | None] = []
    for name, bound in ((lower, frame.lower()), (upper, frame.upper())):
        if name in ("CurrentRow", "UnboundedPreceding", "UnboundedFollowing"):
            bounds.append(0 if name == "CurrentRow" else None)
        elif by == "RowFrame":
            bounds.append(int(bound.eval(None)))
        else:
            (order,) = items(window.windowSpec().orderSpec())  # Spark takes no other for such a bound
            distance = _distance(window, bound, order.child().dataType(), zone)
            if distance is None:
                return None
            bounds.append(distance)
    if by == "RowFrame":
        first, last = (None if one is None else int(one) for one in bounds)
        return Between(first, last)
    return Within(*bounds)


def _distance(window: Node, bound: Node, of: Node, zone: str) -> float | None:
    """Returns how far a bound of a RANGE is, as `Within` has it; None for one that is not translated.

    Raises UnsupportedQueryError where that depends on when clocks are changed.
    """
    of_type, by = kind_of(of), kind_of(bound.dataType())
    if by == "DayTimeIntervalType" and of_type in ("DateType", "TimestampNTZType"):
        return int(bound.eval(None)) // (_DAY_US if of_type == "DateType" else 1)
    if by == "DayTimeIntervalType" and of_type == "TimestampType":
        return length_us(window, bound, zone)
    if of_type == "DecimalType":
        same = bound.dataType().equals(of)
        return int(bound.eval(None).toJavaBigDecimal().scaleb(of.scale(), _DIGITS)) if same else None
    if of_type in _MEASURED and (by == of_type or (of_type == "DateType" and by == "IntegerType")):
        distance: float = bound.eval(None)
        return distance
    return None


def _arrow(type_: Node) -> pa.DataType:
    """Returns the type in Arrow of a type of the JVM."""
    field = {"name": "it", "type": json.loads(str(type_.json())), "nullable": True, "metadata": {}}
    return arrow_schema(StructType.fromJson({"type": "struct", "fields": [field]})).field(0).type
