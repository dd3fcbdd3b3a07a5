"""A stage resolved against schemas, and how stages are put together into tasks. Pure; no Spark, no data.

A *segment* is a set of stages that work on the same shard of the same rows, so they run in one task: a source, or the
stages of a keyed operator, and the stateless stages after it. Between segments rows move along *edges*: to the
shard of a key, or, after expressions that the JVM evaluates, within their shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import pyarrow as pa

from nosync.flow.event_time import INPUT_FIELD
from nosync.flow.kinds import IN_JVM, PART_SEPARATOR
from nosync.flow.persistence import NONE, Level
from nosync.flow.stage_options import NO_OPTIONS, StageOptions, TableOptions, UpdateOptions
from nosync.kernels.aggregate_plan import Plan
from nosync.kernels.windows import Window
from nosync.lsm.columnar.columns import CHANGE_TYPE_COLUMN

ARRANGE, WATERMARK, LATE, DISTINCT = "arrange", "watermark", "late", "distinct"
FINAL, SEEN, FIRST = "final", "seen", "first"
INTERVAL_SIDE, INTERVAL_JOIN = "interval_side", "interval_join"
TIMED_UPDATE, OUTPUT = "timed_update", "output"
"""Kinds of the stages that joins, windows and dedupe are made of; the others are those of nosync.flow.kinds."""

Options = TypeVar("Options", bound=StageOptions)


def declared_of(stage: str) -> str:
    """Returns the name of the stage that users declared, of which a stage may be a part."""
    return stage.partition(PART_SEPARATOR)[0]


def part_of(stage: str, part: str) -> str:
    """Returns a part of an operator, such as the watermark of a window, given the operator or any of its parts."""
    return declared_of(stage) + PART_SEPARATOR + part


@dataclass(frozen=True)
class BoundStage:
    """A stage with its schemas and fingerprint."""

    name: str
    kind: str
    fingerprint: str
    inputs: tuple[str, ...]
    key: tuple[str, ...]
    """The columns by which its layers are sorted and looked up. A log has none."""
    function: Callable[..., object] | None = field(repr=False)
    schema: pa.Schema
    """The columns that its layers hold."""
    output: pa.Schema
    """The columns that consumers and readers see, which are those of `schema` without internal ones."""
    changing: bool
    """Says whether its output rows can be updated or deleted later (then they carry `_change_type`)."""
    level: Level
    expires: bool = field(default=False, kw_only=True)
    """Says whether its rows can expire: what is computed from them stays when they do."""
    plan: Plan | None = None
    window: Window | None = None
    deterministic: bool = True
    options: StageOptions = field(default=NO_OPTIONS, repr=False)
    """The options that its kind has beside (see `stage_options`)."""
    edge_key: tuple[str, ...] = ()
    """The key of the edges that its input comes by: the hash of these columns says to which shard a row goes. It is
    empty if the rows stay in their shard.
    """
    bootstrap_at: int | None = None
    """The epoch with which the stage begins anew; None if it never does.

    That is the first epoch of the branch on which its code changed. It then takes all rows of its inputs that are
    there, because rows that came before may be taken back. From then on it holds what this code makes of them. Its
    layer of that epoch leads there from what the stage held before.
    """
    loop: str | None = None
    """The loop that it is a part of. A loop's variable has its own name here."""
    placed_by: tuple[str, ...] = ()
    """The columns whose hash says in which shard each of its rows is. It is empty if something else does.

    A source may also have `=` and an expression over its columns here, and at the end `?` and a condition: then only
    rows that fulfil it are placed so, and others by all of their columns.
    """
    placed_alike: bool = False
    """Says of a source that the rows of all epochs are known to lie where `placed_by` says. What places them depends on the
    stages that there are, and is no part of its fingerprint.
    """
    origins: tuple[str, ...] = ()
    """The inputs, each with a watermark of its own, by which its rows came. Each row says which (see `event_time`).

    It is empty if there is only one, or if no window after it wants to know.
    """

    unnamed: bool = field(default=False, kw_only=True)
    """Says of a source, or of an output of a function, that its fingerprint is without its name (see `Meanings`)."""
    beside: tuple[str, ...] = ()
    """Other stages of its segment whose state before the epoch it reads."""

    @property
    def is_placed_by_columns(self) -> bool:
        """Returns whether a source's rows are placed by columns that it has, and not by an expression. Where
        `placed_by` is empty these are all of its columns.
        """
        return {*self.placed_by} <= {*self.schema.names}

    @property
    def of_rounds(self) -> bool:
        """Returns whether it is recorded in rounds only. It comes of the loop's variable, and is dropped with the
        rounds.
        """
        return self.loop is not None and not self.keyed

    @property
    def given_once(self) -> bool:
        """Returns whether its rows are given once for ever, as a watermark goes on: what it gave stays, whatever code comes
        after.
        """
        by_watermark = self.window is not None and self.window.delay_us is not None
        return self.kind in (WATERMARK, FINAL, OUTPUT) or (self.kind == LATE and by_watermark)

    @property
    def keyed(self) -> bool:
        return bool(self.key)

    @property
    def recorded(self) -> bool:
        return self.level != NONE

    @property
    def in_jvm(self) -> bool:
        return self.kind in IN_JVM

    @property
    def ttl(self) -> int | None:
        """Returns the epochs without changes after which an update deletes a key. It is None for all other stages."""
        return self.options.ttl if isinstance(self.options, UpdateOptions) else None

    @property
    def table(self) -> str | None:
        """Returns the table whose changes a source has. It is None for all other stages."""
        return self.options.table if isinstance(self.options, TableOptions) else None

    def options_as(self, kind: type[Options]) -> Options:
        """Returns the options of a stage that is known to be of the kind that has such."""
        assert isinstance(self.options, kind), f"stage {self.name}, a {self.kind}, has no {kind.__name__}"
        return self.options

    @property
    def rows_schema(self) -> pa.Schema:
        """Returns the columns that its consumers are given: its output, and a change type where rows can change."""
        if self.changing:
            return pa.schema([*self.output, pa.field(CHANGE_TYPE_COLUMN, pa.string())])
        return self.output

    @property
    def carried(self) -> pa.Schema:
        """Returns the columns that go from stage to stage: `rows_schema`, and by which input each row came if that is
        known.
        """
        return pa.schema([*self.rows_schema, INPUT_FIELD]) if self.origins else self.rows_schema


