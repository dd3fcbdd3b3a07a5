"""GROUP BY as aggregates, with a select before (keys and arguments) and one after (answers of Spark's types).

What DISTINCT makes a difference to is an aggregate over rows without doubles; what needs all values of a group, such as
a percentile, is a `per_key`. Where a query asks for several of these, they are joined by the groups' keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pyspark.sql import functions as F

from nosync.flow.stage import Stage
from nosync.kernels import aggregates as functions
from nosync.kernels.aggregates import Aggregate
from nosync.kernels.windows import END, START
from nosync.spark.expressions import quoted
from nosync.spark.plans.aggregate_part import Part
from nosync.spark.plans.catalyst import (
    Node,
    found,
    id_of,
    is_replaceable,
    items,
    kind_of,
    nodes_of,
    refuse_null_on_overflow,
    refused,
)
from nosync.spark.plans.event_time import EventWindow
from nosync.spark.plans.expressions import Expressions, Known
from nosync.spark.plans.joins import null_safe
from nosync.spark.plans.means import check_mean, mean_of_decimals
from nosync.spark.plans.relation import Coded, Expression, Relation, Stages, named
from nosync.spark.plans.whole_groups import (
    COLLECT_LIST,
    COLLECT_SET,
    PERCENTILE,
    PERCENTILE_FROM_ABOVE,
    VERSION,
    OfGroup,
    WholeGroups,
)

_REFUSED: Mapping[str, str] = {
    "First": "which row is first is chance: say min_by(column, order)",
    "Last": "which row is last is chance: say max_by(column, order)",
    "HyperLogLogPlusPlus": "an approximation that follows deletions is not there: say count(DISTINCT ...), which is exact",
    "ApproximatePercentile": "an approximation that follows deletions is not there: say percentile(...), which is exact",
}
_SAME_TWICE = ("Min", "Max", "MaxBy", "MinBy", "CollectSet")
"""The aggregates that DISTINCT makes no difference to."""
_OF_WHOLE_GROUPS = ("CollectList", "CollectSet", "Percentile")

_SESSIONS = (
    "sessions need a watermark, by which they end: say withWatermark(column, delay) before, or declare window(gap=) and the "
    "view over it"
)
_BY_FIELD = "max_by(column, field) and min_by say which row has the largest or smallest field"
_ARGUMENTS = {"name", "key", "persist", "self"}
"""What `aggregate` calls its own arguments, so that no aggregate can be called so."""


class Aggregates:
    """Makes stages of aggregates; `note` keeps what whoever runs a view should know."""

    def __init__(self, stages: Stages, expressions: Expressions, note: Callable[[str], None], emit: str) -> None:
        self._stages, self._expressions, self._note, self._emit = stages, expressions, note, emit
        self._wanted: list[tuple[Node, str]] = []
        self._given: Known = ()
        self._taken: set[str] = set()

    def of(
        self, plan: Node, relation: Relation, wanted: Mapping[int, str], windows: EventWindow | None = None,
        given: Known = (),
    ) -> tuple[Relation, list[tuple[Node, str]]]:  # fmt: skip
        """Returns the groups of a relation, and the columns that have the values of expressions of a plan's answers.
        `wanted`: what columns are to be called, by the attributes of the plan, as far as they are groups and calls.
        `windows`: those of one of the groups, if a watermark closes them. `given`: columns of the relation that have the values
        of subqueries.
        """
        self._given = given
        outputs = items(plan.aggregateExpressions())
        calls = calls_in(outputs)
        # Those of a window are taken for its arguments.
        are_named = [] if windows is not None else [one for one in outputs if id_of(one) in wanted]
        self._wanted = [(_value_of(one), wanted[id_of(one)]) for one in are_named]
        keys: dict[str, Expression] = {}
        known: list[tuple[Node, str]] = []
        types: dict[str, Node] = {}
        groups = items(plan.groupingExpressions())
        self._taken = {name.lower() for name in relation.types} | _ARGUMENTS
        for group in groups:
            if windows is not None and id_of(windows.attribute) == _id_or_none(group):
                continue
            if kind_of(group) == "AttributeReference" and "spark.sessionWindow" in str(group.metadata().json()):
                raise refused(group, _SESSIONS)
            text = _without_negative_zero(self._said_of(group, relation), group)
            name = (
                relation.columns[id_of(group)]
                if kind_of(group) == "AttributeReference"
                else named("key", relation.stage.name, str(text))
            )
            name = self._name_wanted(group, name) or name
            keys[name], types[name] = text, group.dataType()
            known.append((group, name))
        if windows is None:
            stage = self._grouped(relation, keys, calls, types, known)
        else:
            stage = self._windowed(relation, keys, calls, types, known, windows)
        by_id = {id_of(group): name for group, name in known if kind_of(group) == "AttributeReference"}
        return Relation(stage, by_id, types), known

    def _grouped(
        self, relation: Relation, keys: Mapping[str, Expression], calls: Sequence[Node], types: dict[str, Node],
        known: list[tuple[Node, str]],
    ) -> Stage:  # fmt: skip
        """Returns the groups. Adds to `types` and `known` the columns that have the answers of calls."""
        if not calls and keys:  # without a key there is one row, whatever there is
            return self._stages.distinct(self._stages.select(relation.stage, keys))
        key_types = dict(types)
        over = relation.stage.name
        plain, whole, sets = Part(over), Part(over), dict[str, Part]()
        for call in calls:
            if kind_of(_function_of(call)) in _OF_WHOLE_GROUPS:
                self._add_whole(whole, call, relation)
            elif not _needs_distinct(call):
                self._add(plain, call, relation)
        for call in calls:
            if kind_of(_function_of(call)) not in _OF_WHOLE_GROUPS and _needs_distinct(call):
                of_set = Part(over, beside=plain.aggregates)
                self._add(sets.setdefault(self._arguments(call, relation), of_set), call, relation)
        if not (plain.answers or sets) and not keys:
            plain.has(functions.count())  # the row that is there without any rows
        stages = [(_aggregated(self._stages, relation, keys, plain), plain)] if plain.aggregates else []
        stages += [(_aggregated(self._stages, relation, keys, part, distinct=True), part) for part in sets.values()]
        if whole.answers:
            stages.append((self._of_whole_groups(relation, keys, whole, key_types), whole))
        for _, part in stages:
            for call, name, _ in part.answers:
                types[name] = call.dataType()
                known.append((call, name))
        (stage, part), *others = stages
        columns = [*keys, *(name for _, name, _ in part.answers)]
        for other, more in others:
            joined = [name for _, name, _ in more.answers]
            stage = _beside(self._stages, stage, columns, other, joined, key_types)
            columns += joined
        return stage if keys else _with_empty_lists(self._stages, stage, columns, whole)

    def _windowed(
        self, relation: Relation, keys: Mapping[str, Expression], calls: Sequence[Node], types: dict[str, Node],
        known: list[tuple[Node, str]], windows: EventWindow,
    ) -> Stage:  # fmt: skip
        """Returns the groups by windows that a watermark closes. Adds as `_grouped` does."""
        part = Part(relation.stage.name)
        for call in calls:
            if kind_of(_function_of(call)) in _OF_WHOLE_GROUPS or _needs_distinct(call):
                raise refused(
                    call, "it is not there in windows that a watermark closes: aggregate rows without duplicates"
                )
            self._add(part, call, relation)
        if not part.aggregates:
            part.has(functions.count())
        time = relation.columns[id_of(windows.time)]
        before = self._stages.select(relation.stage, {**keys, time: quoted(time), **part.arguments})
        stage = self._stages.window(before, time, windows, list(keys), part.aggregates, self._emit)
        window = named("window", stage.name)
        types[window] = windows.attribute.dataType()
        known.append((windows.attribute, window))
        for call, name, _ in part.answers:
            types[name] = call.dataType()
            known.append((call, name))
        self._note(
            f"rows that come {windows.watermark.delay} after the newest ones count no more where their window is closed: "
            f"they are in the stage {stage.late.name}"
        )
        struct = f"named_struct('start', {quoted(START)}, 'end', {quoted(END)})"
        return self._stages.select(stage, {**_answers(keys, part), window: struct})

    def _of_whole_groups(
        self, relation: Relation, keys: Mapping[str, Expression], part: Part, key_types: Mapping[str, Node]
    ) -> Stage:
        before = self._stages.select(relation.stage, {**keys, **part.arguments})
        self._note("percentile and collect_*: all values of a group are kept, and read where one of them changes")
        function = WholeGroups(tuple(keys), tuple(part.of_group.values()))
        types = {name: str(type_.sql()) for name, type_ in part.types.items()}
        stage = self._stages.per_key("group", before, list(keys), function, f"{VERSION} {function!r}", types)
        return self._stages.select(stage, _answers(keys, part))

    # --- calls --------------------------------------------------------------------------------------------------------

    def _said_of(self, expression: Node, relation: Relation) -> Expression:
        return self._expressions.of(expression, relation, self._given)

    def _arguments(self, call: Node, relation: Relation) -> str:
        """Returns what a call is of, as a text that is the same for calls of the same."""
        return "\0".join(str(self._argument(call, child, relation)) for child in items(_function_of(call).children()))

    def _argument(self, call: Node, child: Node, relation: Relation) -> Expression:
        """Returns an argument of a call; null where its FILTER does not let a row pass."""
        condition = found(call.filter())
        text = self._said_of(child, relation)
        if condition is None:
            return text
        only = self._said_of(condition, relation)
        if not isinstance(text, str) or not isinstance(only, str):
            raise refused(call, "its FILTER cannot be said as SQL text: compute it in a column first")
        return f"IF({only}, {text}, NULL)"

    def _add_whole(self, part: Part, call: Node, relation: Relation) -> None:
        function = _function_of(call)
        argument = self._argument(call, items(function.children())[0], relation)
        if kind_of(function) == "Percentile":
            if call.isDistinct():
                raise refused(
                    call, "it is of all values: select the distinct ones in a query inside, and leave DISTINCT out"
                )
            if "Interval" in kind_of(items(function.children())[0].dataType()):
                raise refused(call, "a percentile of intervals is not there: take that of their seconds")
            share = _share_of(call, function)
            column = part.takes(_as_double(argument))
            how = PERCENTILE_FROM_ABOVE if bool(function.reverse()) else PERCENTILE
            name = named(how, part.over, column, str(share))
            text = quoted(name)
        else:
            # Versions of Spark before RESPECT NULLS have no such word.
            if "ignoreNulls" in dir(function) and not function.ignoreNulls():
                raise refused(call, "lists are without nulls: leave RESPECT NULLS out, or give coalesce(column, value)")
            share, column = 0.0, part.takes(argument)
            is_set = call.isDistinct() or kind_of(function) == "CollectSet"
            how = COLLECT_SET if is_set else COLLECT_LIST
            name = named(how, part.over, column)
            text = f"coalesce({quoted(name)}, array())"
        part.of_group[name] = OfGroup(name, how, column, share)
        part.types[name] = call.dataType()
        part.answers.append((call, name, text))

    def _add(self, part: Part, call: Node, relation: Relation) -> None:
        function = _function_of(call)
        kind = kind_of(function)
        refuse_null_on_overflow(call, function)
        answer: Callable[[Part, Node, Node, Relation], str] | None = getattr(self, f"_{kind.lower()}", None)
        if answer is None:
            raise refused(call, _REFUSED.get(kind, "there is no such aggregate that follows rows which go"))
        part.answers_by(call, answer(part, call, function, relation), self._name_wanted(call))

    def _name_wanted(self, expression: Node, has: str = "") -> str | None:
        """Returns what users call the column of an expression, which `has` a name. None: they do not, or it would be taken
        for another one, such as a group that the query does not show.
        """
        for value, name in self._wanted:
            if value.semanticEquals(expression) and (name == has or name.lower() not in self._taken):
                self._taken.add(name.lower())
                return name
        return None

    def _of_one(self, part: Part, call: Node, child: Node, relation: Relation) -> str:
        return part.takes(self._argument(call, child, relation))

    def _compared(self, part: Part, call: Node, child: Node, relation: Relation, instead: str) -> str:
        """Returns what `_of_one` does, of values that have an order. `instead`: what to write for those that have none."""
        if kind_of(child.dataType()) in ("StructType", "ArrayType", "MapType"):
            raise refused(call, f"structs, lists and maps are not compared: {instead}")
        return self._of_one(part, call, child, relation)

    def _count(self, part: Part, call: Node, function: Node, relation: Relation) -> str:
        children = items(function.children())
        nullable = [child for child in children if child.nullable()]
        if call.isDistinct() and len(children) == 1:
            column = self._compared(part, call, children[0], relation, "count DISTINCT to_json(...) of it")
            return part.has(functions.count_distinct(column))
        if call.isDistinct():  # rows without doubles are told apart by all arguments
            for child in children:
                self._of_one(part, call, child, relation)
        if not nullable and found(call.filter()) is None:
            return part.has(functions.count())
        if len(nullable) == 1 and found(call.filter()) is None:
            return part.has(functions.count(self._of_one(part, call, nullable[0], relation)))
        conditions = [f"({self._said(call, child, relation)}) IS NOT NULL" for child in nullable]
        condition = found(call.filter())
        conditions += [] if condition is None else [f"({self._said(call, condition, relation)})"]
        counted = part.takes(f"IF({' AND '.join(conditions)}, 1, NULL)")
        return part.has(functions.count(counted))

    def _said(self, call: Node, expression: Node, relation: Relation) -> str:
        text = self._said_of(expression, relation)
        if not isinstance(text, str):
            raise refused(call, "its arguments cannot be said as SQL text: compute them in a column first")
        return text

    def _sum(self, part: Part, call: Node, function: Node, relation: Relation) -> str:
        (child,) = items(function.children())
        if "Interval" in kind_of(child.dataType()):
            raise refused(call, "a sum of intervals is not there: sum their seconds")
        total = part.has(functions.sum(self._of_one(part, call, child, relation)))
        return _cast(total, call) if kind_of(child.dataType()) == "DecimalType" else total

    def _average(self, part: Part, call: Node, function: Node, relation: Relation) -> str:
        (child,) = items(function.children())
        if "Interval" in kind_of(child.dataType()):
            raise refused(call, "a mean of intervals is not there: average their seconds")
        column = self._of_one(part, call, child, relation)
        if kind_of(child.dataType()) != "DecimalType":
            return part.has(functions.mean(column))
        check_mean(call, child.dataType())
        total, n = part.has(functions.sum(column)), part.has(functions.count(column))
        return _cast(mean_of_decimals(total, n, child.dataType()), call)

    def _min(self, part: Part, call: Node, function: Node, relation: Relation) -> str:
        return part.has(functions.min(self._compared(part, call, items(function.children())[0], relation, _BY_FIELD)))

    def _max(self, part: Part, call: Node, function: Node, relation: Relation) -> str:
        return part.has(functions.max(self._compared(part, call, items(function.children())[0], relation, _BY_FIELD)))

    _anyvalue = _min

    def _variancesamp(self, part: Part, call: Node, function: Node, relation: Relation) -> str:
        return part.has(functions.variance(self._of_one(part, call, items(function.children())[0], relation)))

    def _stddevsamp(self, part: Part, call: Node, function: Node, relation: Relation) -> str:
        return part.has(functions.stddev(self._of_one(part, call, items(function.children())[0], relation)))

    def _variancepop(self, part: Part, call: Node, function: Node, relation: Relation) -> str:
        column = self._of_one(part, call, items(function.children())[0], relation)
        of_sample, n = part.has(functions.variance(column)), part.has(functions.count(column))
        only = part.has(functions.sum(column))  # NaN or infinite, it varies by NaN
        return f"CASE WHEN {n} = 1 THEN {only} - {only} WHEN {n} > 1 THEN {of_sample} * ({n} - 1) / {n} END"

    def _stddevpop(self, part: Part, call: Node, function: Node, relation: Relation) -> str:
        return f"sqrt({self._variancepop(part, call, function, relation)})"

    def _maxby(self, part: Part, call: Node, function: Node, relation: Relation) -> str:
        return self._by(functions.last, part, call, function, relation)

    def _minby(self, part: Part, call: Node, function: Node, relation: Relation) -> str:
        return self._by(functions.first, part, call, function, relation)

    def _by(self, which: Callable[..., Aggregate], part: Part, call: Node, function: Node, relation: Relation) -> str:
        value, order = items(function.children())[:2]
        if kind_of(value.dataType()) in ("StructType", "ArrayType", "MapType"):
            raise refused(
                call, "of rows that are equal in order the smaller value is taken, and this has none: take its fields"
            )
        column = part.takes(self._argument(call, value, relation))
        return part.has(which(column, by=self._compared(part, call, order, relation, "order by a field")))

    def _pivotfirst(self, part: Part, call: Node, function: Node, relation: Relation) -> str:
        context = self._said(call, function.pivotColumn(), relation)
        value = self._said(call, function.valueColumn(), relation)
        literal = self._expressions.literal
        texts = []
        for one in items(function.pivotColumnValues()):
            column = part.takes(f"IF(({context}) <=> {literal(one, function.pivotColumn().dataType())}, {value}, NULL)")
            texts.append(part.has(functions.max(column)))
        return f"array({', '.join(texts)})"


def _aggregated(
    stages: Stages, relation: Relation, keys: Mapping[str, Expression], part: Part, *, distinct: bool = False
) -> Stage:
    before = stages.select(relation.stage, {**keys, **part.arguments})
    before = stages.distinct(before) if distinct else before
    return stages.select(stages.aggregate(before, list(keys), part.aggregates), _answers(keys, part))


def _with_empty_lists(stages: Stages, stage: Stage, columns: Sequence[str], whole: Part) -> Stage:
    """Returns the answers about all rows. Of no rows at all there is no group, and their lists are empty."""
    empty = {
        name: f"CAST(array() AS {call.dataType().sql()})"
        for call, name, _ in whole.answers
        if kind_of(_function_of(call)) != "Percentile"
    }
    texts = {name: f"coalesce({quoted(name)}, {empty[name]})" if name in empty else quoted(name) for name in columns}
    return stages.select(stage, texts) if empty else stage


def _beside(
    stages: Stages,
    stage: Stage,
    columns: Sequence[str],
    other: Stage,
    joined: Sequence[str],
    key_types: Mapping[str, Node],
) -> Stage:
    """Returns the answers of two stages about the same groups, the first of which has all of them."""
    on: dict[str, Expression] = {}
    for name, type_ in key_types.items():
        on |= null_safe(named("on", name), quoted(name), str(type_.sql()))
    on = on or {named("on", "one row"): "1"}
    left = stages.select(stage, {**on, **{name: quoted(name) for name in columns}})
    right = stages.select(other, {**on, **{name: quoted(name) for name in joined}})
    both = stages.join(left, right, list(on), "left")
    return stages.select(both, {name: quoted(name) for name in (*columns, *joined)})


def _without_negative_zero(key: Expression, group: Node) -> Expression:
    """Returns a key as Spark groups by it: 0.0 and -0.0 are one group, and its key is 0.0."""
    type_ = str(group.dataType().sql())
    if type_ not in ("FLOAT", "DOUBLE"):
        return key
    if isinstance(key, str):
        return f"({key} + CAST(0 AS {type_}))"
    return Coded(key.column + F.lit(0.0).cast(type_.lower()), f"{key.said} + 0")


def _id_or_none(group: Node) -> int | None:
    return id_of(group) if kind_of(group) == "AttributeReference" else None


def _answers(keys: Mapping[str, Expression], part: Part) -> dict[str, Expression]:
    texts: dict[str, Expression] = {name: quoted(name) for name in keys}
    return texts | {name: text for _, name, text in part.answers}


def _value_of(output: Node) -> Node:
    return output.child() if kind_of(output) == "Alias" else output


def calls_in(outputs: Sequence[Node]) -> list[Node]:
    """Returns the different calls of aggregates in expressions."""
    calls: list[Node] = []
    for output in outputs:
        for one in nodes_of(output):
            if kind_of(one) == "AggregateExpression" and not any(one.semanticEquals(other) for other in calls):
                calls.append(one)
    return calls


def _function_of(call: Node) -> Node:
    """Returns the aggregate of a call, or the one that Spark computes in its place."""
    function = call.aggregateFunction()
    while is_replaceable(function):
        function = function.replacement()
    return function


def _as_double(value: Expression) -> Expression:
    text = f"CAST({value} AS double)"
    return text if isinstance(value, str) else Coded(value.column.cast("double"), text)


def _share_of(call: Node, function: Node) -> float:
    """Returns how much of the values comes before a percentile, in its order."""
    _, percentage, frequency, *_ = items(function.children())
    if kind_of(percentage.dataType()) == "ArrayType" or not percentage.foldable():
        raise refused(call, "percentile of one constant share is translated: call it once for each")
    if str(frequency.toString()) != "1":
        raise refused(call, "percentile with frequencies is not translated")
    return float(str(percentage.eval(None)))


def _needs_distinct(call: Node) -> bool:
    if not call.isDistinct():
        return False
    function = _function_of(call)
    is_one_count = kind_of(function) == "Count" and len(items(function.children())) == 1
    return kind_of(function) not in _SAME_TWICE and not is_one_count


def _cast(text: str, call: Node) -> str:
    return f"CAST({text} AS {call.dataType().sql()})"
