"""Tasks of one segment at one epoch: what they are to do, and the form of the rows that go between them.

`nosync.runtime.shard_run` does it, for one shard. Nothing here knows of Spark.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field

import pyarrow as pa

from nosync.flow.bound_flow import BoundFlow
from nosync.flow.bound_stage import BoundStage, InputEdge, SegmentOutput
from nosync.flow.internal_columns import REPORT_COLUMN, TAG_COLUMN
from nosync.flow.kinds import LOOP, SOURCE
from nosync.kernels.windows import END, START, window_type
from nosync.lsm.errors import HoleError
from nosync.lsm.facts.fencing import Instance
from nosync.lsm.model.history import History
from nosync.lsm.model.layer import Digest
from nosync.replication.client.location import StoreLocation
from nosync.runtime.edge_scan import EdgeScan
from nosync.runtime.scan import Scan

TAG_SHARD_BITS = 40
"""A tag has the shard above so many bits, and the row's position below."""
TAG_INPUT_BITS = 33
"""Where rows say by which input they came, a tag has its number above so many bits, below the shard."""
MARK = b"all-from:"
"""A report that begins so says: these were all rows of a shard."""
REPORT_SCHEMA = pa.schema([pa.field(REPORT_COLUMN, pa.binary())])


@dataclass(frozen=True)
class Report:
    """Says what a task did with one layer. It travels to the driver as a row beside the data."""

    stage: str
    shard: int
    t: int
    computed: bool
    """False: it was recorded already."""
    rows: int = 0
    changes: int = 0
    """How many rows entered and left the set, for a loop's variable."""
    size_bytes: int = 0
    digest: str = ""
    """The digest of the layer's own file; empty where a merged one stands for it."""
    record_s: float = 0.0
    """Seconds spent writing and linking the layer."""
    oldest_us: int | None = None
    newest_us: int | None = None
    """The event times of the rows that came to it, of all shards. They are None but for a window that had some."""

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Report:
        return cls(**json.loads(text))


def emitted_schema(stage: BoundStage, output: SegmentOutput) -> pa.Schema:
    """Returns the schema of rows that leave a segment: the stage's output, its windows and change type if any, tag and
    report.
    """
    return pa.schema(
        [*_rows_schema(stage, output), pa.field(TAG_COLUMN, pa.int64()), pa.field(REPORT_COLUMN, pa.binary())]
    )


def edge_schema(stages: Mapping[str, BoundStage], edge: InputEdge) -> pa.Schema:
    """Returns the columns of an edge's rows, without tag, report and hash."""
    stage = stages[edge.jvm[-1]] if edge.jvm else stages[edge.output.stage]
    return _rows_schema(stage, SegmentOutput(stage.name, edge.output.window))


def _rows_schema(stage: BoundStage, output: SegmentOutput) -> pa.Schema:
    if output.window is None or not output.window.expands:
        return stage.rows_schema
    type_ = window_type(stage.output.field(output.window.time).type)
    return pa.schema([*stage.rows_schema, pa.field(START, type_), pa.field(END, type_)])


def side_column(index: int, name: str) -> str:
    """Returns the name of a column of edge `index` where the rows of several edges come together."""
    return f"_{index}_{name}"


@dataclass(frozen=True)
class SegmentTask:
    """One epoch's work on one segment, for every shard. Pickled to Spark's workers."""

    location: StoreLocation
    t: int
    shards: int
    stages: Mapping[str, BoundStage]
    """The stages to run, in order, and those that feed them."""
    run: tuple[str, ...]
    edges: tuple[InputEdge, ...] = ()
    output: SegmentOutput | None = None
    """The output that leaves the segment; None: only reports do."""
    histories: Mapping[str, History] = field(default_factory=dict)
    """The history of each stage says where its layers are; a stage that is new at this epoch has none."""
    compute: Mapping[str, frozenset[int]] | None = None
    """The shards of each stage that may be computed; None: all. Recovery computes only what it planned."""
    input_given: bool = True
    """Says whether the rows of a source at the head are there; if not, its layer must be recorded."""
    round: int | None = None
    """The round of a loop; None: the whole epoch."""
    rounds: int = 0
    """How many rounds a loop took that is done; they become the epoch's layers."""
    phase: str = ""
    fused: bool = False
    """See `nosync.flow.bound_stage.Segment`."""
    scan: Scan | None = None
    """The files of its sources that the task reads itself; None: their rows come."""
    edge_scans: tuple[EdgeScan, ...] | None = None
    """How the task makes the rows of its edges of files that it reads itself; None: they come."""
    emits: bool = True
    """Says whether anybody wants the rows that leave the segment at this epoch."""
    absent: frozenset[int] = frozenset()
    """Feeds that bring nothing: from outside the loop after its first round."""
    recorded: frozenset[str] = frozenset()
    """Stages all of whose layers are recorded, on this host or on others."""
    timeline: str = "main"
    instance: Instance | None = None
    """The instance of the job; one that was replaced publishes nothing."""
    sealed: Mapping[tuple[str, int], Digest] = field(default_factory=dict)
    """The digests, by (stage, shard), that the epoch's manifest lists: nothing else is published under these names."""

    def edge_of(self, stage: str, input: str) -> int | None:
        """Returns the edge that an input comes by; None where it is computed in this segment."""
        expressed = next((i for i, f in enumerate(self.edges) if f.jvm and f.jvm[-1] == stage), None)
        if expressed is not None:
            return expressed
        if input in self.run and self.stages[stage].kind != LOOP:
            return None
        key = self.stages[stage].edge_key
        found = next((i for i, f in enumerate(self.edges) if (f.input, f.key) == (input, key)), None)
        if found is None:
            raise HoleError(
                f"stage {stage} timestamp {self.t}: its layer is recorded and not here; recover() computes it again",
                stage=stage, shard="", lower=str(self.t), upper=str(self.t + 1),
            )  # fmt: skip
        return found

    @property
    def sources(self) -> list[BoundStage]:
        """Returns the sources whose rows come, in order. A fused segment has several."""
        return [self.stages[name] for name in self.run if self.stages[name].kind == SOURCE]


def event_span(reports: Collection[Report]) -> tuple[int, int] | None:
    """Returns the oldest and the newest event time of an epoch, as its windows saw them; None where none did."""
    oldest = min((report.oldest_us for report in reports if report.oldest_us is not None), default=None)
    newest = max((report.newest_us for report in reports if report.newest_us is not None), default=None)
    return None if oldest is None or newest is None else (oldest, newest)


@dataclass(frozen=True)
class SourceSize:
    """Says how much the sources recorded in an epoch."""

    rows: int
    size_bytes: int

    @classmethod
    def of(cls, reports: Mapping[tuple[str, int], Report], flow: BoundFlow) -> SourceSize:
        """Returns what reports say of a flow's sources."""
        sources = {stage.name for stage in flow.sources}
        found = [report for (stage, _), report in reports.items() if stage in sources]
        return cls(sum(report.rows for report in found), sum(report.size_bytes for report in found))
