"""The columns of sources: what is declared, and what a DataFrame has of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark import SparkContext
from pyspark.errors import ParseException, PySparkTypeError
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema, from_arrow_type
from pyspark.sql.types import (
    ArrayType,
    CharType,
    DataType,
    MapType,
    StringType,
    StructType,
    TimeType,
    VarcharType,
    VariantType,
    YearMonthIntervalType,
)

from nosync.flow.bound_flow import BoundFlow
from nosync.flow.bound_stage import BoundStage
from nosync.flow.dataflow import Dataflow
from nosync.lsm.columnar.columns import describe, nullable, plain
from nosync.lsm.errors import FlowError, InvalidInputError, SchemaError
from nosync.lsm.platform.nearest import did_you_mean
from nosync.spark.given_rows import GivenRows, schema_with_change_type
from nosync.spark.session import is_of_connect
from nosync.spark.versions import arrow_schema, declared_schema

log = logging.getLogger("nosync")


def parse_ddl(text: str) -> pa.Schema:
    """Returns Spark's DDL as an Arrow schema, with timestamps in UTC. Raises FlowError where no session runs."""
    if SparkContext._active_spark_context is None:  # which Spark's parser of DDL asks for
        raise FlowError("no Spark session runs: make one with SparkSession.builder.getOrCreate()")
    try:
        schema = StructType.fromDDL(text)
    except ParseException as error:
        reason = next(line for line in str(error).splitlines() if line.strip())
        raise SchemaError(f"{text!r} are no columns such as 'name string, n bigint': {reason}") from None
    if not isinstance(schema, StructType):
        raise SchemaError(f"{text!r} is a single type, expected columns such as 'name string, n bigint'")
    if not schema.fields:
        raise SchemaError("no columns are declared, expected some such as 'name string, n bigint'")
    for column in schema:
        _check_type(column.dataType, f"column {column.name!r} of {text!r}")
    check_fields(schema, repr(text))
    return declared_schema(schema)


def _in_other_case(name: str, columns: Sequence[str]) -> str:
    """Returns a hint where a column only differs in case, for which Spark may take it."""
    other = next((column for column in columns if column.lower() == name.lower()), None)
    return "" if other is None else f" (there is {other!r}: names here are as they are written; rename it)"


def spark_schema(schema: pa.Schema, what: str) -> StructType:
    """Returns columns as Spark has them. `what`: whose they are. Raises SchemaError naming one of a type that Spark does not
    have.
    """
    for field in schema:
        try:
            from_arrow_type(field.type)
        except PySparkTypeError:
            raise SchemaError(
                f"{what}: column {field.name!r} is {field.type}, and Spark does not read that: cast it, in the stage, to a type "
                "that Spark has. store.read() and `nosync get` have it as it is"
            ) from None
    return from_arrow_schema(schema)


def check_readable(stage: BoundStage) -> None:
    """Raises SchemaError where a stage has columns that Spark does not read: they can be recorded all the same."""
    for column in stage.output:
        unread = _unread_by_spark(column.type)
        if unread is not None:
            raise SchemaError(
                f"stage {stage.name}: column {column.name!r} is {column.type}, and Spark does not read {unread}: cast it, in "
                "the stage, to a type that Spark has, such as int64, decimal128, timestamp[us], date32 or string. "
                "store.read() has it as it is"
            )


def warn_of_unreadable(flow: BoundFlow) -> None:
    """Says when a job is made which stages `check_readable` will refuse."""
    for stage in flow.recorded:
        try:
            check_readable(stage)
        except SchemaError as error:
            log.warning("%s", error)


def _unread_by_spark(type_: pa.DataType) -> pa.DataType | None:
    """Returns the type, or one inside of it, that Spark does not read from Arrow."""
    for i in range(type_.num_fields):
        unread = _unread_by_spark(type_.field(i).type)
        if unread is not None:
            return unread
    if pa.types.is_timestamp(type_) or pa.types.is_duration(type_):
        return type_ if type_.unit != "us" else None
    if pa.types.is_time(type_) or pa.types.is_decimal256(type_):
        return type_
    try:
        from_arrow_type(type_)
    except PySparkTypeError:
        return type_
    return None


def check_names(flow: Dataflow, spark: SparkSession) -> None:
    """Raises SchemaError where columns of a source differ only in case, and Spark does not tell such names apart."""
    if str(spark.conf.get("spark.sql.caseSensitive")).lower() == "true":
        return
    for stage in flow.sources:
        known: dict[str, str] = {}
        for name in parse_ddl(stage.schema or "").names:
            other = known.setdefault(name.lower(), name)
            if other != name:
                raise SchemaError(
                    f"source {stage.name}: columns {other!r} and {name!r} differ only in case, which Spark does not tell apart: "
                    "rename one, or set spark.sql.caseSensitive"
                )


def _check_type(type_: DataType, what: str) -> None:
    """Raises SchemaError for a type whose values Spark and tasks would not tell apart alike."""
    if isinstance(type_, StringType) and not type_.isUTF8BinaryCollation():
        raise SchemaError(
            f"{what} has the collation {type_.collation}, and keys are compared by their bytes: declare it as string, and give "
            "lower(column), say"
        )
    for refused, instead in ((VariantType, "a string, as to_json(column) has it"), (TimeType, "a number or a string")):
        if isinstance(type_, refused):
            raise SchemaError(f"{what} is {type_.simpleString()}, whose values cannot be hashed: give {instead}")
    if isinstance(type_, CharType | VarcharType | YearMonthIntervalType):
        instead = "a number of months" if isinstance(type_, YearMonthIntervalType) else "string"
        raise SchemaError(f"{what} is {type_.simpleString()}, which Arrow does not have: declare it as {instead}")
    inner = [field.dataType for field in type_] if isinstance(type_, StructType) else []
    for part in [*inner, *([type_.elementType] if isinstance(type_, ArrayType) else [])]:
        _check_type(part, what)


