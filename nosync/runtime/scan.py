"""Parquet files, read by the tasks that record their rows: without the JVM, and without a shuffle.

Each shard's task reads all of an epoch's files and keeps the rows that belong to its shard. Arrow decodes a row many
times as fast as the JVM reads it, moves it to its shard and hands it over, so for few shards that is less work, even
though each does all of it. `nosync.spark.parquet_inputs` decides when.

Invariant: a task comes to the same rows, in the same order, as when the JVM reads them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from nosync.flow.bound_flow import BoundFlow
from nosync.flow.bound_stage import BoundStage, InputEdge
from nosync.flow.kinds import SOURCE
from nosync.flow.stage_options import JvmOptions
from nosync.kernels.expressions import Step, applied
from nosync.lsm.columnar.columns import Indices, as_array
from nosync.lsm.columnar.hashing import U32, hash32, key_groups_of
from nosync.lsm.errors import ScanError
from nosync.lsm.model.layer import Shard
from nosync.lsm.trace.change_feed import INSERT
from nosync.operators.canonical import canonical_order, hashed, is_hashed_alike
from nosync.runtime.fused_rows import edge_of, renamed

_ROWS_AT_ONCE = 1 << 17


def why_not_scanned(flow: BoundFlow) -> str | None:
    """Says why tasks cannot do all that the JVM does with rows of sources: hash them, place them, and evaluate
    expressions on the way to the next stage. None: they can.
    """
    for segment in flow.segments.values():
        for source in (flow.stages[name] for name in segment.stages if flow.stages[name].kind == SOURCE):
            for column in source.schema:
                if not is_hashed_alike([column.type]):
                    return f"source {source.name}: column {column.name!r} is {column.type}"
            edge = edge_of(source, segment.edges) if segment.fused else None
            for name in edge.jvm if edge is not None else ():
                if flow.stages[name].options_as(JvmOptions).step is None:
                    return f"stage {name}: its expressions are not all of a kind that tasks evaluate"
            if edge is None and not source.is_placed_by_columns:
                return f"source {source.name}: its rows are placed by an expression, and nothing here computes it"
    return None


class ParquetFile(NamedTuple):
    """A file as the driver saw it. Tasks that find another one there do not go on: each has to read the same."""

    path: str
    inode: int
    size_bytes: int
    modified_ns: int

    @classmethod
    def at(cls, path: str) -> ParquetFile:
        """Raises OSError where it cannot be looked at."""
        found = os.stat(path)
        return cls(path, found.st_ino, found.st_size, found.st_mtime_ns)

    def open(self) -> pq.ParquetFile:
        """Raises OSError or pa.ArrowException."""
        # Spark's own timestamps are 96 bits wide, and Arrow's nanoseconds end in the year 2262.
        return pq.ParquetFile(self.path, coerce_int96_timestamp_unit="us")


class SourceFiles(NamedTuple):
    """The files that a source's rows are in."""

    files: tuple[ParquetFile, ...]
    columns: tuple[str | None, ...]
    """Which column of the files each of the source's is. None: none is, as of a table's changes that are all insertions."""

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


@dataclass(frozen=True)
class Scan:
    """Says what the tasks of a segment read."""

    files: Mapping[str, SourceFiles]
    """The files of each source."""
    key_groups: int

    def rows(
        self, shard: Shard, sources: Sequence[BoundStage], edges: Sequence[InputEdge], stages: Mapping[str, BoundStage]
    ) -> tuple[list[pa.Table], dict[int, pa.Table]]:
        """Returns the rows of a shard, as `nosync.runtime.fused_rows.split` returns them.

        Raises ScanError where a file cannot be read, or an expression not be evaluated, as the driver thought.
        """
        given, fed = [], {}
        try:
            for source in sources:
                edge = edge_of(source, edges)
                steps = [] if edge is None else steps_of(edge.jvm, stages)
                mine = self._mine(Placing(source, edge, steps, self.key_groups), shard)
                # In one chunk, of which take() is quicker.
                rows = pa.concat_tables([source.schema.empty_table(), *mine]).combine_chunks()
                rows = hashed(rows, source.schema.names, sent=rows)
                rows = rows.take(pa.array(canonical_order(rows)))
                given.append(rows)
                if edge is not None:
                    made, _ = results_of(edge.jvm, steps, rows)
                    schema = stages[edge.jvm[-1]].rows_schema
                    made = renamed(made, schema, schema.names)
                    fed[edges.index(edge)] = hashed(made, edge.key, sent=made) if edge.key else made
        except (OSError, pa.ArrowException) as error:
            raise ScanError(f"a source's rows cannot be read here: {type(error).__name__}: {error}") from error
        return given, fed

    def _mine(self, placing: Placing, shard: Shard) -> list[pa.Table]:
        """Returns the rows of a source that belong to a shard."""
        source = placing.source
        return [placing.of_shard(part, shard) for part in parts_of(self.files[source.name], source.schema)]


@dataclass(frozen=True)
class TableScan(Scan):
    """Says what one shard's task takes from tables, as if it read files."""

    tables: Mapping[str, pa.Table]
    """The rows of each source that belong to the shard."""

    def _mine(self, placing: Placing, shard: Shard) -> list[pa.Table]:
        return [self.tables[placing.source.name]]


