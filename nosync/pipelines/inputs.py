"""What a project reads that is none of its datasets: files, tables of the catalog, topics. Its rows are recorded.

What is read as a stream is a source: rows that came. What is read as a table is compared with what is recorded of it,
and a run records the rows that are there more, and less.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from nosync.flow.dataflow import Dataflow
from nosync.flow.stage import Stage
from nosync.lsm.columnar.columns import CHANGE_TYPE_COLUMN
from nosync.lsm.trace.change_feed import DELETE, INSERT
from nosync.spark.expressions import quoted
from nosync.spark.plans.catalyst import Node, items, kind_of

ROW_ID = "row_id"
"""The key of a table's rows: what they have in their columns, and which of equal rows it is."""
_WITHOUT_ROWS = ("OneRowRelation",)


@dataclass(frozen=True)
class Input:
    """Something that a project reads."""

    name: str
    """The source, or the table, that has its rows."""
    leaf: Node
    """Where it is read, as a plan of Spark."""
    columns: tuple[str, ...]
    """The names of its columns as they are recorded."""
    is_stream: bool
    stage: Stage
    """The stage that queries read."""
    shown: str
    """What it is, as Spark says it."""


class Inputs:
    """The inputs of a project, which become sources of its flow as queries that read them are declared."""

    def __init__(self) -> None:
        self.found: list[Input] = []
        self.dataset = ""
        """The dataset that is being declared, after which new ones are named."""

    def outside(self, flow: Dataflow, leaf: Node) -> tuple[Stage, Sequence[str]] | None:
        """Returns the stage for a leaf of a plan, and its columns; None for a leaf that reads nothing."""
        if kind_of(leaf) in _WITHOUT_ROWS or not items(leaf.output()):
            return None
        known = self._known(leaf)
        if known is None:
            taken = {one.name for one in self.found} | {stage.name for stage in flow.stages}
            tries = [f"{self.dataset}-input", *(f"{self.dataset}-input-{n}" for n in range(2, len(taken) + 3))]
            known = self._add(flow, next(name for name in tries if name not in taken), leaf)
        return known.stage, known.columns

    def as_source(self, flow: Dataflow, name: str, leaf: Node) -> Stage:
        """Declares a stream as a source of a name: it is what a streaming table of this name has."""
        return self._add(flow, name, leaf).stage

    def is_plain(self, leaf: Node) -> bool:
        """Returns whether a plan only reads a stream that is not read yet, with names that can be recorded."""
        names = [str(one.name()) for one in items(leaf.output())]
        is_leaf = not items(leaf.children()) and kind_of(leaf) not in ("View", *_WITHOUT_ROWS)
        return is_leaf and bool(leaf.isStreaming()) and self._known(leaf) is None and _renamed(names) == names

    def _known(self, leaf: Node) -> Input | None:
        meant = leaf.canonicalized()
        return next((one for one in self.found if one.leaf.canonicalized().equals(meant)), None)

    def _add(self, flow: Dataflow, name: str, leaf: Node) -> Input:
        outputs = items(leaf.output())
        columns = _renamed([str(one.name()) for one in outputs])
        types = [str(one.dataType().sql()) for one in outputs]
        ddl = ", ".join(f"{quoted(column)} {type_}" for column, type_ in zip(columns, types, strict=True))
        is_stream = bool(leaf.isStreaming())
        if is_stream:
            stage = flow.source(name, ddl)
        else:
            table = flow.table(name, f"{ROW_ID} string, {ddl}", key=[ROW_ID])
            stage = table.select(f"{name}-rows", *map(quoted, columns), persist="none")
        self.found.append(Input(name, leaf, tuple(columns), is_stream, stage, _shown(str(leaf.simpleString(1000)))))
        return self.found[-1]


def rows_of(one: Input, frame: DataFrame) -> DataFrame:
    """Returns the rows of an input's DataFrame with the names that are recorded."""
    return frame.toDF(*one.columns)


def changes_of(one: Input, frame: DataFrame, recorded: DataFrame | None) -> DataFrame:
    """Returns the rows that are in a table and not recorded, and those that are recorded and gone, by `_change_type`.

    `recorded`: the rows that the store has, with their ids; None for none yet.
    """
    contents = F.sha2(F.to_json(F.struct(*map(quoted, one.columns)), {"ignoreNullFields": "false"}), 256)
    hashed = rows_of(one, frame).withColumn(ROW_ID, contents)
    place = F.row_number().over(Window.partitionBy(ROW_ID).orderBy(ROW_ID))
    now = hashed.withColumn(ROW_ID, F.concat_ws("-", ROW_ID, place)).select(ROW_ID, *map(quoted, one.columns))
    if recorded is None:
        return now.withColumn(CHANGE_TYPE_COLUMN, F.lit(INSERT))
    before = recorded.select(*now.columns)
    new = now.join(before.select(ROW_ID), ROW_ID, "left_anti").withColumn(CHANGE_TYPE_COLUMN, F.lit(INSERT))
    gone = before.join(now.select(ROW_ID), ROW_ID, "left_anti").withColumn(CHANGE_TYPE_COLUMN, F.lit(DELETE))
    return new.unionByName(gone)


def types_of(frame: DataFrame) -> Mapping[str, str]:
    """Returns Spark's types of a DataFrame's columns."""
    return {field.name: field.dataType.simpleString() for field in frame.schema}


def _shown(text: str) -> str:
    """Returns what Spark says of a leaf of a plan, without the numbers of its columns."""
    text = re.sub(r"#\d+L?", "", text.removeprefix("StreamingRelation ")).removesuffix(", name=<Unassigned>")
    return text if len(text) <= 100 else text[:97] + "..."


def _renamed(names: Sequence[str]) -> list[str]:
    """Returns names that can be recorded: those that begin with _ are kept for the store itself."""
    found: list[str] = []
    for name in names:
        plain = name.lstrip("_") or "column"
        tries = [plain, *(f"{plain}_{n}" for n in range(2, len(names) + 2))]
        found.append(next(one for one in tries if one.lower() not in [other.lower() for other in found]))
    return found
