"""The arguments that only some operators have, as a declared stage holds them. Checked when they are given; pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

from nosync.flow.kinds import CHANGES, FINAL

if TYPE_CHECKING:  # windows load what computes them
    from nosync.flow.stage import Stage
    from nosync.kernels.windows import Window


@dataclass(frozen=True)
class Arguments:
    """Holds the arguments of an operator that has none but those of all."""

    @property
    def event_times(self) -> tuple[Window, ...]:
        """Returns the event time of each input, if the operator goes by that."""
        return ()

    @property
    def expires_after(self) -> int | None:
        """Returns after how many epochs without changes a key expires; None: never, or by event time."""
        return None

    def texts(self) -> dict[str, str]:
        """Returns the arguments as text, by name: a loop's fingerprint has those of its body."""
        return {one.name: str(getattr(self, one.name)) for one in fields(self)}


NO_ARGUMENTS = Arguments()


@dataclass(frozen=True)
class ExpressionArguments(Arguments):
    """Holds the arguments of a select, or of a where, which has one."""

    expressions: tuple[Any, ...]
    """SQL texts or Column objects."""


@dataclass(frozen=True)
class TableArguments(Arguments):
    """Holds the arguments of the source that has the changes of a table."""

    table: str
    """The name under which its rows are given."""


@dataclass(frozen=True)
class StaticJoinArguments(Arguments):
    """Holds the arguments of a join with a table that does not change."""

    table: Any
    """A Spark DataFrame."""
    on: tuple[str, ...]
    how: str


@dataclass(frozen=True)
class LoopArguments(Arguments):
    """Holds the arguments of a loop."""

    max_rounds: int
    result: str = ""
    """The stage that the body returned. Until it did it is empty."""


@dataclass(frozen=True)
class UpdateArguments(Arguments):
    """Holds the arguments of an update that goes by epochs."""

    ttl: int | None
    expiry: str | None
    """What was said to become of rows that expire; None: nothing was said."""

    @property
    def expires_after(self) -> int | None:
        """See Arguments."""
        return self.ttl


@dataclass(frozen=True)
class TimedUpdateArguments(Arguments):
    """Holds the arguments of an update by event time, or with several outputs."""

    outputs: Mapping[str, str]
    """The DDL of its further outputs."""
    timer: str | None
    ttl_us: int | None
    window: Window | None
    """Its event time; None: it only has several outputs."""

    @property
    def event_times(self) -> tuple[Window, ...]:
        """See Arguments."""
        return () if self.window is None else (self.window,)


@dataclass(frozen=True)
class DedupeArguments(Arguments):
    """Holds the arguments of a dedupe within a time."""

    window: Window
    """Its event time."""
    within_us: int

    @property
    def event_times(self) -> tuple[Window, ...]:
        """See Arguments."""
        return (self.window,)


@dataclass(frozen=True)
class WindowArguments(Arguments):
    """Holds the arguments of a window."""

    window: Window
    expiry: str | None
    emit: str = CHANGES

    @property
    def event_times(self) -> tuple[Window, ...]:
        """See Arguments."""
        return (self.window,)

    @property
    def is_final(self) -> bool:
        """Returns whether it gives each result once."""
        return self.emit == FINAL


@dataclass(frozen=True)
class JoinArguments(Arguments):
    """Holds the arguments of a join of two stages."""

    on: tuple[str, ...]
    how: str


@dataclass(frozen=True)
class TimedJoinArguments(JoinArguments):
    """Holds the arguments of an interval join or an as-of join."""

    windows: tuple[Window, ...] = field(kw_only=True)
    """The event time of each side."""

    @property
    def event_times(self) -> tuple[Window, ...]:
        """See Arguments."""
        return self.windows


@dataclass(frozen=True, kw_only=True)
class IntervalJoinArguments(TimedJoinArguments):
    """Holds the arguments of an interval join."""

    lower_us: int
    upper_us: int


@dataclass(frozen=True, kw_only=True)
class AsofJoinArguments(TimedJoinArguments):
    """Holds the arguments of an as-of join."""

    within_us: int | None


A = TypeVar("A", bound=Arguments)


def arguments_of(stage: Stage, kind: type[A]) -> A:
    """Returns the arguments of a stage of which it is known whose they are."""
    assert isinstance(stage.arguments, kind), f"stage {stage.name} is a {stage.kind}"
    return stage.arguments
