"""Which epochs' inputs tasks read themselves (nosync.runtime.scan): Parquet files of a local file system, as they are.

A DataFrame counts that is nothing but such files, `spark.read.schema(...).parquet(path)`, or some of their columns, where
the source's columns are in the files under their names and with their types. A table's changes may be without
`_change_type`. All else is read by the JVM: other formats and file systems, partitions in the names of directories,
rows that expressions change, what Spark would cast or rebase, and what it has cached. The log says why, at DEBUG.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa
from pyspark.sql import DataFrame

from nosync.flow.bound_flow import BoundFlow
from nosync.flow.bound_stage import BoundStage
from nosync.flow.tables import GIVEN_CHANGE_TYPE
from nosync.lsm.columnar.columns import CHANGE_TYPE_COLUMN
from nosync.lsm.trace.change_feed import INSERT
from nosync.runtime.scan import ParquetFile, SourceFiles, why_not_scanned
from nosync.spark.given_rows import GivenRows

log = logging.getLogger("nosync")

MOST_READERS = 16
"""So many tasks may read all: with more of them that would be more work than what it saves."""
MOST_BYTES = 256 << 20
"""Of all files' columns, not compressed."""
MOST_FILES = 16
_FILES_ALONE = re.compile(r"Relation \[[^\n]*\] parquet\s*")
"""The text of a plan."""
_INDEX = "org.apache.spark.sql.execution.datasources.InMemoryFileIndex("
_FORMAT = "org.apache.spark.sql.execution.datasources.parquet.ParquetFileFormat"
_PARTITION = re.compile(r"/[^/=]+=")
_REBASE_MODE = "datetimeRebaseMode"
_REBASED_BY_DEFAULT = "spark.sql.parquet.datetimeRebaseModeInRead"
_WRITTEN_BY_SPARK = b"org.apache.spark.version"
_WRITTEN_REBASED = (b"org.apache.spark.legacyDateTime", b"org.apache.spark.legacyINT96")
_VERSION = re.compile(rb"(\d+)\.(\d+)")
_FIRST_WITH_ONE_CALENDAR = (3, 1)
"""Of Spark, for all of its types."""
_WRITER = "parquet-mr"
"""That Spark writes files with."""
_WIDE_TIME = pa.timestamp("us", "UTC")
"""What Spark takes timestamps of 96 bits for."""
_FIELD_ID = "parquet.field.id"


class _ByJvm(Exception):
    """Says why the JVM has to read a source's rows."""


def files_to_scan(flow: BoundFlow, shards: int, inputs: Mapping[str, DataFrame]) -> dict[str, SourceFiles]:
    """Returns the files of each source. It is empty where the JVM is to read them."""
    try:
        return _files_to_scan(flow, shards, inputs)
    except _ByJvm as reason:
        log.debug("flow %s: its input is read by the JVM: %s", flow.name, reason)
        return {}


def _files_to_scan(flow: BoundFlow, shards: int, inputs: Mapping[str, DataFrame]) -> dict[str, SourceFiles]:
    if shards > MOST_READERS:
        raise _ByJvm(f"each of {shards} shards would read all")
    reason = why_not_scanned(flow)
    if reason is not None:
        raise _ByJvm(reason)
    found: dict[str, SourceFiles] = {}
    size_bytes = 0
    for source in flow.sources:
        if source.name not in inputs:
            raise _ByJvm(f"source {source.name} is not given")
        frame, relation, change_type = _relation_of(inputs, source)
        named = (change_type if name == GIVEN_CHANGE_TYPE and source.table else name for name in source.schema.names)
        found[source.name] = files = SourceFiles(tuple(_files_of(frame, relation)), tuple(named))
        has_times = any(map(pa.types.is_temporal, source.schema.types))
        is_rebased = _is_rebased(frame, relation) if has_times else None
        size_bytes += sum(
            _size_bytes(file, source.schema, files.columns, is_rebased=is_rebased) for file in files.files
        )
    if size_bytes > MOST_BYTES:
        raise _ByJvm(f"it has {size_bytes:,} bytes")
    return found


def _relation_of(inputs: Mapping[str, DataFrame], source: BoundStage) -> tuple[DataFrame, Any, str | None]:
    """Returns the rows of a source, the relation of Spark's whose columns they are; and which column has the change types,
    where the source is a table's: None where all rows are insertions.
    """
    if isinstance(inputs, GivenRows) and not inputs.is_as_given(source.name):
        frame = inputs.as_given[source.name]
        return frame, _relation_in(_plan_of(frame)), inputs.change_type_in(source.name)
    frame = inputs[source.name]
    plan, change_type = _plan_of(frame), GIVEN_CHANGE_TYPE
    if source.table is None or not _is_projection(plan) or _selects(plan):
        return frame, _relation_in(plan), change_type
    renamed = plan.projectList().apply(frame.columns.index(GIVEN_CHANGE_TYPE))
    if plan.outputSet().size() - 1 > plan.outputSet().intersect(plan.child().outputSet()).size():
        raise _ByJvm("expressions change its rows")
    return frame, _relation_in(plan.child()), _change_type_of(renamed)


def _plan_of(frame: DataFrame) -> Any:
    # Not the analyzed plan: what Spark has cached is not read again.
    return frame._jdf.queryExecution().withCachedData()