@dataclass(frozen=True)
class SegmentOutput:
    """Describes rows of a stage that leave its segment. They are expanded to windows where the consumer is a window."""

    stage: str
    window: Window | None = None
    whole: bool = False
    """Says whether these are all rows that are there after the epoch, as insertions, and not what changed in it."""


@dataclass(frozen=True)
class InputEdge:
    """Describes rows that enter a segment."""

    input: str
    """The stage whose rows these are."""
    output: SegmentOutput
    """The output of another segment from which they come."""
    jvm: tuple[str, ...] = ()
    """Stages whose expressions the JVM evaluates on the way, in order."""
    key: tuple[str, ...] = ()
    """The columns whose hash says to which shard each row goes. It is empty if rows stay in their shard."""


@dataclass(frozen=True)
class Segment:
    """Stages that run in one task, in topological order, and the edges that their input comes by."""

    name: str
    stages: tuple[str, ...]
    edges: tuple[InputEdge, ...] = ()
    fused: bool = False
    """Says whether all that comes to it is from sources in it. The JVM then sends the sources' rows, and beside them
    what it makes of them for the edges.
    """


Evaluate = Callable[[BoundStage, pa.Table, Sequence[str]], pa.Table]
"""A function that evaluates a stage of expressions over rows. The named columns are kept beside its output."""
