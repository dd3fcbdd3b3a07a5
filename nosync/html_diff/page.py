"""The comparison of two branches as one HTML page that needs nothing else: no network, no script.

When they differ, by epoch; for each numeric column its total over time, how the differences are distributed, and the
keys with the largest ones. Only counts and sums have a total; of other columns the median takes its place. Where a
window says which event time each epoch had come to, times are beside the epochs. Without Spark: for states that fit
into memory.
"""

from __future__ import annotations

import datetime
import io
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from nosync.lsm.columnar.columns import EPOCH_COLUMN
from nosync.lsm.columnar.table_diff import CHANGE, CHANGED, ONLY_A, ONLY_B, compare, is_number
from nosync.lsm.errors import InvalidInputError, NosyncError
from nosync.lsm.manifests.branches import Timeline
from nosync.lsm.model.as_of import AsOf
from nosync.lsm.platform.notebook import cell
from nosync.lsm.store.store import Store
from nosync.lsm.visible import visible

if TYPE_CHECKING:
    import jinja2
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_EPOCHS = 40
"""Epochs whose states are compared; of a longer range so many, evenly spread."""
MOST_COLUMNS, MOST_ROWS = 6, 12
A_COLOR, B_COLOR = "#33658a", "#d1495b"
_KINDS = (CHANGED, ONLY_A, ONLY_B)
_WATERMARK = "__watermark"
_FEWEST_TIMES = 2
"""Of sealed epochs that are told apart by the minute, for times to be shown at all."""
_SAME = 1e-9
"""Of the values themselves: numbers that are this close to each other."""


@dataclass(frozen=True)
class Times:
    """Holds what stands beside the epochs of an axis."""

    label: str
    of: Mapping[int, datetime.datetime]
    """By epoch; empty where nothing is known."""


_NO_TIMES = Times("epoch", {})


@dataclass(frozen=True)
class _At:
    """Holds both branches as of one epoch."""

    t: int
    counts: dict[str, int]
    values: dict[str, tuple[float, float]]
    """By column, the total or the median on both sides."""


def diff_page(
    store: Store,
    stage: str,
    a: str,
    b: str,
    as_of: AsOf | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> str:
    """Returns the page that compares a stage on two branches as of an epoch (default: the newest of both).

    Raises what `Store.diff` raises, and NosyncError where matplotlib or jinja2 are not installed.
    """
    try:
        import jinja2  # noqa: F401, PLC0415 - of the extra `report`
        import matplotlib  # noqa: F401, PLC0415
    except ImportError as error:
        raise NosyncError(f"the report needs {error.name}: pip install 'nosync[report]'") from error
    with store.held():
        as_of = _epoch_of(store, stage, a, b, as_of)
        found = store.diff(stage, a, b, as_of)
        key = found.column_names[: found.column_names.index(CHANGE)]
        fork = _fork(store, a, b)
        first = max(store.since(), store.first_sealed(a) or 0, store.first_sealed(b) or 0, 0 if fork is None else fork)
        epochs = _spread(first, as_of)
        sums = {*store.sums_of(stage, as_of, a)} & {*store.sums_of(stage, as_of, b)}
        times = _times(store, stage, a, epochs)
        sealed = {name: store.sealed_at(as_of, name) for name in dict.fromkeys((a, b))}
        points = []
        for done, t in enumerate(epochs):
            points.append(_compared(store, stage, a, b, t, key, sums))
            if progress:
                progress(done + 1, len(epochs))
    differ = [p.t for p in points if sum(p.counts.values())]
    differences = {name: _differences(found, name, adds_up=name in sums) for name in points[-1].values}
    numeric = [name for name, values in differences.items() if np.nan_to_num(values).any()]
    columns = [
        _column(found, key, name, differences[name], points, (a, b), times, adds_up=name in sums)
        for name in numeric[:MOST_COLUMNS]
    ]
    texts = {CHANGED: "keys changed", ONLY_A: f"keys only in {a}", ONLY_B: f"keys only in {b}"}
    kinds = found.column(CHANGE).to_pylist()
    return _template().render(
        stage=stage,
        a=a,
        b=b,
        as_of=as_of,
        sealed={name: f"{at:%Y-%m-%d %H:%M:%S} UTC" for name, at in sealed.items() if at is not None},
        fork=fork,
        diverged=min(differ, default=None),
        sampled=len(epochs) < as_of - first + 1,
        counts={text: kinds.count(kind) for kind, text in texts.items()},
        timeline=_timeline(points, texts, times) if differ else "",
        columns=columns,
        key=key,
        others=[] if columns else found.slice(0, MOST_ROWS).to_pylist(),
        source=f"nosync diff {stage} {a} {b} --as-of {as_of}, store {store.directory.root.name}",
    )


def _epoch_of(store: Store, stage: str, a: str, b: str, as_of: AsOf | None) -> int:
    """Returns the epoch at which two branches are compared. Raises InvalidInputError for a stage that has a key on neither."""
    if as_of is None:
        as_of = min(t for t in (store.newest(a), store.newest(b)) if t is not None)
    as_of = store.epoch_as_of(as_of, a)
    if not any(store.key(stage, as_of, branch=branch) for branch in (a, b)):
        raise InvalidInputError(
            f"stage {stage} has no key, by which the page says what changed: `nosync diff` without --html shows its rows"
        )
    return as_of


def _template() -> jinja2.Template:
    import jinja2  # noqa: PLC0415 - of the extra `report`

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("nosync"), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
        finalize=_seen,
    )  # fmt: skip
    environment.filters["number"] = _number
    return environment.get_template("diff.html.j2")