def tables_by_shard(
    tables: Mapping[str, pa.Table],
    sources: Sequence[BoundStage],
    edges: Sequence[InputEdge],
    stages: Mapping[str, BoundStage],
    shards: int,
    key_groups: int,
) -> list[dict[str, pa.Table]]:
    """Returns the rows of some sources, by the shard that they belong to.

    Raises ScanError where an expression that places them cannot be evaluated.
    """
    found: list[dict[str, pa.Table]] = [{} for _ in range(shards)]
    for source in sources:
        edge = edge_of(source, edges)
        placing = Placing(source, edge, [] if edge is None else steps_of(edge.jvm, stages), key_groups)
        rows = renamed(tables[source.name], source.schema, source.schema.names)
        for mine, of_shard in zip(found, placing.by_shard(rows, shards), strict=True):
            mine[source.name] = of_shard
    return found


def read_few(files: SourceFiles, schema: pa.Schema, most_rows: int, most_bytes: int) -> pa.Table | None:
    """Returns the rows of files; None where they are more than `most_rows`, or have more than `most_bytes` in memory.

    Raises ScanError where they cannot be read, or are not those any more that were looked at.
    """
    parts, rows, size_bytes = [schema.empty_table()], 0, 0
    try:
        for part in parts_of(files, schema):
            parts.append(part)
            rows, size_bytes = rows + part.num_rows, size_bytes + part.nbytes
            if rows > most_rows or size_bytes > most_bytes:
                return None
    except (OSError, pa.ArrowException) as error:
        raise ScanError(f"a source's rows cannot be read here: {type(error).__name__}: {error}") from error
    return pa.concat_tables(parts)


def steps_of(by: Sequence[str], stages: Mapping[str, BoundStage]) -> list[Step]:
    """Returns what the expressions of some stages do with rows, one after the other."""
    steps = []
    for name in by:
        step = stages[name].options_as(JvmOptions).step
        assert step is not None, f"stage {name}: its expressions are of a kind that tasks evaluate"
        steps.append(step)
    return steps


def results_of(by: Sequence[str], steps: Sequence[Step], rows: pa.Table) -> tuple[pa.Table, Indices]:
    """Returns what the expressions of some stages make of rows, and the numbers of those that pass. Raises ScanError where
    they cannot be evaluated here.
    """
    try:
        return applied(steps, rows)
    except pa.ArrowException as error:
        stages = ", ".join(by)
        raise ScanError(f"stage {stages}: its expressions cannot be evaluated here: {error}", stage=stages) from error


def parts_of(files: SourceFiles, schema: pa.Schema) -> Iterator[pa.Table]:
    """Yields the rows of the files, some at a time: most of them are other shards', and need not stay in memory.

    Raises OSError, pa.ArrowException and ScanError.
    """
    read = [name for name in files.columns if name is not None]
    names = [own if name is None else name for own, name in zip(schema.names, files.columns, strict=True)]
    inserted = [own for own, name in zip(schema.names, files.columns, strict=True) if name is None]
    for file in files.files:
        with file.open() as parquet:
            # A task has one core.
            for batch in parquet.iter_batches(_ROWS_AT_ONCE, columns=read, use_threads=False):
                rows = pa.Table.from_batches([batch])
                for own in inserted:
                    rows = rows.append_column(own, pa.repeat(INSERT, rows.num_rows))
                yield renamed(rows, schema, names)
        if ParquetFile.at(file.path) != file:
            raise ScanError(f"{file.path} is not the file any more that it was when the epoch began")


@dataclass(frozen=True)
class Placing:
    """Finds the shards that a source's rows get to: see `BoundStage.placed_by`."""

    source: BoundStage
    edge: InputEdge | None
    steps: Sequence[Step]
    key_groups: int

    def of_shard(self, rows: pa.Table, shard: Shard) -> pa.Table:
        """Returns the rows that get to one shard."""
        return self.by_shard(rows, shard.count, only=shard.index)[0]

    def by_shard(self, rows: pa.Table, shards: int, only: int | None = None) -> list[pa.Table]:
        """Returns the rows that get to each shard. `only`: to this one."""
        if shards == 1:
            return [rows]
        groups = key_groups_of(self._hashes(rows), self.key_groups)
        wanted = [Shard(i, shards).groups(self.key_groups) for i in (range(shards) if only is None else [only])]
        return [rows.filter(pa.array((groups >= of.start) & (groups < of.stop))) for of in wanted]

    def _hashes(self, rows: pa.Table) -> U32:
        names = self.source.schema.names
        if self.source.is_placed_by_columns:
            return hashes_of(rows, self.source.placed_by or names)
        assert self.edge is not None, "by what expressions make, which come by an edge"
        made, numbers = results_of(self.edge.jvm, self.steps, rows)
        found: U32 = np.empty(rows.num_rows, dtype=np.uint32)
        is_out: npt.NDArray[np.bool_] = np.ones(rows.num_rows, dtype=np.bool_)
        is_out[numbers] = False
        found[numbers] = hashes_of(made, self.edge.key)
        found[is_out] = hashes_of(rows.filter(pa.array(is_out)), names)
        return found


def hashes_of(rows: pa.Table, names: Sequence[str]) -> U32:
    """Returns the hash of each row's columns of these names, by which rows get to shards."""
    return hash32([as_array(rows.column(name)) for name in names])
