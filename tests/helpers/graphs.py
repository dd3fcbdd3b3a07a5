"""Graphs whose nodes are reached, by slow Python."""

from __future__ import annotations

from typing import Any

import pyarrow as pa


def last_word(changes: pa.Table, state: pa.Table) -> pa.Table:
    """Whether each key is there: the last change of the epoch says so (by the order of `i`)."""
    key = state.column_names[:-1]
    on: dict[Any, bool] = {}
    for row in sorted(changes.to_pylist(), key=lambda r: r["i"]):
        on[tuple(row[name] for name in key)] = bool(row["there"])
    kept = [k for k, there in on.items() if there]
    columns = [pa.array([k[i] for k in kept], pa.int64()) for i in range(len(key))]
    return pa.Table.from_arrays([*columns, pa.array([1] * len(kept), pa.int64())], names=state.column_names)


def hop(rows: pa.Table) -> pa.Table:
    names = ["dst", *(name for name in rows.column_names if name == "_change_type")]
    return rows.select(names).rename_columns(["node", *names[1:]])


def only(*names: str) -> Any:
    def select(rows: pa.Table) -> pa.Table:
        return rows.select([*names, *(n for n in rows.column_names if n == "_change_type")])

    return select


def reach_slowly(roots: set[int], edges: set[tuple[int, int]]) -> set[int]:
    reached: set[int] = set()
    todo = list(roots)
    while todo:
        node = todo.pop()
        if node not in reached:
            reached.add(node)
            todo += [b for a, b in edges if a == node]
    return reached
