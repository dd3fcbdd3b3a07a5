"""Sinks: where the output of an epoch goes when the epoch is sealed. The guarantee is chosen per sink.

| guarantee | after a failure | how |
|---|---|---|
| `precise` | every epoch is there exactly once | output of `t` appears atomically under the name of `t`, never twice |
| `at_least_once` | an epoch may be handed on again, with identical rows | marked as delivered after the hand-over |
| `gap` | an epoch may be lost, none is handed on twice | marked as delivered before the hand-over |

(Precise, rollback and gap recovery: Hwang et al., High-Availability Algorithms for Distributed Stream Processing, ICDE
2005. Repeats are identical, because the layers that they are read from are.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from nosync.lsm.errors import InvalidInputError, StorageError
from nosync.lsm.facts.deliveries import DeliveryLog

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

    from nosync.job.parquet_outputs import ParquetOutput

PRECISE, AT_LEAST_ONCE, GAP = "precise", "at_least_once", "gap"


class Sink(Protocol):
    """Takes the changes of one stage at one epoch: the stage's columns, `_change_type` and `_epoch`."""

    def deliver(self, changes: Callable[[], DataFrame], t: int, marks: DeliveryLog) -> bool:
        """Hands on epoch `t`. `marks`: which epochs were given before, kept with the store on all of its nodes.

        Called in order of epochs, and again for an epoch whose first call may not have finished. False: it
        had been delivered.
        """

    def last_given(self, marks: DeliveryLog) -> int | None:
        """Returns the newest epoch that was handed on; None: none yet. What came after it is handed on when the job
        goes on.
        """

    def withdraw(self, after: int, marks: DeliveryLog) -> None:
        """Takes back what was handed on for the epochs after `after`, and their marks: they are others, or no longer
        there.
        """


def last_given(sink: Sink, marks: DeliveryLog) -> int | None:
    """Returns the last epoch that a sink was given, as it says; None for a sink that does not say it."""
    ask = getattr(sink, "last_given", None)
    return None if ask is None else ask(marks)


def is_begun(sink: Sink, marks: DeliveryLog) -> bool:
    """Returns whether a sink's output is one that the sink made, which may have no epoch yet: a job that died can have
    marked the first one. False for a sink that does not say it.
    """
    ask = getattr(sink, "is_begun", None)
    return ask is not None and bool(ask(marks))


@dataclass(frozen=True)
class ParquetSink:
    """One directory `epoch=<t>` of Parquet files per epoch, on a local or mounted file system, or in an object store. Precise.

    Spark reads the whole as one table with a partition column `epoch`. `path`: a directory, or a URL as remotes have it
    (`s3://bucket/prefix`; needs the extra `remote`), where an epoch is one object, which goes through the driver.
    """

    path: str | Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", self._there.place)

    @cached_property
    def _there(self) -> ParquetOutput:
        from nosync.job.parquet_outputs import output_at  # noqa: PLC0415 - only who has this sink needs an object store

        return output_at(self.path)

    def check_columns(self, stage: str, schema: pa.Schema) -> None:
        """Raises InvalidInputError where a stage has a column that the output has for itself."""
        if (own := next((name for name in schema.names if name.lower() == "epoch"), None)) is not None:
            raise InvalidInputError(
                f"stage {stage} has a column {own!r}, and so does the output of a ParquetSink, as the name of its directories "
                f"(epoch=<t>): who reads it would see that one. Give the column another name, as select(..., '{own} AS ...') does"
            )

    def deliver(self, changes: Callable[[], DataFrame], t: int, marks: DeliveryLog) -> bool:
        self._check_own(marks)
        if self._there.has(t):
            return False
        if self._there.number() is None:
            self._there.begin(marks.own())

        def note() -> None:
            """Says of which line the epoch is; the output alone says whether it was given."""
            self._there.note_line(t, marks.line_of(t))
            marks.mark(t)

        self._there.write(changes(), t, note)
        return True

    def last_given(self, marks: DeliveryLog) -> int | None:
        self._check_own(marks)
        return max(self._there.epochs(), default=None)

    def is_begun(self, marks: DeliveryLog) -> bool:
        number = self._there.number()
        return number is not None and marks.owns(number)

    def withdraw(self, after: int, marks: DeliveryLog) -> None:
        self._there.look_again()
        self._check_own(marks)
        left = self._there.lines().left_after(self._there.epochs(), marks)
        after = after if left is None else min(left, after)
        for t in self._there.epochs():
            if t > after:
                self._there.remove(t)
        marks.take_back(marks.after(after))

    def _check_own(self, marks: DeliveryLog) -> None:
        """Raises StorageError where the directory has the output of another store or stage, which ours would be mixed
        with.
        """
        number = self._there.number()
        # Output that earlier versions wrote has no number.
        others = not marks.owns(number) if number is not None else self._there.epochs() and marks.last() is None
        if others:
            raise StorageError(
                f"{self.path} has the output of another store or stage: give this sink a directory of its own, or remove that "
                "one if its output is not wanted any more"
            )


@dataclass(frozen=True)
class CallbackSink:
    """Calls `function(changes, t)` for each epoch, as foreachBatch does.

    `guarantee`: `at_least_once` (default) or `gap`. To be precise, make the function idempotent by `t`, for instance
    with a transaction that stores `t` with the rows.
    """

    function: Callable[[DataFrame, int], None]
    guarantee: str = AT_LEAST_ONCE
    on_withdraw: Callable[[int], None] | None = None
    """Called with `t` when the epochs after `t` are withdrawn (rewind, promote)."""

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise InvalidInputError(f"{self.function!r} is not a function: a CallbackSink calls function(changes, t)")
        if self.guarantee not in (AT_LEAST_ONCE, GAP):
            raise InvalidInputError(
                f"guarantee {self.guarantee!r} of a callback is not {AT_LEAST_ONCE!r} or {GAP!r}: only the function "
                "itself can make it precise, by being idempotent by t"
            )

    def deliver(self, changes: Callable[[], DataFrame], t: int, marks: DeliveryLog) -> bool:
        given = self.last_given(marks)
        if given is not None and given >= t:
            return False
        unsent = marks.unsent()  # by a call that failed, or died; with another guarantee, maybe
        if self.guarantee == GAP:
            marks.mark(t)
            marks.take_back(unsent)
            self.function(changes(), t)
        elif self.on_withdraw is not None:  # it is to hear of what a call wrote that failed
            marks.begin_sending(t)
            self.function(changes(), t)
            marks.take_back(marks.unsent())
        else:
            self.function(changes(), t)
            marks.mark(t)
            marks.take_back(unsent)
        return True

    def is_begun(self, marks: DeliveryLog) -> bool:
        return bool(marks.unsent())

    def last_given(self, marks: DeliveryLog) -> int | None:
        return marks.last_sent()

    def withdraw(self, after: int, marks: DeliveryLog) -> None:
        if marks.left_after() is None:
            return  # what is not there any more was lost, and computed again it is the same
        if self.on_withdraw is not None:
            self.on_withdraw(after)
        marks.withdraw(after)
