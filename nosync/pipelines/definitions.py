"""Reading the files of a project: what they define, by the decorators of `pyspark.pipelines` and in SQL."""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pyspark.errors import PySparkException
from pyspark.pipelines.flow import Flow
from pyspark.pipelines.graph_element_registry import GraphElementRegistry, graph_element_registration_context
from pyspark.pipelines.output import MaterializedView, Output, Sink, StreamingTable, TemporaryView
from pyspark.pipelines.source_code_location import SourceCodeLocation
from pyspark.sql import DataFrame

from nosync.lsm.errors import FlowError, InvalidInputError
from nosync.lsm.model.layer import check_name
from nosync.lsm.platform.nearest import did_you_mean
from nosync.pipelines.auto_cdc import Changes, Chosen, changes_of, name_of, rows_of
from nosync.pipelines.datasets import (
    MATERIALIZED_VIEW,
    OF_STREAMS,
    SINK,
    STREAMING_TABLE,
    TEMPORARY_VIEW,
    Dataset,
    Query,
)
from nosync.pipelines.inputs import sql_of
from nosync.pipelines.reading import ProjectPlanner
from nosync.pipelines.sinks import sink_of
from nosync.pipelines.spec import Spec
from nosync.spark.errors import first_line, without_log
from nosync.spark.plans.catalyst import Node, found, items, kind_of

_KINDS = {
    MaterializedView: MATERIALIZED_VIEW,
    StreamingTable: STREAMING_TABLE,
    TemporaryView: TEMPORARY_VIEW,
    Sink: SINK,
}
_MOST_SHOWN = 40
"""Characters of a statement."""
_LAYOUT = ("partition_cols", "cluster_by", "format", "table_properties")
"""How Spark would lay out a dataset's files."""


