"""A query as Spark understands it: its analyzed plan over inputs that have no rows, rewritten by some of Spark's rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from py4j.java_gateway import is_instance_of
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.classic.dataframe import DataFrame as ClassicDataFrame

from nosync.flow.dataflow import Dataflow
from nosync.flow.stage import Stage
from nosync.flow.views import Query
from nosync.lsm.errors import FlowError, NosyncError, UnknownStageError
from nosync.lsm.platform.nearest import did_you_mean
from nosync.spark.errors import without_log
from nosync.spark.expressions import quoted
from nosync.spark.jvm_names import remember_names
from nosync.spark.plans.catalyst import Node, id_of, items, kind_of, refused, sequence_of
from nosync.spark.plans.clock import check_no_clock
from nosync.spark.plans.event_time import WATERMARK_NODE, has_watermark
from nosync.spark.plans.rules import Rules
from nosync.spark.session import contains, turn_of

_NO_ROWS = (
    "a view says what is computed, before there are rows: its function cannot collect, count or write any, nor pivot without "
    "values"
)
_WITH = re.compile(r"^[ :+|-]*WithCTE$", re.MULTILINE)
"""A line of a plan, as text, that names queries."""
_LOGICAL, _STATEMENTS = "org.apache.spark.sql.catalyst.plans.logical", ("Command", "ParsedStatement")
"""Where Spark has what is no query."""
_RUN_AT_ONCE = ("Call", "CompoundBody", "InsertIntoDir", "UnresolvedExecuteImmediate", "ExecuteImmediateQuery")
"""Procedures, scripts, rows written into a directory, and texts that are run."""
_RAISED = "USER_RAISED_EXCEPTION"
_RULES = (
    "ReplaceIntersectWithSemiJoin", "ReplaceExceptWithAntiJoin", "ReplaceDistinctWithAggregate", "RewriteExceptAll",
    "RewriteIntersectAll", "BooleanSimplification", "EliminateOuterJoin", "PushDownPredicates", "ReorderJoin",
    "PushDownPredicates",
)  # fmt: skip
"""Rules of Spark's optimizer that say the same with fewer kinds of nodes, in order. Those of subqueries come before."""
_OF_COLUMNS = ("ColumnPruning", "CollapseProject", "PushDownPredicates", "ColumnPruning")
"""Rules that come after them, and leave columns out."""
_OF_WATERMARKS = (
    "InferFiltersFromGenerate", "InferFiltersFromConstraints", "PushDownPredicates", "ColumnPruning", "CollapseProject",
)  # fmt: skip
"""Rules that move more filters below a watermark."""


@dataclass(frozen=True)
class Analyzed:
    """The plan of a query, and its columns as users see them."""

    plan: Node
    columns: tuple[tuple[int, str, Node], ...]
    """Of each column its attribute, its name and its type."""
    ctes: Mapping[int, Node]
    """Queries of WITH, by their ids."""


def is_guard(plan: Node) -> bool:
    """Returns whether a node of the plan of an input is there only to keep queries from being run."""
    return kind_of(plan) == "Filter" and _NO_ROWS in str(plan.condition().toString())


def command_in(session: SparkSession, plan: Node) -> str | None:
    """Returns what of a parsed statement is no query, and would be run at once; None where all of it is one."""
    gateway, kind = session.sparkContext._gateway, kind_of(plan)
    if kind in _RUN_AT_ONCE or any(is_instance_of(gateway, plan, f"{_LOGICAL}.{name}") for name in _STATEMENTS):
        return kind
    return next(filter(None, (command_in(session, child) for child in items(plan.children()))), None)


