"""A project as a dataflow: each dataset is a view, or a name for a query, declared after what it reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import cast

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from nosync.flow.dataflow import Dataflow
from nosync.flow.kinds import CHANGES, FINAL
from nosync.flow.views import View
from nosync.job.sinks import Sink
from nosync.lsm.errors import FlowError, InvalidInputError, NosyncError
from nosync.lsm.platform.nearest import did_you_mean
from nosync.pipelines.datasets import MATERIALIZED_VIEW, OF_STREAMS, TEMPORARY_VIEW, Dataset, Query
from nosync.pipelines.definitions import Definitions
from nosync.pipelines.inputs import Input, Inputs, outside_leaves, types_of
from nosync.pipelines.reading import NotYet, ProjectPlanner
from nosync.pipelines.recorded_inputs import Recorded
from nosync.pipelines.spec import Spec
from nosync.spark.errors import first_line, without_log
from nosync.spark.expressions import quoted


@dataclass(frozen=True)
class Pipeline:
    """A project, ready to run."""

    spec: Spec
    flow: Dataflow
    datasets: Mapping[str, Dataset]
    """By name, each after those that it reads."""
    inputs: Sequence[Input]
    planner: ProjectPlanner

    @property
    def sinks(self) -> dict[str, Sink]:
        """Returns the sinks of datasets that have one, by their names."""
        return {name: one.sink for name, one in self.datasets.items() if one.sink is not None}

    def reads(self, dataset: str) -> list[str]:
        """Returns what a dataset reads, as the flow has it."""
        view = self.flow.views.get(dataset)
        found = view.inputs if view is not None else ()
        names = {one.read_as: one.name for one in self.inputs}
        return [names.get(name, name) for name in found]


def declare_project(spec: Spec, spark: SparkSession, recorded: Mapping[str, Recorded]) -> Pipeline:
    """Reads the files of a project and declares a flow of what they define.

    `recorded`: what its store has, for the names of its inputs; empty where there is no store yet.

    Raises InvalidInputError or FlowError, naming file and line, for what is not defined, not understood, or cannot be kept
    up to date.
    """
    inputs = Inputs(recorded)
    planner = ProjectPlanner(spark, inputs, spec.qualifiers)
    try:
        with without_log():
            if spec.catalog:
                planner.session.catalog.setCurrentCatalog(spec.catalog)
            if spec.database:
                planner.session.catalog.setCurrentDatabase(spec.database)
    except PySparkException as error:
        raise InvalidInputError(f"{spec.path}: {first_line(error)}") from None
    flow = Dataflow(spec.name)
    declared = _Declared(flow, planner, inputs, Definitions(spec, planner).load())
    with without_log():
        declared.all()
    return Pipeline(spec, flow, declared.done, inputs.found, planner)


class _Declared:
    """Declares datasets in the order in which they read each other."""

    def __init__(
        self, flow: Dataflow, planner: ProjectPlanner, inputs: Inputs, datasets: Mapping[str, Dataset]
    ) -> None:
        self._flow, self._planner, self._inputs, self._datasets = flow, planner, inputs, datasets
        self.done: dict[str, Dataset] = {}

    def all(self) -> None:
        for name in self._datasets:
            if name not in self.done:
                self._declare(name, ())

    def _declare(self, name: str, below: tuple[str, ...]) -> None:
        """Declares a dataset after what it reads. `below`: the datasets for which it is declared."""
        dataset = self._datasets[name]
        if name in below:
            raise FlowError(f"{dataset.where}: {' reads '.join([*below[below.index(name) :], name])}")
        frame = None
        while frame is None:
            self._planner.to_come = self._datasets.keys() - self.done.keys()
            try:
                frame = self._asked(dataset)
            except NotYet as other:
                self._declare(other.dataset, (*below, name))
        try:
            self._add(dataset, frame)
        except NosyncError as error:
            raise type(error)(f"{dataset.where}: {error}") from None
        except PySparkException as error:
            raise FlowError(f"{dataset.where}: {dataset.name}: {first_line(error)}") from None
        self.done[name] = dataset

    def _asked(self, dataset: Dataset) -> DataFrame:
        """Returns the rows of a dataset's queries."""
        with self._planner.active():
            return self._united(dataset, [self._of(dataset, query) for query in dataset.queries])

    @staticmethod
    def _united(dataset: Dataset, frames: Sequence[DataFrame]) -> DataFrame:
        try:
            frame = reduce(lambda a, b: a.unionByName(b, allowMissingColumns=True), frames)
            return frame if dataset.schema is None else _cast(frame, dataset, dataset.schema)
        except PySparkException as error:
            raise FlowError(f"{dataset.where}: {dataset.name}: {first_line(error)}") from None

    def _of(self, dataset: Dataset, query: Query) -> DataFrame:
        try:
            frame = query.ask()
        except (NotYet, NosyncError):
            raise
        except PySparkException as error:
            names = [*self._datasets]
            missing = (error.getMessageParameters() or {}).get("relationName", "").strip("`")
            hint = did_you_mean(missing, names) if missing and missing not in names else ""
            raise FlowError(f"{query.where}: {query.name}: {first_line(error)}{hint}") from None
        except Exception as error:
            raise FlowError(f"{query.where}: {query.name} raised {type(error).__name__}: {error}") from error
        if dataset.kind == MATERIALIZED_VIEW and frame.isStreaming:
            raise FlowError(
                f"{query.where}: {query.name} reads a stream, and a materialized view is of tables: read it with "
                "spark.read or without STREAM, or define a streaming table"
            )
        if dataset.kind in OF_STREAMS:
            self._check_streams(query, frame, dataset.kind)
        return frame

    def _recorded(self) -> set[str]:
        return {name for name, one in self.done.items() if one.kind != TEMPORARY_VIEW}

    @staticmethod
    def _check_streams(query: Query, frame: DataFrame, kind: str) -> None:
        leaves = outside_leaves(frame._jdf.queryExecution().analyzed(), ())
        still = next((leaf for leaf in leaves if not leaf.isStreaming()), None)
        if not frame.isStreaming:
            raise FlowError(
                f"{query.where}: {query.name} reads no stream, and a {kind} is of rows as they come: read it with "
                "spark.readStream or STREAM, or define a materialized view"
            )
        if still is not None:
            raise FlowError(
                f"{query.where}: {query.name} joins a stream with a table ({still.simpleString(60)}). Spark would ask for each "
                "row what the table has when it comes, which nothing can compute again: define a materialized view, which "
                "follows the table, or read the table as a stream"
            )

    def _add(self, dataset: Dataset, frame: DataFrame) -> None:
        plan = frame._jdf.queryExecution().analyzed()
        self._inputs.claim(self._flow, dataset.name, plan, self._recorded())
        if dataset.kind == TEMPORARY_VIEW:
            frame.createOrReplaceTempView(quoted(dataset.name))
            return
        only_grows = dataset.kind in OF_STREAMS and not any(query.is_cdc for query in dataset.queries)
        emit = FINAL if only_grows else CHANGES
        view = View(dataset.name, lambda _: frame, goes_on=not dataset.follows, emit=emit)
        self._flow.declare_view(view, self._planner)
        self._planner.register(dataset.name, types_of(frame))


