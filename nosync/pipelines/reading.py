"""A session in which the files of a project are read: names of its datasets are what they stand for.

Functions of a project read datasets as tables of Spark: `spark.table("orders")`, `spark.readStream.table("orders")`,
`spark.sql("SELECT ... FROM STREAM orders")`. While one runs, these calls look for a dataset first. Spark's own command
replaces calls of the session in the same way, to keep definitions from changing it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from pyspark.errors import ParseException
from pyspark.sql import DataFrame, DataFrameReader, SparkSession
from pyspark.sql.classic.dataframe import DataFrame as ClassicDataFrame
from pyspark.sql.conf import RuntimeConfig
from pyspark.sql.streaming.readwriter import DataStreamReader

from nosync.flow.dataflow import Dataflow
from nosync.flow.stage import Stage
from nosync.lsm.errors import FlowError
from nosync.pipelines.inputs import Inputs
from nosync.spark.plans.catalyst import SUBQUERIES, Node, items, kind_of, nodes_of
from nosync.spark.plans.query import Planner
from nosync.spark.session import active_in_jvm


class NotYet(Exception):
    """A query reads a dataset that is not declared yet."""

    def __init__(self, dataset: str) -> None:
        super().__init__(dataset)
        self.dataset = dataset


class ProjectPlanner(Planner):
    """Reads the queries of a project."""

    def __init__(self, spark: SparkSession, inputs: Inputs, qualifiers: Collection[tuple[str, ...]] = ()) -> None:
        """`inputs`: what it reads that is no dataset. `qualifiers`: what may stand before the name of a dataset."""
        super().__init__(spark)
        self._inputs, self._qualifiers = inputs, qualifiers
        self.to_come: Collection[str] = ()
        """The datasets that are not declared yet."""

    def outside(self, flow: Dataflow, leaf: Node) -> tuple[Stage, Sequence[str]] | None:
        return self._inputs.outside(flow, leaf)

    def frame_of(self, plan: Node) -> DataFrame:
        """Returns a plan as a DataFrame, after Spark's analyzer if it was not there yet. Raises AnalysisException."""
        jvm: Any = self.session._jvm
        rows = jvm.org.apache.spark.sql.classic.Dataset.ofRows(self.session._jsparkSession, plan)
        return ClassicDataFrame(rows, self.session)

    def parsed(self, text: str) -> Node:
        """Returns a statement as a plan. Raises ParseException."""
        return self.session._jsparkSession.sessionState().sqlParser().parsePlan(text)

    def asked(self, plan: Node) -> DataFrame:
        """Returns the DataFrame of a parsed query. Raises NotYet, AnalysisException."""
        with self._names_in(plan):
            return self.frame_of(plan)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Lets the session be the active one, whose names of datasets are understood."""
        table, read_stream, sql = DataFrameReader.table, DataStreamReader.table, SparkSession.sql
        of_session = SparkSession.table

        def checked(ask: Callable[..., DataFrame], *, is_stream: bool) -> Callable[..., DataFrame]:
            def asking(owner: Any, tableName: str) -> DataFrame:
                with self.as_streams([_plain(tableName)] if is_stream else []):
                    self._check_declared(tableName)
                    return ask(owner, tableName)

            return asking

        def sql_with_names(session: SparkSession, sqlQuery: str, *args: Any, **kwargs: Any) -> DataFrame:
            try:
                plan = self.parsed(sqlQuery)
            except ParseException:
                return sql(session, sqlQuery, *args, **kwargs)  # which raises it, or replaces what is in the text
            with self._names_in(plan):
                return sql(session, sqlQuery, *args, **kwargs)

        with ExitStack() as stack:
            stack.enter_context(patch.object(DataFrameReader, "table", checked(table, is_stream=False)))
            stack.enter_context(patch.object(SparkSession, "table", checked(of_session, is_stream=False)))
            stack.enter_context(patch.object(DataStreamReader, "table", checked(read_stream, is_stream=True)))
            stack.enter_context(patch.object(SparkSession, "sql", sql_with_names))
            stack.enter_context(patch.object(RuntimeConfig, "set", _refused_setting))
            stack.enter_context(
                patch.object(SparkSession, "_activeSession", self.session)
            )  # what getActiveSession() returns
            stack.enter_context(active_in_jvm(self.session))
            yield

    @contextmanager
    def _names_in(self, plan: Node) -> Iterator[None]:
        """Lets the datasets in a parsed query be those that it reads, as streams where it says so."""
        names = list(_relations(plan))
        for name, _ in names:
            self._check_declared(name)
        both = {_plain(name) for name, is_stream in names if is_stream} & {
            _plain(name) for name, is_stream in names if not is_stream
        }
        if both & self._types.keys():
            raise FlowError(f"{min(both)} is read as a stream and as a table in one query: read it in one way")
        with self.as_streams([_plain(name) for name, is_stream in names if is_stream]):
            yield

    def _check_declared(self, name: str) -> None:
        *before, last = (_plain(part) for part in name.split("."))
        is_dataset = last in self.to_come or last in self._types
        if before and is_dataset and tuple(before) in self._qualifiers:
            raise FlowError(f"{name}: datasets of a project have names of one part here: read {last}")
        if not before and last in self.to_come:
            raise NotYet(last)


def _refused_setting(_: object, key: str, *__: object) -> None:
    raise FlowError(
        f"spark.conf.set({key!r}, ...): all datasets are computed with the same settings: put it into the configuration of the "
        "project's spec"
    )


def _plain(name: str) -> str:
    return name.strip("`").lower()


def _relations(plan: Node, ctes: frozenset[str] = frozenset()) -> Iterator[tuple[str, bool]]:
    """Yields the names that a parsed query reads, but for those of its WITH, and whether as a stream."""
    kind = kind_of(plan)
    if kind == "UnresolvedRelation":
        parts = items(plan.multipartIdentifier())
        if len(parts) > 1 or _plain(str(parts[0])) not in ctes:
            yield ".".join(str(part) for part in parts), bool(plan.isStreaming())
    if kind == "UnresolvedWith":
        for one in items(plan.cteRelations()):  # each sees those before it
            yield from _relations(one._2(), ctes)
            ctes |= {_plain(str(one._1()))}
        yield from _relations(plan.child(), ctes)
        return
    for child in [*items(plan.children()), *items(plan.innerChildren())]:
        yield from _relations(child, ctes)
    for expression in items(plan.expressions()):
        for one in nodes_of(expression):
            if kind_of(one) in SUBQUERIES:
                yield from _relations(one.plan(), ctes)
