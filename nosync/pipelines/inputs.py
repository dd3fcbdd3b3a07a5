"""What a project reads that is none of its datasets: files, tables of the catalog, topics. Its rows are recorded.

What is read as a stream is a source: rows that came. What is read as a table is compared with what is recorded of it,
and a run records the rows that are there more, and less.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from nosync.flow.dataflow import Dataflow
from nosync.flow.stage import Stage
from nosync.lsm.columnar.columns import CHANGE_TYPE_COLUMN
from nosync.lsm.errors import FlowError
from nosync.lsm.trace.change_feed import DELETE, INSERT
from nosync.pipelines.recorded_inputs import Recorded, name_going_on, row_id_beside
from nosync.spark.expressions import quoted
from nosync.spark.plans.catalyst import SUBQUERIES, Node, items, kind_of, nodes_of
from nosync.spark.schemas import parse_ddl

_AS_JSON = {
    "ignoreNullFields": "false",
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}
"""Rows as texts, which tell apart all that is told apart in rows: by itself Spark writes milliseconds."""
_TIMESTAMP_TYPE = "spark.sql.timestampType"
_INSTANT = re.compile(r"(?<![^<:, ])TIMESTAMP(?=$|[>, ])")
"""The type where it stands: at the beginning, or in a list, a map or a struct. A field of that name has a colon after it."""
_WITHOUT_ROWS = ("OneRowRelation", "View")


@dataclass(frozen=True)
class Input:
    """Something that a project reads."""

    name: str
    """The source, or the table, that has its rows."""
    base: str
    """Its name before its columns were others."""
    leaf: Node
    """Where it is read, as a plan of Spark."""
    columns: tuple[str, ...]
    """The names of its columns as they are recorded."""
    is_stream: bool
    shown: str
    """What it is, as Spark says it."""

    @property
    def read_as(self) -> str:
        """Returns the name of the stage that queries read: a table's rows are without their ids there."""
        return self.name if self.is_stream else f"{self.name}-rows"


class Inputs:
    """The inputs of a project, which become sources of its flow.

    An input has a name that the next run gives it again, or its rows would come twice, or as those of another: that of its
    table in the catalog, or `<dataset>-input` after the first dataset that reads it. A table with other columns than are
    recorded has another one.
    """

    def __init__(self, recorded: Mapping[str, Recorded]) -> None:
        """`recorded`: what the store has."""
        self.found: list[Input] = []
        self._recorded = recorded

    def claim(self, flow: Dataflow, dataset: str, plan: Node, datasets: Container[str]) -> None:
        """Declares what a dataset's plan reads that is no dataset, and no input yet. Raises FlowError where it is not known
        by which name.
        """
        mine: dict[str, str] = {}
        for leaf in outside_leaves(plan, datasets):
            if self._known(leaf) is not None:
                continue
            name, shown = _name_in_catalog(leaf) or f"{dataset}-input", _shown(leaf)
            if name in mine:
                raise FlowError(
                    f"{dataset} reads {mine[name]} and {shown}, which have no names: define each as a dataset of its own, and "
                    "read these"
                )
            if any(one.base == name for one in self.found):
                raise FlowError(f"{dataset} reads {shown} in another way than a dataset before: define it as a dataset")
            mine[name] = shown
            self._add(flow, name, leaf)

    def outside(self, flow: Dataflow, leaf: Node) -> tuple[Stage, Sequence[str]] | None:
        """Returns the stage for a leaf of a plan, and its columns; None for a leaf that reads nothing."""
        known = self._known(leaf)
        if known is None:
            return None
        if known.read_as not in {stage.name for stage in flow.stages}:
            flow[known.name].select(known.read_as, *map(quoted, known.columns), persist="none")
        return flow[known.read_as], known.columns

    def _known(self, leaf: Node) -> Input | None:
        meant = leaf.canonicalized()
        return next((one for one in self.found if one.leaf.canonicalized().equals(meant)), None)

    def _add(self, flow: Dataflow, base: str, leaf: Node) -> None:
        outputs = items(leaf.output())
        columns = _renamed([str(one.name()) for one in outputs], _shown(leaf))
        types = [sql_of(one.dataType()) for one in outputs]
        ddl = ", ".join(f"{quoted(column)} {type_}" for column, type_ in zip(columns, types, strict=True))
        is_stream = bool(leaf.isStreaming())
        if is_stream:
            name = base
            flow.source(name, ddl)
        else:
            row_id = row_id_beside(columns)
            ddl = f"{row_id} string, {ddl}"
            name = name_going_on(base, parse_ddl(ddl), self._recorded)
            flow.table(name, ddl, key=[row_id])
        self.found.append(Input(name, base, leaf, tuple(columns), is_stream, _shown(leaf)))