def _fork(store: Store, a: str, b: str) -> int | None:
    """Returns the last epoch that both timelines have in common; None where they have none."""
    branches = store.branches()
    timelines: dict[str, Timeline] = {timeline.id: timeline for timeline in store.refs.timelines.values()}

    def ends(name: str) -> dict[str, float]:
        """Returns for each timeline of the branch's lineage up to which epoch it belongs to the branch."""
        timeline, end, found = branches[name], float("inf"), {}
        while True:
            found[timeline.id] = end
            if timeline.parent is None or timeline.at is None:
                return found
            end = min(end, timeline.at)
            timeline = timelines[timeline.parent]

    of_a, of_b = ends(a), ends(b)
    shared = [min(of_a[id], of_b[id]) for id in of_a if id in of_b]
    return int(max(shared)) if shared and max(shared) != float("inf") else None


def _spread(first: int, last: int) -> list[int]:
    n = min(MOST_EPOCHS, last - first + 1)
    return sorted({round(t) for t in np.linspace(first, last, n)})


def _times(store: Store, stage: str, branch: str, epochs: Sequence[int]) -> Times:
    """Returns the event time that each epoch had come to: the watermark of the stage, where it is a window, or of the
    only window. Where there is no such window, it is when each was sealed, unless that was in the same minute.

    An epoch has none before the first time came.
    """
    of_window = _event_times(store, stage, branch, epochs)
    if of_window:
        return Times("epoch, and the event time it came to", of_window)
    start, recorded = datetime.datetime(1970, 1, 1), store.epoch_times(branch)
    sealed = {t: start + datetime.timedelta(microseconds=recorded[t].sealed_us) for t in epochs if t in recorded}
    if len({at.replace(second=0, microsecond=0) for at in sealed.values()}) < _FEWEST_TIMES:
        return _NO_TIMES
    return Times(f"epoch, and when {branch} sealed it (UTC)", sealed)


def _event_times(store: Store, stage: str, branch: str, epochs: Sequence[int]) -> dict[int, datetime.datetime]:
    """Returns, by epoch, how far the only window, or the stage itself, had come in event time."""
    marks = [name for name in store.stages() if name.endswith(_WATERMARK)]
    mine = [name for name in marks if name == stage + _WATERMARK] or marks
    if len(mine) != 1:
        return {}
    try:
        rows = store.changes(mine[0], epochs[0] - 1, epochs[-1], branch=branch)
    except NosyncError:  # of another branch alone, or begun later
        return {}
    newest = rows.group_by(EPOCH_COLUMN).aggregate([("watermark", "max")]).to_pylist()
    found = {row[EPOCH_COLUMN]: row["watermark_max"] for row in newest if row["watermark_max"] is not None}
    return {t: found[t] for t in epochs if t in found}


def _compared(store: Store, stage: str, a: str, b: str, t: int, key: Sequence[str], sums: Collection[str]) -> _At:
    left, right = (store.read(stage, t, branch=name) for name in (a, b))
    found = compare(left, right, key, f"stage {stage}") if key else store.diff(stage, a, b, t)
    kinds = found.column(CHANGE).to_pylist()
    numeric = [f.name for f in left.schema if f.name in right.column_names and f.name not in key and is_number(f.type)]
    values = {}
    for name in numeric:
        statistic = _total if name in sums else _median
        values[name] = statistic(left.column(name)), statistic(right.column(name))
    return _At(t, {kind: kinds.count(kind) for kind in _KINDS}, values)


