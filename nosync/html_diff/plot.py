"""Plots, drawn by matplotlib without a screen."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path


def plot_trend(
    rows: Sequence[tuple[str, datetime.date, float]], path: Path, marks: Mapping[datetime.date, str]
) -> None:
    """Draws the smoothed departure delay (minutes) of each origin by day, as a PNG. `rows`: (origin, day, minutes)."""
    from matplotlib.dates import DateFormatter, MonthLocator, date2num  # noqa: PLC0415 - slow to import
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(10, 4.6), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    for origin in sorted({row[0] for row in rows}):
        days = [date2num(row[1]) for row in rows if row[0] == origin]  # type: ignore[no-untyped-call]
        axes.plot(days, [row[2] for row in rows if row[0] == origin], label=origin, linewidth=1.6)
    for day, text in marks.items():
        at = date2num(day)  # type: ignore[no-untyped-call]
        axes.axvline(at, color="0.6", linewidth=1, linestyle=":")
        axes.annotate(
            text, (at, 1), xycoords=("data", "axes fraction"), xytext=(4, -12), textcoords="offset points", color="0.4"
        )
    axes.set_title("Departure delay from New York's airports in 2013, smoothed by day", loc="left")
    axes.set_ylabel("minutes")
    axes.xaxis.set_major_locator(MonthLocator())  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_formatter(DateFormatter("%b"))  # type: ignore[no-untyped-call]
    axes.margins(x=0.01)
    axes.grid(axis="y", color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=3, loc="upper right")
    figure.savefig(path)


def plot_lines(
    lines: Mapping[str, Mapping[int, float]], path: Path, marks: Mapping[int, str], title: str, x: str, y: str
) -> None:
    """Draws lines by a whole number, as a PNG. `lines`: by name the values by number. `marks`: numbers with a text."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - slow to import

    figure = Figure(figsize=(10, 4.6), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    for name, values in lines.items():
        axes.plot(list(values), list(values.values()), label=name, linewidth=1.8)
    for at, text in marks.items():
        axes.axvline(at, color="0.6", linewidth=1, linestyle=":")
        axes.annotate(
            text, (at, 1), xycoords=("data", "axes fraction"), xytext=(4, -12), textcoords="offset points", color="0.4"
        )
    axes.set_title(title, loc="left")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.margins(x=0.01)
    axes.grid(axis="y", color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path)
