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

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from nosync.lsm.errors import InvalidInputError, StorageError
from nosync.lsm.facts.deliveries import DeliveryLog
from nosync.lsm.platform.env import Env, storage_errors
from nosync.lsm.platform.paths import local_path

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PRECISE, AT_LEAST_ONCE, GAP = "precise", "at_least_once", "gap"


_ENV = Env()
_NAME = "_nosync"
"""The name of a file in a directory of output, with a number that only its store and stage know.

Spark leaves out what begins with an underscore.
"""
_NAME_DIGITS = 12
_INSTEAD = "Object stores take a CallbackSink that writes by t, as in docs/streaming.md"


def _sync(directory: Path) -> None:
    for path in directory.iterdir():
        if path.is_file():
            _ENV.sync_file(path)
    _ENV.sync_dir(directory)


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


@dataclass(frozen=True)
class ParquetSink:
    """One directory `epoch=<t>` of Parquet files per epoch, on a local or mounted file system. Precise.

    Spark reads the whole as one table with a partition column `epoch`.
    """

    path: str | Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", local_path(self.path, "the output of a ParquetSink", _INSTEAD))

    def deliver(self, changes: Callable[[], DataFrame], t: int, marks: DeliveryLog) -> bool:
        target = Path(self.path) / f"epoch={t}"
        self._check_own(marks)
        if target.exists():
            return False
        self._make_own(marks)
        staged = Path(self.path) / f".staged-{t}"
        with storage_errors("write the output", target):
            if staged.exists():  # of an attempt that died
                shutil.rmtree(staged)
            changes().write.parquet(str(staged))
            _sync(staged)  # what is there under its final name is never written again
            marks.mark(t)  # of which line the epoch is; the directory alone says whether it was given
            staged.rename(target)
            _ENV.sync_dir(target.parent)
        return True

    def last_given(self, marks: DeliveryLog) -> int | None:
        self._check_own(marks)
        return max(self._given(), default=None)

    def withdraw(self, after: int, marks: DeliveryLog) -> None:
        self._check_own(marks)
        for t in self._given():
            target = Path(self.path) / f"epoch={t}"
            if t > after:
                with storage_errors("withdraw the output", target):
                    shutil.rmtree(target)
        marks.take_back(marks.after(after))

    def _check_own(self, marks: DeliveryLog) -> None:
        """Raises StorageError where the directory has the output of another store or stage, which ours would be mixed
        with.
        """
        name = self._name()
        # Output that earlier versions wrote has no name.
        if (not marks.owns(name)) if name is not None else (self._given() and marks.last() is None):
            raise StorageError(
                f"{self.path} has the output of another store or stage: give this sink a directory of its own, or remove that "
                "one if its output is not wanted any more"
            )

    def _name(self) -> str | None:
        path = Path(self.path) / _NAME
        with storage_errors("read", path):
            found = path.read_text().strip() if path.exists() else ""
        return found if found.isdecimal() else None  # anything else is left of a write that was cut off

    def _make_own(self, marks: DeliveryLog) -> None:
        if self._name() is not None:
            return
        name, path = str(int(_ENV.token(), 16) % 10**_NAME_DIGITS), Path(self.path) / _NAME
        marks.own(name)
        with storage_errors("write", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            begun = path.with_name(f".{_NAME}-{name}")
            begun.write_text(f"{name}\n")
            _ENV.sync_file(begun)
            begun.replace(path)
            _ENV.sync_dir(path.parent)

    def _given(self) -> list[int]:
        numbers = [path.name.removeprefix("epoch=") for path in Path(self.path).glob("epoch=*")]
        return [int(number) for number in numbers if number.isdecimal()]


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
        if marks.delivered(t):
            return False
        if self.guarantee == GAP:
            marks.mark(t)
            self.function(changes(), t)
        else:
            self.function(changes(), t)
            marks.mark(t)
        return True

    def last_given(self, marks: DeliveryLog) -> int | None:
        return marks.last()

    def withdraw(self, after: int, marks: DeliveryLog) -> None:
        if marks.left_after() is None:
            return  # what is not there any more was lost, and computed again it is the same
        if self.on_withdraw is not None:
            self.on_withdraw(after)
        marks.take_back(marks.after(after))