def _doubles(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return column.cast(pa.float64(), safe=False)  # sums of large whole numbers would overflow


def _total(column: pa.ChunkedArray) -> float:
    return float(pc.sum(_doubles(column)).as_py() or 0)


def _median(column: pa.ChunkedArray) -> float:
    """Returns the median; NaN where there is no value."""
    values = _doubles(column).drop_null().to_numpy()
    values = values[~np.isnan(values)]
    return float(np.median(values)) if len(values) else math.nan


def _differences(found: pa.Table, name: str, *, adds_up: bool) -> npt.NDArray[np.float64]:
    """Returns b less a. Where values add up, a missing one counts as zero; else there is no difference from it, which
    is NaN.
    """
    nothing = 0.0 if adds_up else math.nan
    a, b = (_doubles(found.column(f"{name}_{side}")).fill_null(nothing).to_numpy() for side in "ab")
    difference: npt.NDArray[np.float64] = b - a
    return difference


def _column(
    found: pa.Table,
    key: Sequence[str],
    name: str,
    difference: npt.NDArray[np.float64],
    points: Sequence[_At],
    branches: tuple[str, str],
    times: Times,
    *,
    adds_up: bool,
) -> dict[str, Any]:
    known = difference[~np.isnan(difference) & (difference != 0)]
    largest = np.argsort(-np.abs(np.nan_to_num(difference)), kind="stable")[:MOST_ROWS]
    keys = found.select(list(key)).take(pa.array(largest)).to_pylist() if key else [{}] * len(largest)
    a, b = (_doubles(found.column(f"{name}_{side}")).to_pylist() for side in "ab")
    rows = [
        {"key": list(k.values()), "a": a[i], "b": b[i], "difference": difference[i]}
        for k, i in zip(keys, largest, strict=True)
        if difference[i] and not math.isnan(difference[i])
    ]
    of_a, of_b = points[-1].values[name]
    kind = "sum" if adds_up else "median"
    return {
        "name": name,
        "kind": kind,
        "of_a": of_a,
        "of_b": of_b,
        "difference": of_b - of_a if adds_up else float(np.median(known)),
        "farthest": rows[0]["difference"],
        "largest": rows,
        "plots": [_values_plot(kind, name, points, branches, times), _histogram(name, known, branches)],
    }


def _number(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "none"
    return cell(int(value) if float(value).is_integer() else float(value))


def _seen(value: object) -> object:
    """Returns what a template may show: a text that is not HTML yet is made visible."""
    return value if hasattr(value, "__html__") or not isinstance(value, str | bytes) else visible(str(value))


# --- plots ------------------------------------------------------------------------------------------------------------


def _axes(width: float, height: float, times: Times) -> tuple[Figure, Axes]:
    """Returns a figure with axes. `times`: of the epochs on the axis, where they have any."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - slow to import
    from matplotlib.ticker import EngFormatter, MaxNLocator  # noqa: PLC0415

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.92")
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    if times.of:
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.xaxis.set_major_formatter(lambda x, _: _tick(round(x), times.of))
    return figure, axes


def _tick(epoch: int, times: Mapping[int, datetime.datetime]) -> str:
    """Returns an epoch, and below it its time; where all are whole days, without the hour."""
    if epoch not in times:
        return str(epoch)
    are_days = all(time.time() == datetime.time() for time in times.values())
    return f"{epoch}\n{times[epoch]:{'%Y-%m-%d' if are_days else '%Y-%m-%d %H:%M'}}"


def _svg(figure: Figure) -> str:
    import matplotlib as mpl  # noqa: PLC0415
    from matplotlib.text import Text  # noqa: PLC0415

    for shown in figure.findobj(Text):
        assert isinstance(shown, Text), "that is what was looked for"
        shown.set_parse_math(False)  # names of columns and branches are no formulas, dollar signs or not
        shown.set_text(visible(shown.get_text()))
    text = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "nosync"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def _timeline(points: Sequence[_At], kinds: Mapping[str, str], times: Times) -> str:
    figure, axes = _axes(8.4, 2.8, times)
    at = [p.t for p in points]
    width = 0.8 * min((y - x for x, y in itertools.pairwise(at)), default=1)
    below = np.zeros(len(points))
    for kind, color in ((CHANGED, "#7d8597"), (ONLY_A, A_COLOR), (ONLY_B, B_COLOR)):
        heights = np.array([p.counts[kind] for p in points], dtype=float)
        if heights.any():
            axes.bar(at, heights, width, bottom=below, color=color, label=kinds[kind])
        below += heights
    axes.set_xlabel(times.label)
    axes.legend(frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
    return _svg(figure)


def _values_plot(kind: str, name: str, points: Sequence[_At], branches: tuple[str, str], times: Times) -> str:
    from matplotlib.ticker import AutoLocator  # noqa: PLC0415

    figure, axes = _axes(5, 3, times)
    axes.yaxis.set_major_locator(AutoLocator())
    at = [p.t for p in points]
    for side, color in ((0, A_COLOR), (1, B_COLOR)):
        axes.plot(at, [p.values[name][side] for p in points], color=color, label=branches[side], linewidth=1.8)
    axes.set_title(f"{kind} of {name} over all keys, by epoch", loc="left", fontsize=10)
    axes.legend(frameon=False)
    return _svg(figure)


def _histogram(name: str, differences: npt.NDArray[np.float64], branches: tuple[str, str]) -> str:
    from matplotlib.ticker import EngFormatter, MaxNLocator  # noqa: PLC0415

    figure, axes = _axes(5, 3, _NO_TIMES)
    finite = differences[np.isfinite(differences)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    if high - low < _SAME * max(abs(low), abs(high)):  # bins between them would have no width
        low, high = low - 0.01 * abs(low), high + 0.01 * abs(high)
    axes.hist(finite, bins=min(30, max(5, len(finite) // 3)), range=(low, high), color="#7d8597")
    axes.axvline(0, color="0.3", linewidth=0.8)
    axes.set_title(f"keys by difference of {name}, {branches[1]} less {branches[0]}", loc="left", fontsize=10)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    return _svg(figure)
