"""Functions of one key, called for each key of an epoch's changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from nosync.lsm.errors import FlowError

KeyFunction = Callable[[tuple[Any, ...], list[dict[str, Any]], dict[str, Any] | None], Mapping[str, Any] | None]


@dataclass(frozen=True)
class PerKey:
    """Calls a function of one key for each key of an epoch's changes. `update_per_key` gives it to `update`."""

    key: tuple[str, ...]
    fn: KeyFunction

    def __call__(self, changes: pa.Table, state: pa.Table) -> pa.Table:
        before = {self._key_of(row): row for row in state.to_pylist()}
        grouped: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for row in changes.to_pylist():
            grouped.setdefault(self._key_of(row), []).append(row)
        after = []
        for key, rows in grouped.items():
            old = before.get(key)
            values = self.fn(key, rows, None if old is None else self._without_key(old))
            if values is not None:
                after.append({**dict(zip(self.key, key, strict=True)), **values})
        unknown = {name for row in after for name in row} - set(state.column_names)
        if unknown:
            raise FlowError(
                f"the function returned {sorted(unknown)}, which are not state columns; it has {state.column_names}"
            )
        return pa.Table.from_pylist(after, schema=state.schema)

    def _key_of(self, row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in self.key)

    def _without_key(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in row.items() if name not in self.key}
