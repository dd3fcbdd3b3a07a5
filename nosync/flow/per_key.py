"""Functions of one key, called for each key of an epoch's changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from nosync.kernels.python_rows import table_of
from nosync.lsm.errors import FlowError

KeyFunction = Callable[[tuple[Any, ...], list[dict[str, Any]], dict[str, Any] | None], Any]
"""Returns the state of the key, or None; beside several outputs (state, {output: rows})."""

_NO_OUTPUTS: Mapping[str, list[dict[str, Any]]] = {}


@dataclass(frozen=True)
class PerKey:
    """Calls a function of one key for each key of an epoch's changes. `update_per_key` gives it to `update`."""

    key: tuple[str, ...]
    fn: KeyFunction

    def __call__(self, changes: pa.Table, state: pa.Table) -> Any:
        before = {self._key_of(row): row for row in state.to_pylist()}
        grouped: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for row in changes.to_pylist():
            grouped.setdefault(self._key_of(row), []).append(row)
        for found in before:
            grouped.setdefault(found, [])  # its timer fired
        after, columns = [], frozenset(state.column_names)
        outputs: dict[str, list[dict[str, Any]]] = {}
        for found, rows in grouped.items():
            old = before.get(found)
            first = rows[0] if rows else before[found]
            key = tuple(first[name] for name in self.key)
            returned = self.fn(key, rows, None if old is None else self._without_key(old))
            values, more = (returned, _NO_OUTPUTS) if type(returned) is dict else _parts(returned)
            for name, of_key in more.items():
                outputs.setdefault(name, []).extend(of_key)
            if values is not None:
                after.append(self._with_key(key, values, columns))
        kept = table_of(after, state.schema)
        return {"state": kept, **outputs} if outputs else kept

    def _with_key(self, key: tuple[Any, ...], values: Mapping[str, Any], columns: Set[str]) -> dict[str, Any]:
        """Returns the row of a key. Its key is that of the rows, whatever the function returned."""
        own = dict(zip(self.key, key, strict=True))
        if not values.keys() <= columns:
            unknown = sorted(values.keys() - columns)
            raise FlowError(f"the function returned {unknown}, which are not state columns; it has {sorted(columns)}")
        if values.keys().isdisjoint(own):
            return {**values, **own}
        other = next((name for name in self.key if name in values and not _is_same(values[name], own[name])), None)
        if other is not None:
            raise FlowError(
                f"the function returned {other}={values[other]!r} for key {own}: a state belongs to its key; leave key columns "
                "out of what it returns"
            )
        return {**values, **own}

    def _key_of(self, row: Mapping[str, Any]) -> tuple[Any, ...]:
        """Returns what a dictionary finds the row's key by."""
        return tuple(_findable(row[name]) for name in self.key)

    def _without_key(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in row.items() if name not in self.key}


def _parts(returned: Any) -> tuple[Mapping[str, Any] | None, Mapping[str, list[dict[str, Any]]]]:
    """Returns the state and the outputs of what a function returned."""
    values: Any = returned
    more: Any = {}
    if isinstance(returned, tuple):
        if len(returned) != 2:
            raise FlowError(f"the function returned {returned!r}, expected a state, or (state, {{output: rows}})")
        values, more = returned
    if not (isinstance(more, Mapping) and all(isinstance(of_key, list) for of_key in more.values())):
        raise FlowError(f"the function returned outputs {more!r}, expected {{name: [rows as mappings]}}")
    if values is not None and not isinstance(values, Mapping):
        raise FlowError(f"the function returned {values!r}, expected the new state as a mapping, or None")
    return values, more


def _is_same(a: Any, b: Any) -> bool:
    """Returns whether a dictionary takes two values for one key, a NaN included."""
    return len({(_findable(a),), (_findable(b),)}) == 1


def _findable(value: Any) -> Any:
    """Returns a value that equal values give: for lists and mappings, which have no hash, tuples."""
    if isinstance(value, list):
        return tuple(map(_findable, value))
    if isinstance(value, dict):
        return tuple((name, _findable(one)) for name, one in value.items())
    # Python finds a NaN only by its identity, and Arrow makes a new one for each row.
    return math.nan if isinstance(value, float) and math.isnan(value) else value