def _relation_in(plan: Any) -> Any:
    """Returns the relation of a plan that does nothing but to leave columns of it out."""
    while _is_projection(plan) and _selects(plan):
        plan = plan.child()
    text: str = plan.toString()
    if not _FILES_ALONE.fullmatch(text):
        raise _ByJvm(f"it is not just Parquet files: {text.strip().splitlines()[0]}")
    return plan.relation()


def _is_projection(plan: Any) -> bool:
    return bool(plan.getClass().getSimpleName() == "Project")


def _selects(projection: Any) -> bool:
    """Returns whether it only leaves columns out."""
    return bool(projection.outputSet().subsetOf(projection.child().outputSet()))


def _change_type_of(expression: Any) -> str | None:
    """Returns the column that an expression for a table's change types is, or None for insertions. Raises _ByJvm for another
    one.
    """
    child = expression.child() if expression.getClass().getSimpleName() == "Alias" else expression
    kind = child.getClass().getSimpleName()
    if kind == "AttributeReference" and child.name() == CHANGE_TYPE_COLUMN:
        return CHANGE_TYPE_COLUMN
    if kind == "Literal" and child.toString() == INSERT:
        return None
    raise _ByJvm("expressions say what its changes are")


def _files_of(frame: DataFrame, relation: Any) -> list[ParquetFile]:
    location = relation.location()
    # Delta and others show as Parquet, too: but some rows of their files are deleted, and columns have other names there.
    if not (location.toString().startswith(_INDEX) and relation.fileFormat().getClass().getName() == _FORMAT):
        raise _ByJvm("its files belong to a table")
    listed = location.inputFiles()
    if len(listed) > MOST_FILES:
        raise _ByJvm(f"it is {len(listed)} files")
    if any(_FIELD_ID in column.metadata for column in frame.schema):
        raise _ByJvm("its columns are found by their ids")
    files = [_file_at(uri) for uri in listed]
    if sum(file.size_bytes for file in files) != location.sizeInBytes():
        raise _ByJvm("its files have changed since it was made, of which Spark reads as much as they had then")
    return files


def _file_at(uri: str) -> ParquetFile:
    parts = urlsplit(uri)
    path = unquote(parts.path)
    if parts.scheme != "file" or parts.netloc:
        raise _ByJvm(f"{uri} is not on a local file system")
    directory, _, name = path.rpartition("/")
    if _PARTITION.search(directory):
        raise _ByJvm(f"directories of {uri} may say what is in columns")
    if name.startswith(("_", ".")):
        raise _ByJvm(f"{uri} is listed, but not read")
    try:
        return ParquetFile.at(path)
    except OSError as error:
        raise _ByJvm(str(error)) from None


def _is_rebased(frame: DataFrame, relation: Any) -> bool:
    """Returns whether Spark may take dates and timestamps of files that it did not write for those of the Julian
    calendar.
    """
    options: str = relation.options().toString()
    by_default = str(frame.sparkSession.conf.get(_REBASED_BY_DEFAULT)).upper()
    return _REBASE_MODE.lower() in options.lower() or by_default != "CORRECTED"


def _size_bytes(file: ParquetFile, schema: pa.Schema, names: Sequence[str | None], *, is_rebased: bool | None) -> int:
    """Returns the size of a file. Raises _ByJvm where it does not have the columns of these names as the schema has them.
    `is_rebased`: None where there is nothing to rebase.
    """
    try:
        with file.open() as parquet:
            found, columns, metadata = parquet.schema_arrow, parquet.schema, parquet.metadata
    except (OSError, pa.ArrowException) as error:
        raise _ByJvm(str(error)) from None  # the JVM says what is wrong with it
    wide = {c.path for c in (columns.column(i) for i in range(len(columns))) if c.physical_type == "INT96"}
    types = {field.name: _WIDE_TIME if field.name in wide else field.type for field in found}
    lower = [name.lower() for name in found.names]
    for field, name in zip(schema, names, strict=True):
        if name is not None and (lower.count(name.lower()) != 1 or types.get(name) != field.type):
            raise _ByJvm(f"{file.path}: column {name!r} is {types.get(name)} there, and not {field.type}")
    if is_rebased is not None:
        version = _spark_version(metadata.metadata or {})
        if wide.intersection(names) and (version is None or not (metadata.created_by or "").startswith(_WRITER)):
            version = (0, 0)  # what others mean by times of 96 bits settings say
        if is_rebased or (version is not None and version < _FIRST_WITH_ONE_CALENDAR):
            raise _ByJvm(f"{file.path}: its dates or timestamps may be of another calendar")
    size_bytes: int = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    return size_bytes


def _spark_version(written: Mapping[bytes, bytes]) -> tuple[int, int] | None:
    """Returns the version of Spark that wrote the file; None where another program did. A file in the calendar of Spark
    2 counts as 0.0.
    """
    text = written.get(_WRITTEN_BY_SPARK)
    if text is None:
        return None
    numbers = _VERSION.match(text)
    is_old = numbers is None or any(name in written for name in _WRITTEN_REBASED)
    return (0, 0) if is_old or numbers is None else (int(numbers[1]), int(numbers[2]))
