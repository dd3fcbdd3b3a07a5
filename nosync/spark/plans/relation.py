"""Stages that a view is made of. A stage is named after what it computes, so that equal parts of views are one stage."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from blake3 import blake3
from pyspark.sql import Column

from nosync.flow.dataflow import Dataflow
from nosync.flow.kinds import AGGREGATE
from nosync.flow.stage import Stage
from nosync.kernels.aggregates import Aggregate
from nosync.kernels.windows import END, START
from nosync.spark.expressions import quoted
from nosync.spark.plans.catalyst import Node
from nosync.spark.plans.event_time import EventWindow, Watermark

VERSION = "1"
"""Names of stages go by it. Another one is for another way to translate, so that layers of both are told apart."""


@dataclass(frozen=True)
class Coded:
    """An expression that SQL text cannot say: a Column, and a text that tells it from others, functions of users included."""

    column: Column
    said: str

    def alias(self, name: str) -> Column:
        return self.column.alias(name)

    def __str__(self) -> str:
        return self.said


Expression = str | Coded


@dataclass(frozen=True)
class Relation:
    """Rows of a plan: the stage that has them, and the column of each attribute, by its id."""

    stage: Stage
    columns: Mapping[int, str]
    types: Mapping[str, Node]
    """The type of each column, as Spark's DataType in the JVM."""

    def with_stage(self, stage: Stage) -> Relation:
        return Relation(stage, self.columns, self.types)


class TimedJoin(NamedTuple):
    """What an interval join takes beside its keys; of each a pair, for the left side and the right one."""

    time: tuple[str, str]
    within: tuple[str, str]
    watermark: tuple[str, str]


