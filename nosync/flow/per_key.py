"""Functions of one key, called for each key of an epoch's changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from nosync.lsm.errors import FlowError

KeyFunction = Callable[[tuple[Any, ...], list[dict[str, Any]], dict[str, Any] | None], Any]
"""Returns the state of the key, or None; beside several outputs (state, {output: rows})."""


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
        after = []
        outputs: dict[str, list[dict[str, Any]]] = {}
        for found, rows in grouped.items():
            old = before.get(found)
            first = rows[0] if rows else before[found]
            key = tuple(first[name] for name in self.key)
            values = self.fn(key, rows, None if old is None else self._without_key(old))
            if isinstance(values, tuple):
                values, more = values
                if not (isinstance(more, Mapping) and all(isinstance(of_key, list) for of_key in more.values())):
                    raise FlowError(f"the function returned outputs {more!r}, expected {{name: [rows as mappings]}}")
                for name, of_key in more.items():
                    outputs.setdefault(name, []).extend(of_key)
            if values is not None:
                after.append({**dict(zip(self.key, key, strict=True)), **values})
        unknown = {name for row in after for name in row} - set(state.column_names)
        if unknown:
            raise FlowError(
                f"the function returned {sorted(unknown)}, which are not state columns; it has {state.column_names}"
            )
        kept = pa.Table.from_pylist(after, schema=state.schema)
        return {"state": kept, **outputs} if outputs else kept

    def _key_of(self, row: Mapping[str, Any]) -> tuple[Any, ...]:
        """Returns what a dictionary finds the row's key by."""
        return tuple(_findable(row[name]) for name in self.key)

    def _without_key(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in row.items() if name not in self.key}


def _findable(value: Any) -> Any:
    """Returns a value that equal values give: for lists and mappings, which have no hash, tuples."""
    if isinstance(value, list):
        return tuple(map(_findable, value))
    if isinstance(value, dict):
        return tuple((name, _findable(one)) for name, one in value.items())
    # Python finds a NaN only by its identity, and Arrow makes a new one for each row.
    return math.nan if isinstance(value, float) and math.isnan(value) else value