class Planner:
    """Reads queries in a session of its own, which has the functions and settings of the user's, and views of the inputs."""

    def __init__(self, spark: SparkSession) -> None:
        # A clone, so that the user's temporary views keep their meaning, and none of ours is left behind.
        remember_names(spark)
        self.spark = spark
        with turn_of(spark):  # with the user's settings, not those of an epoch that runs
            self.session = SparkSession(spark.sparkContext, spark._jsparkSession.cloneSession())
        self._types: dict[str, Mapping[str, str]] = {}
        self._rules = Rules(self.session)

    def register(self, name: str, columns: Mapping[str, str], *, is_stream: bool = False) -> None:
        """Lets queries name an input. `columns` has Spark's types. `is_stream`: as one that queries read as a stream."""
        self._types[name] = columns
        rows = (
            self.session.readStream.format("rate").load()
            if is_stream
            else self.session.range(1).where(
                f"raise_error('{_NO_ROWS}') IS NULL"
            )  # so that nobody counts on there being none
        )
        columns_of_null = (f"CAST(NULL AS {type_}) AS {quoted(column)}" for column, type_ in columns.items())
        rows.selectExpr(*columns_of_null).createOrReplaceTempView(quoted(name))

    @contextmanager
    def as_streams(self, names: Iterable[str]) -> Iterator[None]:
        """Lets queries read inputs as streams meanwhile."""
        known = {name: self._types[name] for name in names if name in self._types}
        for name, types in known.items():
            self.register(name, types, is_stream=True)
        try:
            yield
        finally:
            for name, types in known.items():
                self.register(name, types)

    def outside(self, flow: Dataflow, leaf: Node) -> tuple[Stage, Sequence[str]] | None:
        """Returns the stage that has the rows of a leaf which is no input of the flow, with the column of each of the leaf's.
        None: there is none, and the query is refused.
        """
        return None

    def analyze(self, view: str, query: Query, inputs: Mapping[str, object]) -> Analyzed:
        """Returns what a query means. Raises FlowError naming the view for one that Spark does not understand."""
        try:
            with without_log():
                frame = self._asked(view, query, inputs)
                plan = frame._jdf.queryExecution().analyzed()
        except PySparkException as error:
            was_run = error.getCondition() == _RAISED and _NO_ROWS in str(error)
            why = _NO_ROWS if was_run else _first_lines(error)
            raise FlowError(f"view {view}: {why}") from None
        except UnknownStageError as error:
            raise UnknownStageError(f"view {view}: {error}") from None
        check_no_clock(self.session, view, query, plan)
        columns = tuple((id_of(one), str(one.name()), one.dataType()) for one in items(plan.output()))
        ctes = {}
        if len(_WITH.findall(str(plan.toString()))) > (kind_of(plan) == "WithCTE"):
            plan = self._inlined(plan)
        if kind_of(plan) == "WithCTE":
            ctes = {int(definition.id()): definition for definition in items(plan.cteDefs())}
            plan = plan.plan()
        while kind_of(plan) == "Sort":
            plan = plan.child()  # a view has no order
        return Analyzed(self.rewritten(plan), columns, ctes)

    def rewritten(self, plan: Node) -> Node:
        """Returns a plan with the same rows, of fewer kinds of nodes."""
        plan = self._module(self._catalyst.analysis, "EliminateSubqueryAliases").apply(plan)
        plan = self._module(self._catalyst.expressions, "EliminatePipeOperators").apply(plan)
        self._check_laterals(plan)
        # Spark would make them an aggregate of what they say of each row.
        if self._rules.has_subqueries_in_groups(plan):
            plan = self._rules.apply(plan, "PullOutGroupingExpressions")
        plan = self._without_views_of_views(self._rules.without_subqueries(plan))[0]
        # A watermark goes by the rows that the filters below it leave, so these are to be where Spark has them.
        plan = self._rules.with_semi_joins_first(self._rules.apply(plan, *_RULES))
        return self._rules.apply(plan, *_OF_COLUMNS, *(_OF_WATERMARKS if has_watermark(plan) else ()))

    def _check_laterals(self, plan: Node) -> None:
        """Raises Refused where Spark leaves out rows that a LEFT JOIN LATERAL keeps: those whose list is empty."""
        is_left = kind_of(plan) == "LateralJoin" and kind_of(plan.joinType()) == "LeftOuter"
        if is_left and contains(self.session, plan.right().plan(), "GENERATE"):
            raise refused(
                plan,
                "Spark makes LEFT JOIN LATERAL of a list an inner join, by an error of its own: write LATERAL VIEW OUTER "
                "explode(...), which keeps the rows of empty lists, or JOIN LATERAL, which does not",
            )
        for child in items(plan.children()):
            self._check_laterals(child)

    def _inlined(self, plan: Node) -> Node:
        """Returns a plan with what queries inside of it name by WITH in the places of the names."""
        (made,) = self.session._jvm.java.lang.Class.forName(  # type: ignore[union-attr]
            "org.apache.spark.sql.catalyst.optimizer.InlineCTE"
        ).getConstructors()
        always = [True] + [False] * (made.getParameterCount() - 1)  # Spark 4.3 has one choice more than 4.1
        return self._catalyst.optimizer.InlineCTE(*always).apply(plan)

    def _without_views_of_views(self, plan: Node) -> tuple[Node, bool]:
        """Returns a plan in which only inputs are views, and whether it has one. A query may name what it makes of an input
        as a view, and Spark's rules move nothing into a view.
        """
        children = items(plan.children())
        below = [self._without_views_of_views(child) for child in children]
        has_view = any(has for _, has in below)
        if kind_of(plan) == "View":
            return below[0] if has_view else (plan, True)
        new = [child for child, _ in below]
        if all(a is b for a, b in zip(children, new, strict=True)):
            return plan, has_view
        return plan.withNewChildren(sequence_of(self.session, new)), has_view

    @contextmanager
    def views_kept(self, names: Iterable[str]) -> Iterator[None]:
        """Gives inputs back their names, should a query have named something else so meanwhile, as a temporary view."""
        catalog = self.session._jsparkSession.sessionState().catalog()
        before = {name: catalog.getRawTempView(name) for name in names}
        try:
            yield
        finally:
            for name, view in before.items():
                if view.isDefined() and not catalog.getRawTempView(name).equals(view):
                    catalog.createTempView(name, view.get(), True)

    def _asked(self, view: str, query: Query, inputs: Mapping[str, object]) -> DataFrame:
        """Returns a query as a DataFrame. Where it has a watermark, its inputs are streams, for Spark's analyzer drops that
        of others.
        """
        if isinstance(query, str):
            parsed = self.session._jsparkSession.sessionState().sqlParser().parsePlan(query)
            command = command_in(self.session, parsed)  # which Spark would run when it is asked what it means
            if command is not None:
                raise FlowError(
                    f"view {view}: {command} changes or shows something, and a view is a query: give SELECT ..."
                )
            with self.as_streams(inputs if WATERMARK_NODE in str(parsed.toString()) else ()):
                return self.session.sql(query)
        with_watermark, asked = ClassicDataFrame.withWatermark, []

        def noted(*given: Any) -> DataFrame:
            asked.append(given)
            return with_watermark(*given)

        with patch.object(ClassicDataFrame, "withWatermark", noted):
            frame = self._called(view, query, inputs)
        if not asked or frame.isStreaming:
            return frame
        with self.as_streams(inputs):
            return self._called(view, query, inputs)

    def _called(self, view: str, query: Callable[..., Any], inputs: Mapping[str, object]) -> DataFrame:
        frames = _Frames({name: self.session.table(quoted(name)) for name in inputs})
        try:
            with self.views_kept(inputs):
                frame = query(frames)
        except (NosyncError, PySparkException):
            raise
        except Exception as error:
            raise FlowError(f"view {view}: its function raised {type(error).__name__}: {error}") from error
        if not isinstance(frame, DataFrame):
            raise FlowError(
                f"view {view}: its function returned {type(frame).__name__}, expected a DataFrame made of those that it is given"
            )
        return frame

    @property
    def _catalyst(self) -> Any:
        return self.session._jvm.org.apache.spark.sql.catalyst  # type: ignore[union-attr]

    @staticmethod
    def _module(package: Any, name: str) -> Any:
        return getattr(getattr(package, f"{name}$"), "MODULE$")


class _Frames(dict[str, DataFrame]):
    """The DataFrames of the inputs, which say what there is where one is asked for that is not."""

    def __missing__(self, name: str) -> DataFrame:
        raise UnknownStageError(f"no input {name!r}; inputs: {', '.join(self)}{did_you_mean(str(name), self)}")


def _first_lines(error: PySparkException) -> str:
    """Returns what Spark says of a query, without the plan that it prints below."""
    text = str(error).strip()
    return re.split(r"\n(?=['~]|JVM stacktrace)", text, maxsplit=1)[0].rstrip(" ;\n")
