"""The work of one shard on one segment at one epoch. Runs in a Spark task, but knows nothing of Spark.

Invariants
- A layer that is recorded is yielded, not computed again; so retries, speculative copies and recovery are one thing.
- A function sees its input in canonical order, whatever order it was delivered in: equal inputs, equal layers.
- A stage's changes are yielded only after its layer is published.

Steps
1. Bring the rows into canonical order: those of a source by content, others by the tag they got before the shuffle.
2. For each stage of the segment: recorded -> read its changes back; else compute, publish, derive its changes.
3. Yield the last stage's changes, each row tagged (shard, position), a report of every layer, and to every shard of the
   next segment a mark that says "these were all of mine": a keyed stage computes only with the marks of all shards.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nosync.dataflow import AGGREGATE, MAP, SOURCE
from nosync.lsm.columns import CHANGE_TYPE_COLUMN
from nosync.lsm.directory import LayerDirectory
from nosync.lsm.layer import Description, LayerId, Shard, TraceId
from nosync.lsm.timestamp import Time, end_of, last_of, pack
from nosync.lsm.trace import Trace
from nosync.operators import (
    HASH64_COLUMN,
    Produced,
    State,
    apply_aggregate,
    apply_filter,
    apply_map,
    apply_update,
    changes_of,
    nothing_happened,
    source,
    stage_error,
)
from nosync.plan import BoundStage

TAG_COLUMN = "_tag"
REPORT_COLUMN = "_report"
_TAG_SHARD_BITS = 40
_MARK = b"all-from:"

_directories: dict[tuple[str, int], LayerDirectory] = {}


def directory_of(root: str, key_groups: int) -> LayerDirectory:
    """This process's view of a data directory. It and the layers it has mapped live as long as the process."""
    found = _directories.get((root, key_groups))
    if found is None:
        found = _directories[root, key_groups] = LayerDirectory(Path(root), key_groups)
    return found


@dataclass(frozen=True)
class Report:
    """What a task says of one layer. Travels to the driver as a row beside the data."""

    stage: str
    shard: int
    computed: bool
    """False: it was recorded already."""
    rows: int = 0
    size_bytes: int = 0
    record_s: float = 0.0
    """Seconds spent writing and linking the layer."""

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Report:
        return cls(**json.loads(text))


def emitted_schema(stage: BoundStage) -> pa.Schema:
    """The rows that leave a segment: the stage's output, its change type if it has one, tag and report."""
    fields = list(stage.output)
    if stage.changing:
        fields.append(pa.field(CHANGE_TYPE_COLUMN, pa.string()))
    return pa.schema([*fields, pa.field(TAG_COLUMN, pa.int64()), pa.field(REPORT_COLUMN, pa.binary())])


REPORT_SCHEMA = pa.schema([pa.field(REPORT_COLUMN, pa.binary())])


