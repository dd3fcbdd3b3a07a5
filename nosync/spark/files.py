"""Which epochs' inputs tasks read themselves (nosync.scan): Parquet files of a local file system, as they are.

A DataFrame counts that is nothing but such files, `spark.read.schema(...).parquet(path)`, where the source's columns are in the
files under their names and with their types. All else is read by the JVM: other formats and file systems, partitions in the names
of directories, rows that expressions change, what Spark would cast or rebase, and what it has cached.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa
from pyspark.sql import DataFrame

from nosync.dataflow import SOURCE
from nosync.fusing import feed_of
from nosync.lsm.hashing import is_quick
from nosync.plan import BoundFlow
from nosync.scan import ParquetFile

MOST_SHARDS = 16
"""Each reads all: with more of them that would be more work than what it saves."""
MOST_BYTES = 256 << 20
"""Of all files' columns, not compressed."""
MOST_FILES = 16
_FILES_ALONE = re.compile(r"Relation \[[^\n]*\] parquet\s*")
"""The text of a plan."""
_PARTITION = re.compile(r"/[^/=]+=")
_REBASE_MODE = "datetimeRebaseMode"
_REBASED_BY_DEFAULT = "spark.sql.parquet.datetimeRebaseModeInRead"
_WRITTEN_BY_SPARK = b"org.apache.spark.version"
_WRITTEN_REBASED = (b"org.apache.spark.legacyDateTime", b"org.apache.spark.legacyINT96")
_VERSION = re.compile(rb"(\d+)\.(\d+)")
_FIRST_WITH_ONE_CALENDAR = (3, 1)
"""Of Spark, for all of its types."""
_WIDE_TIME = pa.timestamp("us", "UTC")
"""What Spark takes timestamps of 96 bits for."""
_FIELD_ID = "parquet.field.id"


def files_to_scan(flow: BoundFlow, shards: int, inputs: Mapping[str, DataFrame]) -> dict[str, list[ParquetFile]] | None:
    """By source its files. None where the JVM is to read them."""
    if shards > MOST_SHARDS or not all(source.name in inputs for source in flow.sources):
        return None
    if not _are_evaluated_in_tasks(flow):
        return None
    found: dict[str, list[ParquetFile]] = {}
    size_bytes = 0
    for source in flow.sources:
        frame = inputs[source.name]
        files = _files_of(frame)
        if files is None:
            return None
        is_rebased = _is_rebased(frame) if any(map(pa.types.is_temporal, source.schema.types)) else None
        for file in files:
            in_file = _size_bytes(file, source.schema, is_rebased=is_rebased)
            if in_file is None:
                return None
            size_bytes += in_file
        found[source.name] = files
    return found if size_bytes <= MOST_BYTES else None


def _are_evaluated_in_tasks(flow: BoundFlow) -> bool:
    """Whether tasks can do all that the JVM does with a source's rows: to hash them, and what expressions make of them."""
    for segment in flow.segments.values():
        for source in (flow.stages[name] for name in segment.stages if flow.stages[name].kind == SOURCE):
            if not all(_is_hashed(type_) for type_ in source.schema.types):
                return False
            feed = feed_of(source, segment.feeds) if segment.fused else None
            if feed is not None and any(flow.stages[name].options.get("step") is None for name in feed.jvm):
                return False
            if feed is None and not {*source.placed_by} <= {*source.schema.names}:
                return False
    return True


def _is_hashed(type_: pa.DataType) -> bool:
    """Whether tasks hash it as Spark does: not arrays, structs, intervals."""
    t = pa.types
    return is_quick([type_]) or any(is_one(type_) for is_one in (t.is_string, t.is_binary, t.is_decimal128))


def _files_of(frame: DataFrame) -> list[ParquetFile] | None:
    # Not the analyzed plan: what Spark has cached is not read again.
    plan: Any = frame._jdf.queryExecution().withCachedData()
    if not _FILES_ALONE.fullmatch(plan.toString()):
        return None
    listed = plan.relation().location().inputFiles()
    if len(listed) > MOST_FILES or any(_FIELD_ID in column.metadata for column in frame.schema):
        return None
    files = []
    for text in listed:
        uri = urlsplit(text)
        path = unquote(uri.path)
        if uri.scheme != "file" or uri.netloc or _PARTITION.search(path.rpartition("/")[0]):
            return None
        try:
            files.append(ParquetFile.at(path))
        except OSError:
            return None
    return files


def _is_rebased(frame: DataFrame) -> bool:
    """Whether Spark may take dates and timestamps of files that it did not write for those of the Julian calendar."""
    options: str = frame._jdf.queryExecution().analyzed().relation().options().toString()
    by_default = str(frame.sparkSession.conf.get(_REBASED_BY_DEFAULT)).upper()
    return _REBASE_MODE.lower() in options.lower() or by_default != "CORRECTED"


def _size_bytes(file: ParquetFile, schema: pa.Schema, *, is_rebased: bool | None) -> int | None:
    """None where the columns are not in the file as the schema has them. `is_rebased`: None where there is nothing to rebase."""
    try:
        with file.open() as parquet:
            found, columns, metadata = parquet.schema_arrow, parquet.schema, parquet.metadata
    except (OSError, pa.ArrowException):
        return None  # the JVM says what is wrong with it
    wide = {c.path for c in (columns.column(i) for i in range(len(columns))) if c.physical_type == "INT96"}
    for field in schema:
        same = [name for name in found.names if name.lower() == field.name.lower()]
        stands_for = (
            _WIDE_TIME if field.name in wide else found.field(field.name).type if same == [field.name] else None
        )
        if same != [field.name] or stands_for != field.type:
            return None
    version = _spark_version(metadata.metadata or {})
    if wide.intersection(schema.names) and (version is None or version < _FIRST_WITH_ONE_CALENDAR):
        return None  # what others mean by them, a setting says
    if is_rebased is not None and (is_rebased or (version is not None and version < _FIRST_WITH_ONE_CALENDAR)):
        return None
    size_bytes: int = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    return size_bytes


def _spark_version(written: Mapping[bytes, bytes]) -> tuple[int, int] | None:
    """Of Spark, where it wrote the file. One that wrote it in the calendar of Spark 2 counts as that."""
    text = written.get(_WRITTEN_BY_SPARK)
    if text is None:
        return None
    numbers = _VERSION.match(text)
    is_old = numbers is None or any(name in written for name in _WRITTEN_REBASED)
    return (0, 0) if is_old or numbers is None else (int(numbers[1]), int(numbers[2]))
