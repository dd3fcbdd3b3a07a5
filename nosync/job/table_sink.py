"""Sinks into tables that have transactions: the rows of an epoch and its number become visible together.

Invariants
- An epoch is in the table exactly once, or not yet: the transaction that adds its rows says which epoch it is, and
  is refused where the table has it already. So two drivers, one of which is fenced, do not both add it.
- A table has the output of one stage of one store. It keeps a number by which the store knows it again.
- What is withdrawn goes in one transaction too, with the number of the epoch that is then the last.
"""

from __future__ import annotations

import contextlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nosync.lsm.errors import InvalidInputError, NosyncError, StorageError
from nosync.lsm.facts.deliveries import DeliveryLog
from nosync.lsm.platform.env import Env

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

_OUTPUT_DIGITS = 12
"""A number of so many digits fits into 64 bits, which is what tables can keep of it."""
_DECORATION = re.compile(r"\x1b\[[0-9;]*m|↳")
_NO_CAUSE = re.compile(r"\d+: |Help: |\[SQL: |\(Background on this error")
"""How lines begin, after which an error of a library says nothing more of its cause."""


@dataclass(frozen=True)
class TableState:
    """What a table says of what it was given."""

    output: int
    """The number by which the store knows its output."""
    epoch: int | None
    """The last epoch that it has; None: none."""
    table: Any = field(default=None, compare=False)
    """The table as it was then, for libraries that write on top of what they read."""


class TableSink(ABC):
    """Takes the changes of one stage into one table: its columns, `_change_type` and `_epoch`. Precise."""

    @abstractmethod
    def _state(self) -> TableState | None:
        """Returns what the table says; None where there is no table yet. Raises StorageError for a table of others."""

    @abstractmethod
    def _make(self, schema: pa.Schema, output: int) -> TableState:
        """Makes the table, without rows, for rows of a schema. It says its number, and that it has no epoch."""

    @abstractmethod
    def _add(self, rows: pa.Table, t: int, state: TableState) -> None:
        """Adds the rows of epoch `t` in one transaction. `state`: what the table said before."""

    @abstractmethod
    def _remove(self, after: int, state: TableState) -> None:
        """Removes the rows of the epochs after `after` in one transaction, and says that `after` is the last."""

    @abstractmethod
    def __str__(self) -> str:
        """Returns what errors call the table. It has no password."""

    def deliver(self, changes: Callable[[], DataFrame], t: int, marks: DeliveryLog) -> bool:
        with self._errors("read"):
            state = self._own(marks)
        if state is not None and state.epoch is not None and state.epoch >= t:
            return False
        rows = changes().toArrow()
        if state is None:
            output = int(Env().token(), 16) % 10**_OUTPUT_DIGITS
            marks.own(str(output))
            with self._errors("make"):
                state = self._make(rows.schema, output)
        marks.mark(t)  # of which line the epoch is; the table alone says whether it was given
        with self._errors(f"write epoch {t} to"):
            self._add(rows, t, state)
        return True

    def is_begun(self, marks: DeliveryLog) -> bool:
        with self._errors("read"):
            return self._own(marks) is not None

    def last_given(self, marks: DeliveryLog) -> int | None:
        with self._errors("read"):
            state = self._own(marks)
        return None if state is None else state.epoch

    def withdraw(self, after: int, marks: DeliveryLog) -> None:
        with self._errors(f"withdraw the epochs after {after} from"):
            state = self._own(marks)
            if state is not None and state.epoch is not None and state.epoch > after:
                self._remove(after, state)
        marks.take_back(marks.after(after))

    def _own(self, marks: DeliveryLog) -> TableState | None:
        """Returns what the table says. Raises StorageError where it has the output of another store or stage."""
        state = self._state()
        if state is not None and not marks.owns(str(state.output)):
            raise StorageError(
                f"{self} has the output of another store or stage: give this sink a table of its own, or drop that one if it is "
                "not wanted any more"
            )
        return state

    @contextlib.contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        """Maps what the library of the table raises to StorageError."""
        try:
            yield
        except NosyncError:
            raise
        except self._raised as error:
            raise StorageError(f"cannot {doing} {self}: {said_by(error)}") from error

    @property
    @abstractmethod
    def _raised(self) -> tuple[type[Exception], ...]:
        """What the library of the table raises."""


def said_by(error: BaseException) -> str:
    """Returns what an error says, and its cause, without the frames, hints and colours that some libraries add."""
    lines = [_DECORATION.sub("", line).strip() for line in str(error).splitlines()]
    end = next((i for i, line in enumerate(lines) if _NO_CAUSE.match(line)), len(lines))
    parts = [line for line in lines[:end] if line]
    return ": ".join(dict.fromkeys([parts[0], parts[-1]])) if parts else type(error).__name__


def missing(error: ImportError, what: str, extra: str) -> NosyncError:
    """Returns the error of a sink whose library is not installed."""
    return InvalidInputError(f"{what} needs {error.name}: pip install 'nosync[{extra}]'")