def _cast(frame: DataFrame, dataset: Dataset, schema: StructType | str) -> DataFrame:
    """Returns rows with the columns that a dataset declares; one that the query does not give is null, as in Spark.

    Raises FlowError for a column that it does not declare, and for one of another type, which a cast might change.
    """
    wanted = cast("StructType", StructType.fromDDL(schema)) if isinstance(schema, str) else schema
    known = [name.lower() for name in wanted.names]
    more = next((name for name in frame.columns if name.lower() not in known), None)
    if more is not None:
        raise FlowError(
            f"{dataset.where}: {dataset.name}: its query gives the column {more!r}, which its schema ({', '.join(wanted.names)}) "
            "does not have: declare it, or leave it out of the query"
        )
    given = {field.name.lower(): field for field in frame.schema}
    for field in wanted:
        is_, said = given.get(field.name.lower()), field.dataType.simpleString()
        if is_ is not None and is_.dataType.simpleString() != said:
            raise FlowError(
                f"{dataset.where}: {dataset.name}: its schema says {field.name} {said}, and its query gives "
                f"{is_.dataType.simpleString()}: declare that, or write CAST({field.name} AS {said.upper()}) in the query"
            )
    return frame.select(
        *(
            F.col(quoted(field.name)).alias(field.name)
            if field.name.lower() in given
            else F.lit(None).cast(field.dataType).alias(field.name)
            for field in wanted
        )
    )