class Definitions(GraphElementRegistry):
    """The datasets that the files of a project define, by name."""

    def __init__(self, spec: Spec, planner: ProjectPlanner) -> None:
        self._spec, self._planner = spec, planner
        self.datasets: dict[str, Dataset] = {}
        self._queries: list[tuple[str, Query]] = []

    def load(self) -> dict[str, Dataset]:
        """Reads all files. Returns the datasets; raises InvalidInputError or FlowError, naming file and line."""
        for file in self._spec.files():
            with self._in_project(), graph_element_registration_context(self), self._planner.active():
                if file.suffix == ".py":
                    self._import(file)
                elif file.suffix == ".sql":
                    self.register_sql(_text_of(file), file)
                else:
                    raise InvalidInputError(f"{self._shown(file)}: expected files that end in .py or .sql")
        self._fill()
        self._check()
        return self.datasets

    def _fill(self) -> None:
        """Gives datasets the queries that fill them. Raises FlowError for one that can fill nothing."""
        named: dict[str, Query] = {}
        for target, query in self._queries:
            if (other := named.setdefault(query.name.lower(), query)) is not query:
                raise FlowError(
                    f"{query.where}: flow {query.name} is defined already, in {other.where}: give it another name="
                )
            name = self._name(target, query.where)
            if name not in self.datasets:
                raise FlowError(
                    f"{query.where}: {query.name} fills {name}, which is not defined: "
                    f"create_streaming_table({name!r}) defines it{did_you_mean(name, self.datasets)}"
                )
            dataset = self.datasets[name]
            if query.is_cdc and dataset.kind != STREAMING_TABLE:
                raise FlowError(
                    f"{query.where}: {name} is a {dataset.kind}, and AUTO CDC changes the rows of its target: let it fill a "
                    "streaming table"
                )
            if dataset.queries and dataset.kind not in OF_STREAMS:
                raise FlowError(
                    f"{query.where}: {name} is a {dataset.kind}, which has the query that defines it alone: flows fill "
                    "streaming tables and sinks"
                )
            dataset.queries.append(query)
            dataset.follows |= query.is_cdc  # what a key has is changed and taken back

    def _check(self) -> None:
        """Raises FlowError for a dataset that nothing fills, or that gets in the way of another flow or sink."""
        outputs: dict[str, Dataset] = {}
        for dataset in self.datasets.values():
            cdc = next((query for query in dataset.queries if query.is_cdc), None)
            if cdc is not None and len(dataset.queries) > 1:
                raise FlowError(
                    f"{cdc.where}: {dataset.name} is the target of AUTO CDC, and can have no other flow beside it"
                )
            if not dataset.queries:
                raise FlowError(
                    f"{dataset.where}: nothing fills {dataset.name}: append_flow(target={dataset.name!r}) does"
                )
            if dataset.sink is None:
                continue
            place = str(dataset.sink.path)
            if (other := outputs.setdefault(place, dataset)) is not dataset:
                raise FlowError(
                    f"{dataset.where}: sink {dataset.name} writes to {place}, as {other.name} in {other.where} does: give each "
                    "a path of its own"
                )

    # --- what the decorators call -------------------------------------------------------------------------------------

    def register_output(self, output: Output) -> None:
        where = self._location(output.source_code_location)
        kind = _KINDS.get(type(output))
        if kind is None:
            raise FlowError(f"{where}: {output.name} is a {type(output).__name__}, which this command does not fill")
        dataset = self._add(output.name, kind, where, getattr(output, "schema", None))
        if isinstance(output, Sink):
            dataset.sink = sink_of(output, where, self._spec.root)
            dataset.notes.append(
                "its rows have _change_type and the epoch beside their columns, and are in the store too"
            )
            return
        ignored = [name for name in _LAYOUT if getattr(output, name, None)]
        if ignored:
            dataset.notes.append(f"{', '.join(ignored)}: a store lays out its own files")

    def register_flow(self, flow: Flow) -> None:
        where = self._location(flow.source_code_location)
        self._check_conf(flow.spark_conf, flow.name, where)
        self._queries.append((flow.target, Query(flow.name, where, self._called(flow.func, flow.name, where))))

    def _check_conf(self, given: Mapping[str, str] | None, name: str, where: str) -> None:
        if given:
            raise FlowError(
                f"{where}: {name} has spark_conf, and all datasets are computed with the same: put {', '.join(given)} into the "
                f"configuration of {self._spec.path.name}"
            )

    def register_auto_cdc_flow(self, flow: Any) -> None:
        where = self._location(flow.source_code_location)
        # Spark 4.2 has none in such a flow.
        self._check_conf(getattr(flow, "spark_conf", None), flow.name or flow.target, where)
        self._add_changes(
            flow.target, flow.name or flow.target, where,
            Changes(
                flow.source, flow.keys, flow.sequence_by, flow.apply_as_deletes,
                Chosen(flow.column_list or None, flow.except_column_list or None),
                str(flow.stored_as_scd_type or 1) == "2",
                # Spark 4.2 has none of these.
                Chosen(getattr(flow, "track_history_column_list", None), getattr(flow, "track_history_except_column_list", None)),
            ),
        )  # fmt: skip

    def register_sql(self, sql_text: str, file_path: Path) -> None:
        """Takes the statements of a SQL file."""
        shown = self._shown(file_path)
        split = getattr(
            self._planner.session._jvm.org.apache.spark.sql.pipelines.graph,  # type: ignore[union-attr]
            "SqlGraphRegistrationContext$",
        )
        try:
            with without_log():
                statements = items(
                    getattr(split, "MODULE$").splitSqlFileIntoQueries(
                        self._planner.session._jsparkSession, sql_text, shown
                    )
                )
        except PySparkException as error:
            raise InvalidInputError(f"{shown}: {first_line(error)}") from None
        for one in statements:
            line = found(one.queryOrigin().line()) or 1
            self._statement(one.plan(), f"{shown}:{line}", sql_text.splitlines()[line - 1].strip()[:_MOST_SHOWN])

    # --- SQL ----------------------------------------------------------------------------------------------------------

    def _statement(self, plan: Node, where: str, said: str) -> None:
        """`said`: how the statement begins."""
        kind = kind_of(plan)
        if kind == "SetCommand":
            raise FlowError(
                f"{where}: SET: all datasets are computed with the same settings: put it into the configuration of "
                f"{self._spec.path.name}"
            )
        if kind in ("CreateMaterializedViewAsSelect", "CreateView"):
            is_view = kind == "CreateView"
            name = name_of(plan.child() if is_view else plan.name())
            self._add(name, MATERIALIZED_VIEW, where, None if is_view else _columns_of(plan))
            self._add_query(name, name, where, plan.query())
        elif kind == "CreateViewCommand":
            name = str(plan.name().table())
            self._add(name, TEMPORARY_VIEW, where)
            self._add_query(name, name, where, plan.plan())
        elif kind in ("CreateStreamingTable", "CreateStreamingTableAsSelect", "CreateStreamingTableAutoCdc"):
            name = name_of(plan.name())
            self._add(name, STREAMING_TABLE, where, _columns_of(plan))
            if kind == "CreateStreamingTableAsSelect":
                self._add_query(name, name, where, plan.query())
            elif kind == "CreateStreamingTableAutoCdc":
                self._add_changes(name, name, where, changes_of(plan))
        elif kind == "CreateFlowCommand":
            self._flow(plan, where)
        else:
            raise FlowError(
                f"{where}: {said!r} defines no dataset: expected CREATE MATERIALIZED VIEW, CREATE STREAMING TABLE, "
                "CREATE TEMPORARY VIEW or CREATE FLOW"
            )

    def _flow(self, plan: Node, where: str) -> None:
        name, what = name_of(plan.name()), plan.flowOperation()
        if kind_of(what) == "InsertIntoStatement":
            self._add_query(name_of(what.table()), name, where, what.query())
        elif kind_of(what) == "AutoCdcInto":
            self._add_changes(name_of(what.targetTable()), name, where, changes_of(what))
        else:
            raise FlowError(f"{where}: CREATE FLOW with {kind_of(what)}: expected INSERT INTO ... BY NAME SELECT ...")

    def _add_query(self, target: str, name: str, where: str, plan: Node) -> None:
        self._queries.append((target, Query(name, where, lambda: self._planner.asked(plan))))

    # --- both ---------------------------------------------------------------------------------------------------------

    def _add(self, name: str, kind: str, where: str, schema: Any = None) -> Dataset:
        name = self._name(name, where)
        if name in self.datasets:
            raise FlowError(f"{where}: {name} is defined already, in {self.datasets[name].where}")
        self.datasets[name] = Dataset(name, kind, where, schema, follows=kind not in OF_STREAMS)
        return self.datasets[name]

    def _add_changes(self, target: str, name: str, where: str, changes: Changes) -> None:
        query = Query(name, where, lambda: rows_of(self._planner, changes, name, where), is_cdc=True)
        self._queries.append((target, query))

    def _name(self, given: str, where: str) -> str:
        """Returns the name of a stage for a dataset's, which may say the project's catalog and database."""
        parts = [part.strip("`").lower() for part in given.split(".")]
        if len(parts) > 1 and tuple(parts[:-1]) not in self._spec.qualifiers:
            raise FlowError(
                f"{where}: {given} is in a database that is not the project's: datasets here have names of one part"
            )
        return check_name(parts[-1], f"{where}: dataset name")

    def _called(self, fn: Callable[[], DataFrame], name: str, where: str) -> Callable[[], DataFrame]:
        def ask() -> DataFrame:
            with self._in_project():
                frame = fn()
            if not isinstance(frame, DataFrame):
                raise FlowError(f"{where}: {name} returned {type(frame).__name__}, expected a DataFrame")
            return frame

        return ask

    def _import(self, file: Path) -> None:
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None, "it ends in .py"
        assert spec.loader is not None, "it is a file"
        module = importlib.util.module_from_spec(spec)
        module.__dict__["spark"] = self._planner.session  # as Spark's own command does
        try:
            spec.loader.exec_module(module)
        except (FlowError, InvalidInputError):
            raise
        except Exception as error:
            where = f"{self._shown(file)}{_line_of(error, file)}"
            raise InvalidInputError(f"{where}: {type(error).__name__}: {first_line(error)}") from error

    @contextmanager
    def _in_project(self) -> Iterator[None]:
        """Lets the project's directory be the working directory, from which it reads its files and modules."""
        before = Path.cwd()
        os.chdir(self._spec.root)
        sys.path.insert(0, str(self._spec.root))
        try:
            yield
        finally:
            with suppress(ValueError):  # a module may do as it likes
                sys.path.remove(str(self._spec.root))
            os.chdir(before)

    def _location(self, location: SourceCodeLocation) -> str:
        return f"{self._shown(Path(location.filename))}:{location.line_number}"

    def _shown(self, file: Path) -> str:
        root = self._spec.root
        return str(file.relative_to(root) if file.is_relative_to(root) else file)


def _line_of(error: Exception, file: Path) -> str:
    """Returns the line of a file at which an error came, with a colon before it; nothing where that is not known."""
    if isinstance(error, SyntaxError) and error.filename == str(file):
        return f":{error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    return f":{lines[-1]}" if lines else ""


def _columns_of(plan: Node) -> str | None:
    """Returns the columns that a statement declares, as DDL."""
    columns = items(plan.columns())
    return ", ".join(f"`{one.name()}` {sql_of(one.dataType())}" for one in columns) or None


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{file}: cannot be read: {error}") from error