def check_fields(schema: StructType, what: str) -> None:
    """Raises SchemaError where a struct in a column has two fields of one name, which Spark does not give to Arrow."""
    for column in schema:
        twice = _twice_in(column.dataType)
        if twice is not None:
            raise SchemaError(
                f"{what}: column {column.name!r} has a struct with two fields named {twice!r}, which Spark does not give to "
                "Arrow: name them apart, as in named_struct('a', x, 'b', y) or CAST(it AS array<struct<a: int, b: int>>)"
            )


def _twice_in(type_: DataType) -> str | None:
    """Returns the name that two fields of a struct in a type have."""
    if isinstance(type_, StructType):
        names = type_.names
        twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
        inner: list[DataType] = [field.dataType for field in type_]
        return twice or next(filter(None, map(_twice_in, inner)), None)
    if isinstance(type_, ArrayType):
        return _twice_in(type_.elementType)
    if isinstance(type_, MapType):
        return _twice_in(type_.keyType) or _twice_in(type_.valueType)
    return None


def check_inputs(flow: BoundFlow, inputs: Any) -> GivenRows:
    """Returns the DataFrame of each source. Raises InvalidInputError or SchemaError where they are not what is
    declared.
    """
    sources = {stage.name: stage for stage in flow.sources}
    tables = {stage.table: name for name, stage in sources.items() if stage.table is not None}
    if not isinstance(inputs, Mapping):
        raise InvalidInputError(
            f"{type(inputs).__name__} was given where a DataFrame is expected for each source: "
            f"{{{', '.join(f'{stage.table or name!r}: ...' for name, stage in sources.items())}}}"
        )
    given: dict[str, Any] = {}
    in_words_of_users: set[str] = set()
    for name, frame in inputs.items():
        source = tables.get(name, name)
        if source not in sources or source in given:
            known = [stage.table or name for name, stage in sources.items()]
            what = "is given twice" if source in given else f"is not a source of {flow.name}"
            raise InvalidInputError(f"{name!r} {what}; sources: {', '.join(known)}{did_you_mean(name, known)}")
        given[source] = frame
        in_words_of_users |= {source} if name in tables else set()
    for name, stage in sources.items():
        if name not in given:
            shown = stage.table or name
            raise InvalidInputError(
                f"source {shown} has no input: pass {{{shown!r}: dataframe}} (an empty one for no rows)"
            )
    for name, frame in given.items():
        _check_input(sources[name], frame, is_table=name in in_words_of_users)
    return GivenRows(given, in_words_of_users)


def empty_inputs(spark: SparkSession, flow: BoundFlow, given: Any) -> Any:
    """Returns inputs with DataFrames of no rows for the sources of a flow that are not given."""
    if not isinstance(given, Mapping):
        return given  # which is told as for all inputs
    found = dict(given)
    # Those of a stream's batch belong to a session of the query's own, whose settings are those of the epoch.
    spark = next((frame.sparkSession for frame in given.values() if hasattr(frame, "sparkSession")), spark)
    for stage in flow.sources:
        if stage.name not in given and stage.table not in given:
            # Of a table, which Spark knows to be empty; of a list it does not.
            found[stage.name] = spark.createDataFrame(stage.schema.empty_table(), from_arrow_schema(stage.schema))
    return found


def _check_input(stage: BoundStage, frame: Any, *, is_table: bool) -> None:
    """Raises SchemaError, naming what differs, unless a DataFrame has the source's columns with its types. `is_table`: its
    rows are changes of a table as users say them.
    """
    if not hasattr(frame, "mapInArrow") or not hasattr(frame, "schema"):
        raise SchemaError(f"source {stage.name}: {type(frame).__name__} was given, expected a Spark DataFrame")
    if is_of_connect(frame):
        raise SchemaError(
            f"source {stage.name}: the DataFrame is one of Spark Connect, expected one of the session that the job was made with"
        )
    given = schema_with_change_type(frame.schema) if is_table else frame.schema
    mine = [f for f in given if f.name in stage.schema.names]  # others may be of any type, or for epoch= only
    for column in mine:
        _check_type(column.dataType, f"source {stage.name}: column {column.name!r}")
    check_fields(StructType(mine), f"source {stage.name}")
    found = plain(arrow_schema(StructType(mine)).empty_table()).schema
    for expected in stage.schema:
        index = found.get_field_index(expected.name)
        if index < 0:
            raise SchemaError(
                f"source {stage.name}: column {expected.name!r} is missing{_in_other_case(expected.name, given.names)}; "
                f"expected {describe(stage.schema)}, "
                f"found {', '.join(given.names)}"
            )
        if nullable(found.field(index).type) != nullable(expected.type):
            raise SchemaError(
                f"source {stage.name}: column {expected.name!r} is {found.field(index).type}, expected {expected.type}: cast it"
            )
