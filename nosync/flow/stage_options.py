"""What some kinds of stage need to know beside what all stages have: the options of a bound stage. Pure data.

Fingerprints do not see these classes. What a fingerprint has of options is a text of its own (see `binder`), so fields
may get other names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa

if TYPE_CHECKING:  # commands that only look at a job know its stages, and start without what joins load
    from nosync.flow.bound_stage import BoundStage
    from nosync.kernels.asof_joins import AsofSpec
    from nosync.kernels.expressions import Step
    from nosync.kernels.interval_joins import IntervalSide, IntervalSpec
    from nosync.kernels.join_types import JoinSpec
    from nosync.kernels.windows import Window


@dataclass(frozen=True)
class StageOptions:
    """The options of a stage whose kind has none, such as a source, a map or an aggregate."""


NO_OPTIONS = StageOptions()


@dataclass(frozen=True)
class TableOptions(StageOptions):
    """The options of the source that has the changes of a table."""

    table: str
    """The name under which its rows are given."""


@dataclass(frozen=True)
class UnionOptions(StageOptions):
    """The options of a union whose rows say by which input they came (see `BoundStage.origins`)."""

    numbers: tuple[tuple[int, ...], ...]
    """For each stage that it unites it has the numbers that this stage's own inputs have in the union."""


@dataclass(frozen=True)
class UpdateOptions(StageOptions):
    """The options of an update."""

    ttl: int | None = None
    """A key without changes for this many epochs is deleted. None keeps all keys."""


@dataclass(frozen=True)
class WatermarkOptions(StageOptions):
    """The options of the part of a window that records its watermark."""

    inputs: tuple[str, ...] = ()
    """The inputs that have a watermark each: several of a window that goes by the minimum, all of a join. Else it is empty."""
    of_edges: tuple[str, ...] = ()
    """The input that each edge is, if there are several edges. Of one whose rows say their input it is not used."""
    delays_us: Mapping[str, int] = field(default_factory=dict)
    """The delay of each input, where these differ from each other."""
    times: tuple[Window, ...] = ()
    """The event time of each input's rows, if there are several inputs with columns of their own."""


@dataclass(frozen=True)
class ArrangeOptions(StageOptions):
    """The options of one side of a join."""

    drops_nulls: bool
    """Says whether the join needs no rows of this side whose key is null: they match nothing."""


@dataclass(frozen=True)
class JoinOptions(StageOptions):
    """The options of the joined rows."""

    spec: JoinSpec
    """The columns that are equal, and which rows without a match stay."""
    schema: pa.Schema
    """The columns of the joined rows, with the ids of both sides. Those of a join in a loop are not recorded."""
    key: tuple[str, ...]
    """The columns of `schema` that tell joined rows apart."""
    sides_expire: bool = False
    """Says whether rows of a side can expire. What was joined with them stays."""


@dataclass(frozen=True)
class PerKeyOptions(StageOptions):
    """The options of what is made of all rows of a key."""

    on: tuple[str, ...]
    """The columns of the key. The stage's own key also tells the rows of a key apart."""


@dataclass(frozen=True)
class FinalOptions(StageOptions):
    """The options of the rows of a window stage that are final."""

    windows: BoundStage
    """The part that has the windows which are open."""


@dataclass(frozen=True)
class FirstOptions(StageOptions):
    """The options of a dedupe within a time."""

    key: tuple[str, ...]
    """The columns that are the same in duplicates."""
    within_us: int
    """For how long after the first row of a key others are duplicates."""
    seen: str
    """The part that keeps the keys that were seen."""


@dataclass(frozen=True)
class TimedUpdateOptions(StageOptions):
    """The options of an update by event time, or with several outputs."""

    shown: pa.Schema
    """The columns of its state that its function sees and returns."""
    outputs: Mapping[str, pa.Schema]
    """The columns of its further outputs."""
    timer: str | None = None
    """The column of its state that says when a key is to be looked at."""
    ttl_us: int | None = None
    """How far the watermark is past a key's newest row when its state is forgotten."""


@dataclass(frozen=True)
class OutputOptions(StageOptions):
    """The options of a further output of an update."""

    name: str
    update: BoundStage
    """The stage that has the state."""


@dataclass(frozen=True)
class IntervalOptions(StageOptions):
    """The options of an interval join or an as-of join, and of its two sides."""

    spec: IntervalSpec | AsofSpec
    sides: tuple[IntervalSide, IntervalSide]
    states: tuple[str, str]
    """The parts that keep the rows of the sides."""
    schema: pa.Schema
    """The columns of the joined rows."""
    late_by_side: bool = False
    """Says whether fingerprints of late rows are without the other side (see `Meanings`)."""


@dataclass(frozen=True)
class JvmOptions(StageOptions):
    """The options of a stage that the JVM evaluates. Tasks get this much of it, without handles on objects of the
    JVM.
    """

    kept: Mapping[str, str] = field(default_factory=dict)
    """The columns of its output that are columns of its input, each with the name that it has there."""
    computed: Mapping[str, str] = field(default_factory=dict)
    """The columns of its output that one expression over columns of its input makes, each with that expression."""
    plain: bool = True
    """Says whether it calls no function of users, and nothing that depends on when it is asked."""
    step: Step | None = None
    """The expressions for tasks that evaluate them themselves, if they can."""


@dataclass(frozen=True)
class ExpressionOptions(JvmOptions):
    """The options of a select or a where."""

    expressions: tuple[Any, ...] = ()
    """SQL texts or Column objects. A where has one, its condition."""

    @property
    def texts(self) -> tuple[str, ...] | None:
        """Returns the expressions as SQL. It is None where one of them is a Column object."""
        return self.expressions if all(isinstance(one, str) for one in self.expressions) else None


@dataclass(frozen=True, kw_only=True)
class StaticJoinOptions(JvmOptions):
    """The options of a join with a table that does not change."""

    table: Any
    """The table, a Spark DataFrame."""
    on: tuple[str, ...]
    """The columns that are equal."""
    how: str
    """The rows that stay: `inner` or `left`."""
