"""Sinks into tables that have transactions: the rows of an epoch and its number become visible together.

Invariants
- An epoch is in the table exactly once, or not yet: the transaction that adds its rows says which epoch it is, and
  is refused where the table has it already. So two drivers, one of which is fenced, do not both add it.
- An epoch follows one of the same line: a driver that was replaced by a rewind or a promotion adds nothing more.
- A table has the output of one stage of one store. It keeps a number by which the store knows it again.
- What is withdrawn goes in one transaction too, with the number of the epoch that is then the last.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pyarrow as pa

from nosync.lsm.columnar.columns import CHANGE_TYPE_COLUMN, EPOCH_COLUMN
from nosync.lsm.columnar.types import has_part
from nosync.lsm.errors import InvalidInputError, NosyncError, SchemaError, StorageError
from nosync.lsm.facts.deliveries import DeliveryLog
from nosync.lsm.store.reading import BEFORE_FIRST_EPOCH

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_DECORATION = re.compile(r"\x1b\[[0-9;]*m|↳")
_SECRET = re.compile(r"password|pwd|secret|token|key|credential|sas", re.IGNORECASE)
_NO_CAUSE = re.compile(r"\d+: |Help: |\[SQL: |\(Background on this error")
"""How lines begin, after which an error of a library says nothing more of its cause."""


@dataclass(frozen=True)
class TableState:
    """What a table says of what it was given."""

    output: int
    """The number by which the store knows its output."""
    epoch: int = BEFORE_FIRST_EPOCH
    """The last epoch that it has."""
    line: int = 0
    """A number of the timeline that this epoch is of."""
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
    def _add(self, rows: pa.Table, now: TableState, state: TableState) -> None:
        """Adds the rows of epoch `now.epoch` in one transaction, after which the table says `now`. `state`: what it said
        before. Raises StorageError where it does not say that any more.
        """

    @abstractmethod
    def _remove(self, now: TableState, state: TableState) -> None:
        """Removes the rows of the epochs after `now.epoch` in one transaction, as `_add` does."""

    @abstractmethod
    def __str__(self) -> str:
        """Returns what errors call the table. It has no password."""

    def check_columns(self, stage: str, schema: pa.Schema) -> None:
        """Raises SchemaError where a stage has a column that the table cannot have."""
        own = pa.schema([(CHANGE_TYPE_COLUMN, pa.string()), (EPOCH_COLUMN, pa.int64())])
        try:
            self._check_columns(pa.schema([*own, *schema]))
        except SchemaError as error:
            raise SchemaError(f"the {type(self).__name__} of stage {stage}: {error}") from None

    @abstractmethod
    def _check_columns(self, schema: pa.Schema) -> None:
        """Raises SchemaError for a column that the table cannot have. `schema`: that of its rows."""

    def deliver(self, changes: Callable[[], DataFrame], t: int, marks: DeliveryLog) -> bool:
        with self._errors("read"):
            state = self._own(marks)
        if state is not None:
            self._check_line(state, marks)
            if state.epoch >= t:
                return False
        rows = changes().toArrow()
        if state is None:
            output = marks.own()
            with self._errors("make"):
                state = self._make(rows.schema, int(output))
        marks.mark(t)  # of which line the epoch is; the table alone says whether it was given
        with self._errors(f"write epoch {t} to"):
            self._add(rows, _state_after(t, state, marks), state)
        return True

    def is_begun(self, marks: DeliveryLog) -> bool:
        with self._errors("read"):
            return self._own(marks) is not None

    def last_given(self, marks: DeliveryLog) -> int | None:
        with self._errors("read"):
            state = self._own(marks)
        return None if state is None or state.epoch == BEFORE_FIRST_EPOCH else state.epoch

    def withdraw(self, after: int, marks: DeliveryLog) -> None:
        with self._errors(f"withdraw the epochs after {after} from"):
            state = self._own(marks)
            left = None if state is None else self._left_after(state, marks)
            after = after if left is None else min(left, after)
            if state is not None and state.epoch > after:
                self._remove(_state_after(after, state, marks), state)
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

    def _check_line(self, state: TableState, marks: DeliveryLog) -> None:
        """Raises StorageError where the table's last epoch is not the job's of that number: of two drivers one was replaced
        by a rewind or a promotion. What is wrong in the table is withdrawn by the next job.
        """
        if state != _state_after(state.epoch, state, marks):
            raise StorageError(
                f"{self} has epoch {state.epoch} of another line: another driver goes on with the store after a rewind or a "
                "promotion, or added this after it was replaced. Make the job again: if it is the one that goes on, it mends the "
                "table"
            )

    def _left_after(self, state: TableState, marks: DeliveryLog) -> int | None:
        """Returns the epoch after which the table has others than the job's, as it says itself: the marks are of all that the
        stage was ever given to, and those of another output may have been taken back. None: it has none.

        Raises StorageError where it has some of a line that the store does not know, and so does not know since when.
        """
        if state.epoch == BEFORE_FIRST_EPOCH or state == _state_after(state.epoch, state, marks):
            return None
        line = next((line for line in marks.known_lines() if _number(line) == state.line), None)
        if line is None:
            raise StorageError(
                f"{self} has epochs up to {state.epoch}, the last of a line that this store does not know: it was put back from "
                "before a rewind, a promotion or an upgrade, and which rows are others since then cannot be said. Give the sink "
                "another table, or drop this one: it begins with the next epoch then, and nosync export has what holds now"
            )
        return marks.shared_until(line)

    @contextlib.contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        """Maps what the library of the table raises to StorageError."""
        try:
            yield
        except NosyncError:
            raise
        except self._raised as error:
            said = said_by(error)
            has_secret = any(one and one in str(error) for one in self._secrets)
            for one in self._secrets:
                said = said.replace(one, "***") if one else said
            raise StorageError(f"cannot {doing} {self}: {said}") from (None if has_secret else error)

    @property
    def _secrets(self) -> Collection[str]:
        """Texts that no error may have in it."""
        return ()

    @property
    @abstractmethod
    def _raised(self) -> tuple[type[Exception], ...]:
        """What the library of the table raises."""


def _state_after(t: int, before: TableState, marks: DeliveryLog) -> TableState:
    """Returns what a table says whose last epoch is the job's epoch `t`. Lines are numbers, which every table can keep."""
    if t <= BEFORE_FIRST_EPOCH:
        return TableState(before.output)
    return TableState(before.output, t, _number(marks.line_of(t)))


