"""Joins of a plan, with conditions beyond equal columns, and the joins that subqueries become."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from nosync.kernels import aggregates as functions
from nosync.spark.expressions import quoted
from nosync.spark.plans import intervals
from nosync.spark.plans.catalyst import Node, Refused, conjuncts, found, id_of, ids_in, items, kind_of, refused
from nosync.spark.plans.expressions import Expressions
from nosync.spark.plans.intervals import Interval
from nosync.spark.plans.relation import Expression, Relation, Stages, TimedJoin, digest, named
from nosync.spark.plans.whole_groups import VERSION, OnlyRow

_INNER, _LEFT, _RIGHT, _FULL, _SEMI, _ANTI = (
    "INNER",
    "LEFT OUTER",
    "RIGHT OUTER",
    "FULL OUTER",
    "LEFT SEMI",
    "LEFT ANTI",
)
_HOW = {_INNER: "inner", _LEFT: "left", _RIGHT: "right", _FULL: "full", _SEMI: "left_semi", _ANTI: "left_anti"}
_ZEROS = {
    "STRING": "''", "BINARY": "X''", "BOOLEAN": "false", "DATE": "DATE '1970-01-01'", "FLOAT": "CAST(0 AS FLOAT)", "DOUBLE": "0D",
    "TIMESTAMP": "TIMESTAMP '1970-01-01 00:00:00'", "TIMESTAMP_NTZ": "TIMESTAMP_NTZ '1970-01-01 00:00:00'",
    "TINYINT": "0Y", "SMALLINT": "0S", "INT": "0", "BIGINT": "0L",
}  # fmt: skip


@dataclass(frozen=True)
class _Equal:
    """Two expressions that are to be equal, one over each side."""

    left: Node
    right: Node
    null_safe: bool


@dataclass(frozen=True)
class _Condition:
    """The condition of a join, by what it is of."""

    equal: tuple[_Equal, ...]
    left: tuple[Node, ...]
    right: tuple[Node, ...]
    both: tuple[Node, ...]

    @classmethod
    def of(cls, conditions: Sequence[Node], left: Relation, right: Relation) -> _Condition:
        mine, other = {*left.columns}, {*right.columns}
        equal, parts = list[_Equal](), {"left": list[Node](), "right": list[Node](), "both": list[Node]()}
        for one in conditions:
            ids = ids_in(one)
            pair = _pair(one, mine, other) if kind_of(one) in ("EqualTo", "EqualNullSafe") else None
            if pair is not None:
                equal.append(_Equal(*pair, null_safe=kind_of(one) == "EqualNullSafe"))
            else:
                parts["left" if ids and ids <= mine else "right" if ids and ids <= other else "both"].append(one)
        return cls(tuple(equal), tuple(parts["left"]), tuple(parts["right"]), tuple(parts["both"]))

    @property
    def turned(self) -> _Condition:
        turned = tuple(_Equal(one.right, one.left, one.null_safe) for one in self.equal)
        return _Condition(turned, self.right, self.left, self.both)


def _pair(equality: Node, left: set[int], right: set[int]) -> tuple[Node, Node] | None:
    a, b = items(equality.children())
    of_a, of_b = ids_in(a), ids_in(b)
    if of_a and of_b and of_a <= left and of_b <= right:
        return a, b
    return (b, a) if of_a and of_b and of_a <= right and of_b <= left else None


class Joins:
    """Makes stages of joins; `note` keeps what whoever runs a view should know."""

    def __init__(self, stages: Stages, expressions: Expressions, note: Callable[[str], None]) -> None:
        self._stages, self._expressions, self._note = stages, expressions, note

    def of(self, plan: Node, left: Relation, right: Relation, watermarks: int) -> Relation:
        """Returns a join. `watermarks`: how many the query has."""
        parts = conjuncts(found(plan.condition()))
        bounded = intervals.interval_of(plan, parts, watermarks)
        if bounded is not None:
            return self._interval(plan, bounded[0], _Condition.of(bounded[1], left, right), left, right)
        condition = _Condition.of(parts, left, right)
        how = plan.joinType()
        if kind_of(how) == "ExistenceJoin":
            return self._existence(id_of(how.exists()), how.exists().dataType(), left, right, condition)
        name = "INNER" if str(how.sql()) == "CROSS" else str(how.sql())
        if name not in _HOW:
            raise refused(plan, f"a {name} join cannot be kept up to date")
        return self._joined(name, left, right, condition)

    def _interval(
        self, plan: Node, interval: Interval, condition: _Condition, left: Relation, right: Relation
    ) -> Relation:
        """Returns the join of two relations by what is equal, and by the difference of their event times."""
        how = str(plan.joinType().sql())
        if how not in (_INNER, _LEFT, _RIGHT, _FULL, _SEMI):
            raise Refused(f"a {how} join of two streams with watermarks is not translated")
        if not condition.equal:
            raise Refused(
                "a join of two streams with watermarks takes columns that are equal too: so rows have a shard"
            )
        if how in (_INNER, _SEMI, _RIGHT):
            left, condition = self._where(left, condition.left), replace(condition, left=())
        if how in (_INNER, _SEMI, _LEFT):
            right, condition = self._where(right, condition.right), replace(condition, right=())
        beyond = (*condition.left, *condition.right, *condition.both)
        if beyond and how != _INNER:
            raise refused(
                beyond[0],
                f"a {how} join by event time compares equal columns and times only: compute it after an inner join",
            )
        joined = self._equal(how, left, right, condition.equal, interval)
        late = f"{joined.stage.late_left.name} and {joined.stage.late_right.name}"
        self._note(f"rows that come later than their side's watermark are in the stages {late}")
        return self._where(joined, beyond)

    def with_value(
        self, relation: Relation, of_one: Relation, value: Node, *, is_checked: bool
    ) -> tuple[Relation, str]:
        """Returns a relation with the only value of another one in each row, null where that has no row. `is_checked`: that
        has one at most, whatever its rows are.
        """
        self._note("a scalar subquery is joined with all rows, on one shard")
        column = named("scalar", relation.stage.name, of_one.stage.name)
        one = named("one", relation.stage.name, of_one.stage.name)
        left = self._stages.select(relation.stage, {one: "1", **{name: quoted(name) for name in relation.types}})
        right = self._stages.select(of_one.stage, {one: "1", column: quoted(of_one.columns[id_of(value)])})
        if not is_checked:
            only, ddl = OnlyRow(one, column), {column: str(value.dataType().sql())}
            right = self._stages.per_key("only", right, [one], only, f"{VERSION} {only!r}", ddl)
        stage = self._stages.join(left, right, [one], "left")
        return Relation(stage, relation.columns, {**relation.types, column: value.dataType()}), column

    def _joined(self, how: str, left: Relation, right: Relation, condition: _Condition) -> Relation:
        if how == _RIGHT:  # so that what is said below of one side is said once
            return self._joined(_LEFT, right, left, condition.turned)
        if how in (_SEMI, _ANTI) and not condition.equal and self._is_not_in(how, condition):
            return self._not_in(left, right, condition)
        right = self._where(right, condition.right) if how != _FULL else right
        if how in (_INNER, _SEMI):
            left, condition = self._where(left, condition.left), replace(condition, left=())
        condition = replace(condition, right=() if how != _FULL else condition.right)
        beyond = (*condition.left, *condition.right, *condition.both)
        if how == _INNER:
            return self._where(self._equal(_INNER, left, right, condition.equal), beyond)
        if not beyond:
            return self._equal(how, left, right, condition.equal)
        if how in (_SEMI, _ANTI):
            return self._with_match(how, left, right, condition, beyond)
        return self._outer(how, left, right, condition, beyond)

    def _where(self, relation: Relation, conditions: Sequence[Node]) -> Relation:
        for one in conditions:
            relation = relation.with_stage(self._stages.where(relation.stage, self._expressions.of(one, relation)))
        return relation

    def _outer(
        self, how: str, left: Relation, right: Relation, condition: _Condition, beyond: Sequence[Node]
    ) -> Relation:
        """Returns pairs that fulfil all conditions, and rows that are in none of them, with nulls."""
        pairs = self._where(self._equal(_INNER, left, right, condition.equal), beyond)
        parts = [pairs, self._with_match(_ANTI, left, right, condition, beyond)]
        if how == _FULL:
            parts.append(self._with_match(_ANTI, right, left, condition.turned, beyond))
        by_id, of_type = dict[int, str](), dict[int, Node]()
        for side, relation in (("left", left), ("right", right)):
            by_id |= {i: named("o", side, name) for i, name in relation.columns.items()}
            of_type |= {i: relation.types[name] for i, name in relation.columns.items()}
        stages = []
        for relation in parts:
            texts: dict[str, Expression] = {
                name: quoted(relation.columns[i]) if i in relation.columns else f"CAST(NULL AS {of_type[i].sql()})"
                for i, name in by_id.items()
            }
            stages.append(self._stages.select(relation.stage, texts))
        types = {by_id[i]: type_ for i, type_ in of_type.items()}
        return Relation(self._stages.union(stages), by_id, types)

    def _with_match(
        self, how: str, left: Relation, right: Relation, condition: _Condition, beyond: Sequence[Node]
    ) -> Relation:
        """Returns the rows of the left side that have a match, or none, under conditions beyond equal columns.

        Whether they have goes by the columns that the conditions are of. So the pairs are asked which values of these
        have one, and the rows are joined with that.
        """
        asked = {i for one in beyond for i in ids_in(one)} | {i for one in condition.equal for i in ids_in(one.left)}
        columns = {i: left.columns[i] for i in left.columns if i in asked}
        pairs = self._where(self._equal(_INNER, left, right, condition.equal), beyond)
        on: dict[str, str] = {}
        of_pairs: dict[str, Expression] = {}
        for i, name in columns.items():
            key = named("m", name)
            type_ = str(left.types[name].sql())
            on |= null_safe(key, quoted(name), type_)
            of_pairs |= null_safe(key, quoted(pairs.columns[i]), type_)
        on = on or {named("m", "any"): "1"}
        matched = self._stages.distinct(self._stages.select(pairs.stage, of_pairs or {**on}))
        kept = {name: quoted(name) for name in left.types}
        stage = self._stages.join(self._stages.select(left.stage, {**on, **kept}), matched, list(on), _HOW[how])
        return Relation(stage, left.columns, left.types)

    def _existence(self, exists: int, type_: Node, left: Relation, right: Relation, condition: _Condition) -> Relation:
        """Returns the rows of the left side, each with whether it has a match."""
        name = named("exists", left.stage.name, right.stage.name, *(str(one.sql()) for one in condition.both))
        parts = []
        for how, text in ((_SEMI, "true"), (_ANTI, "false")):
            relation = self._joined(how, left, right, condition)
            kept = {column: quoted(column) for column in left.columns.values()}
            parts.append(self._stages.select(relation.stage, {**kept, name: text}))
        types = {column: left.types[column] for column in left.columns.values()}
        return Relation(self._stages.union(parts), {**left.columns, exists: name}, {**types, name: type_})

    def _is_not_in(self, how: str, condition: _Condition) -> bool:
        """Returns whether a join is `a NOT IN (...)`: rows stay where a = b is neither true nor null for any b."""
        if how != _ANTI or len(condition.both) != 1 or kind_of(condition.both[0]) != "Or":
            return False
        a, b = items(condition.both[0].children())
        return kind_of(a) == "EqualTo" and kind_of(b) == "IsNull" and bool(items(b.children())[0].semanticEquals(a))

    def _not_in(self, left: Relation, right: Relation, condition: _Condition) -> Relation:
        left_only = condition.left  # rows for which these are false have no match
        if left_only:
            raise refused(left_only[0], "NOT IN with a condition beside: filter before it")
        right = self._where(right, condition.right)
        equality = items(condition.both[0].children())[0]
        pair = _pair(equality, {*left.columns}, {*right.columns})
        if pair is None:
            raise refused(equality, "NOT IN of values that are not of both sides")
        self._note("NOT IN: how many nulls there are is joined with all rows, on one shard")
        wanted, values = (self._expressions.of(e, side) for e, side in zip(pair, (left, right), strict=True))
        value = named("v", str(values))
        of_right = self._stages.select(right.stage, {value: values})
        n, there = named("n", value), named("n_there", value)
        counts = self._stages.aggregate(of_right, [], {n: functions.count(), there: functions.count(value)})
        one, asked = named("one", str(wanted)), named("asked", str(wanted))
        kept: dict[str, Expression] = {name: quoted(name) for name in left.types}
        rows = self._stages.select(left.stage, {**kept, asked: wanted, one: "1"})
        rows = self._stages.join(
            rows, self._stages.select(counts, {one: "1", n: quoted(n), there: quoted(there)}), [one], "left"
        )
        possible = f"{quoted(n)} = 0 OR ({quoted(asked)} IS NOT NULL AND {quoted(n)} = {quoted(there)})"
        rows = self._stages.select(self._stages.where(rows, possible), {**kept, asked: quoted(asked)})
        values_once = self._stages.select(of_right, {asked: quoted(value)})
        stage = self._stages.join(rows, values_once, [asked], "left_anti")
        return Relation(stage, left.columns, left.types)

    def _equal(
        self, how: str, left: Relation, right: Relation, equal: Sequence[_Equal], interval: Interval | None = None
    ) -> Relation:
        """Returns the join of two relations by what is to be equal, and by an interval; by a constant where nothing is."""
        keys: tuple[dict[str, Expression], dict[str, Expression]] = ({}, {})
        for one in equal:
            texts = [self._expressions.of(e, side) for e, side in ((one.left, left), (one.right, right))]
            key = named("on", *map(str, texts))
            for made, text in zip(keys, texts, strict=True):
                if not one.null_safe:
                    made[key] = text
                elif isinstance(text, str):
                    made.update(null_safe(key, text, str(one.left.dataType().sql())))
                else:
                    raise refused(
                        one.left, "a null-safe join by what SQL text cannot say: compute it in a column first"
                    )
        if not equal:
            self._note("a join without equal columns: all pairs are made, on one shard")
            key = named("on", "nothing")
            keys = ({key: "1"}, {key: "1"})
        kept = {name: quoted(name) for name in dict.fromkeys(left.columns.values())}
        one_sided = how in (_SEMI, _ANTI)
        # A join by event time reads the time of both sides, also where only one is given.
        renamed = {} if one_sided and interval is None else self._renamed(right, {*kept, *keys[0]})
        of_left = self._stages.select(left.stage, {**keys[0], **kept})
        of_right = self._stages.select(right.stage, {**keys[1], **{new: quoted(old) for old, new in renamed.items()}})
        if interval is None:
            stage = self._stages.join(of_left, of_right, list(keys[0]), _HOW[how])
        else:
            time = left.columns[id_of(interval.times[0])], renamed[right.columns[id_of(interval.times[1])]]
            delays = (interval.watermarks[0].delay, interval.watermarks[1].delay)
            timed = TimedJoin(time, interval.within, delays)
            stage = self._stages.interval_join(of_left, of_right, list(keys[0]), _HOW[how], timed)
        columns, types = dict(left.columns), {name: left.types[name] for name in kept}
        if not one_sided:
            columns |= {i: renamed[name] for i, name in right.columns.items()}
            types |= {new: right.types[old] for old, new in renamed.items()}
        return Relation(stage, columns, types)

    @staticmethod
    def _renamed(right: Relation, taken: set[str]) -> dict[str, str]:
        """Returns names for the columns of the right side that the left one does not have."""
        lower = {name.lower() for name in taken}
        found = {}
        for name in dict.fromkeys(right.columns.values()):
            new = name
            while new.lower() in lower:
                new = f"{name}_{digest(new, right.stage.name)[:4]}"
            lower.add(new.lower())
            found[name] = new
        return found


def null_safe(name: str, text: str, type_: str) -> dict[str, str]:
    """Returns columns that are never null and equal where values, or nulls, are."""
    zero = f"CAST(0 AS {type_})" if type_.startswith("DECIMAL") else _ZEROS.get(type_)
    if zero is None:
        return {name: f"named_struct('value', {text})"}
    return {f"{name}_null": f"({text}) IS NULL", name: f"coalesce({text}, {zero})"}