def outside_leaves(plan: Node, datasets: Container[str]) -> Iterator[Node]:
    """Yields what a plan reads that is no dataset, in the order of the plan, subqueries included."""
    kind, children = kind_of(plan), items(plan.children())
    if kind == "View" and str(plan.desc().identifier().table()).lower() in datasets:
        return
    if not children and kind not in (*_WITHOUT_ROWS, "CTERelationRef") and items(plan.output()):
        yield plan
    inner = [*children, *(items(plan.cteDefs()) if kind == "WithCTE" else [])]
    asked = (one.plan() for e in items(plan.expressions()) for one in nodes_of(e) if kind_of(one) in SUBQUERIES)
    for below in (*inner, *asked):
        yield from outside_leaves(below, datasets)


def _name_in_catalog(leaf: Node) -> str | None:
    """Returns the name of a table of the catalog, in the characters of names here; None for what is none."""
    kind = kind_of(leaf)
    if kind == "LogicalRelation" and leaf.catalogTable().isDefined():
        text = str(leaf.catalogTable().get().identifier().unquotedString())
    elif kind == "HiveTableRelation":
        text = str(leaf.tableMeta().identifier().unquotedString())
    elif kind == "DataSourceV2Relation" and leaf.identifier().isDefined():
        text = str(leaf.identifier().get().toString())
    else:
        return None
    return re.sub(r"[^a-z0-9_]+", "-", text.lower()).strip("-")[:64] or None


def rows_of(one: Input, frame: DataFrame) -> DataFrame:
    """Returns the rows of an input's DataFrame with the names that are recorded."""
    return frame.toDF(*one.columns)


def changes_of(one: Input, frame: DataFrame, recorded: DataFrame | None) -> DataFrame:
    """Returns the rows that are in a table and not recorded, and those that are recorded and gone, by `_change_type`.

    `recorded`: the rows that the store has, with their ids; None for none yet.
    """
    row_id = row_id_beside(one.columns)
    contents = F.sha2(F.to_json(F.struct(*map(quoted, one.columns)), _AS_JSON), 256)
    hashed = rows_of(one, frame).withColumn(row_id, contents)
    place = F.row_number().over(Window.partitionBy(row_id).orderBy(row_id))
    now = hashed.withColumn(row_id, F.concat_ws("-", row_id, place)).select(row_id, *map(quoted, one.columns))
    if recorded is None:
        return now.withColumn(CHANGE_TYPE_COLUMN, F.lit(INSERT))
    before = recorded.select(*now.columns)
    new = now.join(before.select(row_id), row_id, "left_anti").withColumn(CHANGE_TYPE_COLUMN, F.lit(INSERT))
    gone = before.join(now.select(row_id), row_id, "left_anti").withColumn(CHANGE_TYPE_COLUMN, F.lit(DELETE))
    return new.unionByName(gone)


def types_of(frame: DataFrame) -> Mapping[str, str]:
    """Returns Spark's types of a DataFrame's columns."""
    return {str(one.name()): sql_of(one.dataType()) for one in items(frame._jdf.schema())}


def sql_of(type_: Node) -> str:
    """Returns a type as SQL. Spark writes an instant as TIMESTAMP, which is read as another type where
    `spark.sql.timestampType` says so: there it is TIMESTAMP_LTZ. Elsewhere it stays, for sources are known by their text.
    """
    text = str(type_.sql())
    is_other = str(SparkSession.active().conf.get(_TIMESTAMP_TYPE)).upper() == "TIMESTAMP_NTZ"
    return _INSTANT.sub("TIMESTAMP_LTZ", text) if is_other else text


def _shown(leaf: Node) -> str:
    """Returns what Spark says of a leaf of a plan, without the numbers of its columns."""
    text = re.sub(r"#\d+L?", "", str(leaf.simpleString(1000)).removeprefix("StreamingRelation ")).removesuffix(
        ", name=<Unassigned>"
    )
    return text if len(text) <= 100 else text[:97] + "..."


def _renamed(names: Sequence[str], shown: str) -> list[str]:
    """Returns names that can be recorded: those that begin with _ are kept for the store itself.

    Raises FlowError where two columns would have one name: which is which may not depend on their order, which changes.
    """
    found: dict[str, str] = {}
    for name in names:
        plain = name.lstrip("_") or "column"
        other = found.setdefault(plain.lower(), name)
        if other != name:
            raise FlowError(
                f"columns {other!r} and {name!r} of {shown} would both be recorded as {plain!r}, for names that begin with _ are "
                "the store's own: read only one of them, with a schema that leaves out the other"
            )
    return [name.lstrip("_") or "column" for name in names]
