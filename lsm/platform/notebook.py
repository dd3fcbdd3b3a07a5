"""How objects look in a notebook: facts and rows as plain tables, with everything escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nosync.lsm.visible import visible

_MOST_ROWS = 20


def escape(text: str) -> str:
    """Returns a text as HTML that looks like it, and does nothing."""
    return html.escape(visible(text, keep="\n\t"))


def facts_html(title: str, facts: Mapping[str, Any], *more: str) -> str:
    """Returns a title, a table of names and values, and what `rows_html` made."""
    rows = "".join(f"<tr><th style='text-align:left'>{escape(n)}</th><td>{cell(v)}</td></tr>" for n, v in facts.items())
    return f"<div><b>{escape(title)}</b><table>{rows}</table>{''.join(more)}</div>"


def rows_html(columns: Sequence[str], rows: Iterable[Sequence[Any]], caption: str = "") -> str:
    """Returns a table; of more than 20 rows the first ones, and how many more there are."""
    listed = list(rows)
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join("<tr>" + "".join(f"<td>{cell(v)}</td>" for v in row) + "</tr>" for row in listed[:_MOST_ROWS])
    rest = f"<p>... {len(listed) - _MOST_ROWS:,} more of {len(listed):,} rows</p>" if len(listed) > _MOST_ROWS else ""
    title = f"<caption style='text-align:left'>{escape(caption)}</caption>" if caption else ""
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{rest}"


def cell(value: Any) -> str:
    """Returns a value as the text of a table's cell."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.4g}" if isinstance(value, float) else escape(str(value))
