"""Rows on their way from Spark's JVM to Python tasks, without what Spark does there for each row and each column in
vain.

How many go at once: after every row Spark asks how many bytes there are by now
(`spark.sql.execution.arrow.maxBytesPerBatch`), which takes longer than to write the row. Told a number of rows in its
place it does not ask; but no row may be longer than that number takes it for. Of text nobody knows before, so rows with
more of it than `MOST_TEXT_BYTES` are refused by a condition that the JVM evaluates on its way (WideRowError), and their
job's epochs run with bytes counted from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import BinaryType, StringType, StructType
from pyspark.sql.udf import UserDefinedFunction
from pyspark.util import PythonEvalType

from nosync.flow.bound_flow import BoundFlow
from nosync.flow.internal_columns import REPORT_COLUMN
from nosync.flow.kinds import SOURCE
from nosync.flow.stage_options import JvmOptions
from nosync.lsm.errors import WideRowError, encode_failure
from nosync.runtime.segment_task import edge_schema
from nosync.spark.expressions import analyzed, quoted
from nosync.spark.session import arrow_settings, contains

MOST_TEXT_BYTES = 1 << 10
"""Of all strings and binary values of a row."""
_OFFSET_BYTES = 4
"""Of a text in an Arrow batch, beside the text."""
ArrowFunction = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


@dataclass(frozen=True)
class Handover:
    """Says how the rows of an epoch are handed over."""

    settings: Mapping[str, str] = field(default_factory=dict)
    """Of the session, while it is planned and run."""
    is_text_limited: bool = False

    def mapped(self, rows: DataFrame, function: ArrowFunction, schema: pa.Schema) -> DataFrame:
        """Returns `rows.mapInArrow`. A task that runs it raises WideRowError where a row has more text than `settings`
        allow for.
        """
        if self.is_text_limited:
            rows = _limited(rows)
        return _mapped(rows, function, from_arrow_schema(schema))


def handover(
    spark: SparkSession, flow: BoundFlow, inputs: Mapping[str, DataFrame], *, has_wide_rows: bool = False
) -> Handover:
    """Returns how to hand over an epoch's rows. `has_wide_rows`: some have more text than `MOST_TEXT_BYTES`, so bytes
    are counted.
    """
    plans = [(frame.sparkSession, analyzed(frame)) for frame in inputs.values()]
    if any(contains(session, plan, "PYTHON_UDF") for session, plan in plans) or any(
        isinstance(stage.options, JvmOptions) and not stage.options.plain for stage in flow.stages.values()
    ):
        return Handover()  # rows go to functions of the user's as well
    schemas = _handed_over(flow)
    has_text = any(_is_text(column.type) for schema in schemas for column in schema)
    # An epoch that runs again goes on over what is recorded of it, so it must be given the same rows again.
    if has_text and (has_wide_rows or not all(_is_repeatable(*one) for one in plans)):
        return Handover()
    settings = arrow_settings(spark, _row_bytes(schemas))
    return Handover(settings, has_text and bool(settings))


def _mapped(rows: DataFrame, function: ArrowFunction, schema: StructType) -> DataFrame:
    """Returns `rows.mapInArrow`, which by itself calls the JVM for each column, and takes a dot in a column's name for
    that of a field.
    """
    there = UserDefinedFunction(function, schema, evalType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF)._judf
    called = there.fromUDFExpr(there.builder(analyzed(rows).output()))
    return DataFrame(rows._jdf.mapInArrow(called, False, None), rows.sparkSession)


def _limited(rows: DataFrame) -> DataFrame:
    columns = [column.name for column in rows.schema if isinstance(column.dataType, StringType | BinaryType)]
    lengths = [f"coalesce(bigint(octet_length({quoted(name)})), 0L)" for name in columns if name != REPORT_COLUMN]
    if not lengths:
        return rows
    error = WideRowError(
        f"a row has more than {MOST_TEXT_BYTES:,} bytes of text: its epoch runs again, with bytes counted"
    )
    refused = f"raise_error('{encode_failure(error)}')"
    return rows.where(f"IF({' + '.join(lengths)} <= {MOST_TEXT_BYTES}, TRUE, {refused})")


def _is_repeatable(spark: SparkSession, plan: Any) -> bool:
    return bool(plan.deterministic()) and not contains(spark, plan, "CURRENT_LIKE")


def _handed_over(flow: BoundFlow) -> list[pa.Schema]:
    """Returns for each segment all columns of all that it may get."""
    found = []
    for segment in flow.segments.values():
        schemas = [edge_schema(flow.stages, edge) for edge in segment.edges]
        schemas += [flow.stages[name].schema for name in segment.stages if flow.stages[name].kind == SOURCE]
        found.append(pa.schema([column for schema in schemas for column in schema]))
    return found


def _row_bytes(schemas: Sequence[pa.Schema]) -> int | None:
    """Returns the most bytes that a row can have, if its text is limited. None: nobody knows, for there are arrays,
    say.
    """
    widest = 0
    for schema in schemas:
        types = [column.type for column in schema]
        try:
            fixed = sum(_OFFSET_BYTES if _is_text(type_) else -(-type_.bit_width // 8) for type_ in types)
        except ValueError:  # a type of no fixed width
            return None
        widest = max(widest, fixed + (MOST_TEXT_BYTES if any(map(_is_text, types)) else 0))
    return widest


def _is_text(type_: pa.DataType) -> bool:
    return any(
        is_one(type_)
        for is_one in (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    )