def _number(line: str) -> int:
    return int.from_bytes(hashlib.sha256(line.encode()).digest()[:8]) >> 1


def check_no_interval(schema: pa.Schema, what: str) -> None:
    """Raises SchemaError for a column that is an interval, or has one in it. `what`: what cannot have it."""
    column = next((field for field in schema if has_part(field.type, _is_interval)), None)
    if column is not None:
        raise SchemaError(
            f"column {column.name!r} has type {column.type}, and {what} has no intervals: take its parts in a select before, as "
            f"in extract(SECOND FROM {column.name}), or leave it out"
        )


def _is_interval(type_: pa.DataType) -> bool:
    return bool(pa.types.is_duration(type_) or pa.types.is_interval(type_))


def check_names_apart(schema: pa.Schema, what: str) -> None:
    """Raises SchemaError for two columns that `what` does not tell apart."""
    seen: dict[str, str] = {}
    for name in schema.names:
        other = seen.setdefault(name.lower(), name)
        if other != name:
            raise SchemaError(
                f"columns {other!r} and {name!r} differ in case alone, and {what} does not tell them apart: rename one in a "
                "select before"
            )


def secrets_of(settings: Mapping[str, str]) -> list[str]:
    """Returns what of some settings no error may say: passwords, keys, and URLs with a user in them."""
    found = {value for name, value in settings.items() if _SECRET.search(name) or "@" in value or _SECRET.search(value)}
    passwords = (urlsplit(value).password for value in found if "://" in value)
    return sorted({*found, *filter(None, passwords)} - {""}, key=len, reverse=True)


def said_by(error: BaseException) -> str:
    """Returns what an error says, and its cause, without the frames, hints and colours that some libraries add."""
    lines = [_DECORATION.sub("", line).strip() for line in str(error).splitlines()]
    end = next((i for i, line in enumerate(lines) if _NO_CAUSE.match(line)), len(lines))
    parts = [line for line in lines[:end] if line]
    return ": ".join(dict.fromkeys([parts[0], parts[-1]])) if parts else type(error).__name__


def needs(module: str, extra: str, sink: object) -> None:
    """Raises InvalidInputError where the library of a sink is not installed."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise InvalidInputError(f"{type(sink).__name__} needs {error.name}: pip install 'nosync[{extra}]'") from None