@dataclass(frozen=True)
class SegmentTask:
    """One epoch's work on one segment, for every shard. Pickled to Spark's workers."""

    root: str
    key_groups: int
    t: int
    shards: int
    path: tuple[BoundStage, ...]
    """From the segment's head to the stage whose rows leave it."""
    emit: bool
    """Whether the last stage's rows go on to another segment; if not, only reports leave."""
    origins: dict[str, int] = field(default_factory=dict)
    """By stage, where its traces begin (packed); a stage that is new at this epoch has none."""
    compute: dict[str, frozenset[int]] | None = None
    """By stage, the shards that may be computed; None: all. Recovery computes only what it planned."""
    input_given: bool = True
    """Whether the rows of the source at the head are there; if not, its layer must be recorded."""

    def run_shard(self, index: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Raises StageError, DeterminismError, HoleError, CorruptionError or StorageError; then nothing was yielded."""
        return _ShardRun(self, Shard(index, self.shards)).run(list(batches))


class _ShardRun:
    def __init__(self, task: SegmentTask, shard: Shard) -> None:
        self._task = task
        self._shard = shard
        self._directory = directory_of(task.root, task.key_groups)
        self._reports: list[bytes] = []
        self._heard_from: set[int] = set()

    def run(self, batches: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        path, last = self._task.path, self._task.path[-1]
        rows = self._receive(batches)
        for stage in path:
            rows = self._stage(stage, rows, wanted=self._task.emit or stage is not last)
        reports = pa.array(self._reports, pa.binary())
        if not self._task.emit:
            yield pa.RecordBatch.from_arrays([reports], schema=REPORT_SCHEMA)
            return
        schema = emitted_schema(last)
        targets = [0] * len(reports)
        if rows is not None:
            mark = _MARK + str(self._shard.index).encode()
            reports = pa.concat_arrays([reports, pa.array([mark] * self._task.shards, pa.binary())])
            targets += range(self._task.shards)
            if rows.num_rows:
                tags = np.arange(rows.num_rows, dtype=np.int64) + (self._shard.index << _TAG_SHARD_BITS)
                columns = [*rows.columns, pa.array(tags), pa.nulls(rows.num_rows, pa.binary())]
                yield from pa.Table.from_arrays(columns, schema=schema).combine_chunks().to_batches()
        blank = [pa.nulls(len(reports), f.type) for f in list(schema)[:-2]]
        yield pa.RecordBatch.from_arrays([*blank, pa.array(targets, pa.int64()), reports], schema=schema)

    def _receive(self, batches: list[pa.RecordBatch]) -> pa.Table | None:
        """Step 1. Keeps the reports that came with the rows. None where there are no rows."""
        rows = pa.Table.from_batches(batches) if batches else None
        if rows is None or REPORT_COLUMN not in rows.column_names:
            return rows  # a source's; the operator orders them
        reports = rows.column(REPORT_COLUMN)
        for report in reports.drop_null().to_pylist():
            if report.startswith(_MARK):
                self._heard_from.add(int(report[len(_MARK) :]))
            else:
                self._reports.append(report)
        rows = rows.filter(pc.is_null(reports)).drop_columns([REPORT_COLUMN])
        order = np.argsort(rows.column(TAG_COLUMN).to_numpy(), kind="stable")
        return rows.drop_columns([TAG_COLUMN]).take(pa.array(order)) if len(order) else None

    def _stage(self, stage: BoundStage, rows: pa.Table | None, *, wanted: bool) -> pa.Table | None:
        """Step 2 for one stage. None where its changes are not wanted, or it is neither recorded nor to be computed."""
        id = LayerId(TraceId(stage.name, stage.fingerprint, self._shard), Description.of_epoch(self._task.t))
        if self._recorded(id) and not self._must_compare(stage, id):
            self._reports.append(Report(stage.name, self._shard.index, computed=False).to_json())
            return self._recorded_changes(stage, id) if wanted else None
        if self._task.compute is not None and self._shard.index not in self._task.compute.get(stage.name, ()):
            return None
        produced = self._compute(stage, id, rows)
        self._publish(stage, id, produced)
        return changes_of(produced, stage, self._task.t) if wanted else None

    def _recorded(self, id: LayerId) -> bool:
        d = id.description
        return any(o.lower <= d.lower and d.upper <= o.upper for o in self._directory.descriptions(id.trace))

    def _must_compare(self, stage: BoundStage, id: LayerId) -> bool:
        """A source that is given its rows again publishes them again: other rows for a recorded epoch are an error."""
        return stage.kind == SOURCE and self._task.input_given and self._directory.path_of(id).exists()

    def _recorded_changes(self, stage: BoundStage, id: LayerId) -> pa.Table:
        """The changes of a recorded layer, row for row as they were when it was computed."""
        before = Time(pack(self._task.t) - 1)
        trace = self._trace(stage, id.trace, until=end_of(self._task.t), as_of=before)
        changes = trace.changes(before, last_of(self._task.t))
        return changes.select([*stage.output.names, *([CHANGE_TYPE_COLUMN] if stage.changing else [])])

    def _trace(self, stage: BoundStage, id: TraceId, *, until: Time, as_of: Time) -> Trace:
        # A stage that begins at this epoch has nothing before it.
        origin = Time(self._task.origins.get(stage.name, pack(self._task.t)))
        return self._directory.trace(id, until=until, as_of=as_of, origin=origin)

    def _compute(self, stage: BoundStage, id: LayerId, rows: pa.Table | None) -> Produced:
        if not stage.keyed:
            if stage.kind == SOURCE:
                hashed = stage.schema.append(pa.field(HASH64_COLUMN, pa.int64()))
                return source(stage, id, hashed.empty_table() if rows is None else rows)
            assert rows is not None, "the planner asks for a stateless stage only with its input"
            return apply_map(stage, id, rows) if stage.kind == MAP else apply_filter(stage, id, rows)
        silent = set(range(self._task.shards)) - self._heard_from
        if silent:
            raise stage_error(
                id, f"shards {sorted(silent)} of its input {stage.input} sent nothing; nothing is computed from a part"
            )
        if rows is None or not rows.num_rows:
            return nothing_happened(stage, id)
        before = Time(pack(self._task.t) - 1)
        state = State(self._trace(stage, id.trace, until=pack(self._task.t), as_of=before), stage, before)
        return (apply_aggregate if stage.kind == AGGREGATE else apply_update)(stage, id, rows, state)

    def _publish(self, stage: BoundStage, id: LayerId, produced: Produced) -> None:
        started = time.perf_counter()
        published = self._directory.publish(id, produced.layer)
        took = time.perf_counter() - started
        self._reports.append(
            Report(
                stage.name, self._shard.index, not published.existed, published.rows, published.size_bytes, took
            ).to_json()
        )