@dataclass
class Stages:
    """Makes stages of a dataflow, or finds those that are there."""

    flow: Dataflow
    made: dict[str, None] = field(default_factory=dict)
    """The names of those that the view is made of, in order."""
    columns: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The columns of these."""
    new: dict[str, Callable[[str], Stage]] = field(default_factory=dict)
    """Those that were not there, each with what declares it."""

    def select(self, given: Stage, columns: Mapping[str, Expression]) -> Stage:
        """Computes columns by name. What only passes its input on is its input. Where nothing is asked of rows but how many
        there are, they have a column all the same.
        """
        columns = columns or {named("one", ""): "1"}
        bare = all(isinstance(text, str) and text == quoted(name) for name, text in columns.items())
        if bare and self.columns.get(given.name) == tuple(columns):
            return given
        expressions = [
            (text if text == quoted(name) else f"{text} AS {quoted(name)}")
            if isinstance(text, str)
            else text.alias(name)
            for name, text in columns.items()
        ]
        return self._stage(
            "select",
            [given],
            [f"{name}={text}" for name, text in columns.items()],
            tuple(columns),
            lambda name: given.select(name, *expressions),
        )

    def where(self, given: Stage, condition: Expression) -> Stage:
        return self._stage(
            "where", [given], [str(condition)], self._of(given), lambda name: given.where(name, _column(condition))
        )

    def aggregate(self, given: Stage, key: Sequence[str], aggregates: dict[str, Aggregate]) -> Stage:
        parts = [*key, *(f"{name}={aggregate!r}" for name, aggregate in aggregates.items())]
        return self._stage(
            "aggregate", [given], parts, (*key, *aggregates),
            lambda name: given.aggregate(name, key=list(key), persist=None, **aggregates),
        )  # fmt: skip

    def window(
        self, given: Stage, time: str, window: EventWindow, key: Sequence[str], aggregates: dict[str, Aggregate], emit: str
    ) -> Stage:  # fmt: skip
        size, gap = (None, window.size) if window.slide is None else (window.size, None)
        watermark, policy = window.watermark.delay, window.watermark.policy
        parts = [*key, time, f"size={size}", f"slide={window.slide}", f"gap={gap}", watermark, policy, emit]
        return self._stage(
            "window", [given], [*parts, *(f"{name}={aggregate!r}" for name, aggregate in aggregates.items())],
            (*key, START, END, *aggregates),
            lambda name: given.window(
                name, time=time, size=size, slide=window.slide, gap=gap, key=list(key), watermark=watermark, keep=None,
                policy=policy, idle_after=None, expiry=None, emit=emit, persist=None, **aggregates,
            ),
        )  # fmt: skip

    def dedupe_within(
        self, given: Stage, key: Sequence[str], time: str, watermark: Watermark, within: str
    ) -> Stage:  # fmt: skip
        return self._stage(
            "dedupe", [given], [*key, time, watermark.delay, watermark.policy, within], self._of(given),
            lambda name: given.dedupe(
                name, key=list(key), time=time, watermark=watermark.delay, within=within,
                policy=watermark.policy,
            ),
        )  # fmt: skip

    def distinct(self, given: Stage) -> Stage:
        return self._stage("distinct", [given], [], self._of(given), given.dedupe)

    def dedupe(self, given: Stage, key: Sequence[str]) -> Stage:
        return self._stage("dedupe", [given], key, self._of(given), lambda name: given.dedupe(name, key=list(key)))

    def join(self, left: Stage, right: Stage, on: Sequence[str], how: str) -> Stage:
        return self._stage(
            "join", [left, right], [how, *on], self._joined(left, right, on, how),
            lambda name: left.join(name, right, on=list(on), how=how),
        )  # fmt: skip

    def interval_join(self, left: Stage, right: Stage, on: Sequence[str], how: str, of: TimedJoin) -> Stage:
        return self._stage(
            "join", [left, right], [how, *on, *of.time, *of.within, *of.watermark], self._joined(left, right, on, how),
            lambda name: left.join(
                name, right, on=list(on), how=how, time=of.time, within=of.within, watermark=of.watermark
            ),
        )  # fmt: skip

    def _joined(self, left: Stage, right: Stage, on: Sequence[str], how: str) -> tuple[str, ...]:
        """Returns the columns of a join."""
        sides = (left,) if how in ("left_semi", "left_anti") else (left, right)
        return (*on, *(name for side in sides for name in self._of(side) if name not in on))

    def union(self, parts: Sequence[Stage]) -> Stage:
        if len(parts) == 1:
            return parts[0]
        return self._stage("union", parts, [], self._of(parts[0]), lambda name: parts[0].union(name, *parts[1:]))

    def per_key(
        self,
        note: str,
        given: Stage,
        key: Sequence[str],
        fn: Callable[..., Any],
        version: str,
        schema: Mapping[str, str],
    ) -> Stage:
        """Adds a `per_key`, whose function is told from others by `version`. `schema` has the types of what it makes."""
        ddl = ", ".join(f"{quoted(name)} {type_}" for name, type_ in schema.items())
        return self._stage(
            note, [given], [*key, version, ddl], (*key, *schema),
            lambda name: given.per_key(name, key=list(key), fn=fn, schema=ddl, version=version),
        )  # fmt: skip

    def flat_map(
        self, note: str, given: Stage, fn: Callable[..., Any], version: str, schema: Mapping[str, str]
    ) -> Stage:
        ddl = ", ".join(f"{quoted(name)} {type_}" for name, type_ in schema.items())
        return self._stage(
            note, [given], [version, ddl], tuple(schema),
            lambda name: given.flat_map(name, fn, schema=ddl, version=version, persist="none"),
        )  # fmt: skip

    def under(self, name: str, stage: Stage, columns: Sequence[str]) -> Stage | None:
        """Returns an aggregate that nothing else is made of, under a name of users'. None: there has to be a stage more."""
        is_ours = stage.name in self.new and stage.kind == AGGREGATE and self.columns[stage.name] == tuple(columns)
        if not is_ours or self.flow.consumers(stage.name):
            return None
        self.flow.undeclare(stage.name)
        del self.made[stage.name]
        return self.new[stage.name](name)

    def know(self, stage: Stage, columns: Sequence[str]) -> None:
        """Notes the columns of a stage that others declared."""
        self.columns[stage.name] = tuple(columns)

    def _of(self, stage: Stage) -> tuple[str, ...]:
        return self.columns[stage.name]

    def _stage(
        self, kind: str, inputs: Sequence[Stage], parts: Sequence[str], columns: tuple[str, ...],
        make: Callable[[str], Stage],
    ) -> Stage:  # fmt: skip
        name = f"{kind}-{digest(VERSION, kind, *(one.name for one in inputs), *parts)}"
        known = {stage.name: stage for stage in self.flow.stages}
        stage = known.get(name)
        if stage is None:
            stage, self.new[name] = make(name), make
        self.made[name] = None
        self.columns[name] = columns
        return stage


def digest(*parts: str) -> str:
    """Returns a short name for texts."""
    return str(blake3("\0".join(parts).encode()).hexdigest(length=5))


def named(shown: str, *parts: str) -> str:
    """Returns the name of a column that is computed: as users call it, and after what it is made of."""
    word = re.sub(r"\W+", "_", shown.lower()).strip("_")[:24]
    return f"{word or 'c'}_{digest(*parts)}"


def _column(expression: Expression) -> str | Column:
    return expression if isinstance(expression, str) else expression.column
