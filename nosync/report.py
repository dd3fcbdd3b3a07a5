"""The comparison of two branches as one HTML page that needs nothing else: no network, no script.

When they differ, by epoch; for each numeric column its totals over time, how the differences are distributed, and the keys
with the largest ones. Without Spark: for states that fit into memory.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from nosync.lsm.branches import Line
from nosync.lsm.compare import CHANGE, CHANGED, ONLY_A, ONLY_B, compare
from nosync.lsm.errors import NosyncError
from nosync.lsm.html import cell
from nosync.lsm.store import Store

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_EPOCHS = 40
"""Epochs whose states are compared; of a longer range so many, evenly spread."""
MOST_COLUMNS, MOST_ROWS = 6, 12
A_COLOR, B_COLOR = "#33658a", "#d1495b"
_KINDS = (CHANGED, ONLY_A, ONLY_B)


@dataclass(frozen=True)
class _At:
    """Both branches as of one epoch."""

    t: int
    counts: dict[str, int]
    totals: dict[str, tuple[float, float]]


def diff_page(
    store: Store,
    stage: str,
    a: str,
    b: str,
    as_of: int | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> str:
    """The page that compares a stage on two branches as of an epoch (default: the newest of both).

    Raises what `Store.diff` raises, and NosyncError where matplotlib or jinja2 are not installed.
    """
    try:
        import jinja2  # noqa: PLC0415 - of the extra `report`
        import matplotlib  # noqa: F401, PLC0415
    except ImportError as error:
        raise NosyncError(f"the report needs {error.name}: pip install 'nosync[report]'") from error
    with store.held():
        if as_of is None:
            as_of = min(t for t in (store.newest(a), store.newest(b)) if t is not None)
        found = store.diff(stage, a, b, as_of)
        key = found.column_names[: found.column_names.index(CHANGE)]
        fork = _fork(store, a, b)
        first = max(store.since(), store.first_sealed(a) or 0, store.first_sealed(b) or 0, 0 if fork is None else fork)
        epochs = _spread(first, as_of)
        points = []
        for done, t in enumerate(epochs):
            points.append(_compared(store, stage, a, b, t, key))
            if progress:
                progress(done + 1, len(epochs))
    differ = [p.t for p in points if sum(p.counts.values())]
    numeric = [name for name in points[-1].totals if _differs(found, name)]
    columns = [_column(found, key, name, points, (a, b)) for name in numeric[:MOST_COLUMNS]]
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("nosync"), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    environment.filters["number"] = _number
    texts = {CHANGED: "keys changed", ONLY_A: f"keys only in {a}", ONLY_B: f"keys only in {b}"}
    kinds = found.column(CHANGE).to_pylist()
    page: str = environment.get_template("diff.html.j2").render(
        stage=stage,
        a=a,
        b=b,
        as_of=as_of,
        fork=fork,
        diverged=min(differ, default=None),
        sampled=len(epochs) < as_of - first + 1,
        counts={text: kinds.count(kind) for kind, text in texts.items()},
        timeline=_timeline(points, texts) if differ else "",
        columns=columns,
        key=key,
        others=[] if columns else found.slice(0, MOST_ROWS).to_pylist(),
        source=f"nosync diff {stage} {a} {b} --as-of {as_of}, store {store.directory.root.name}",
    )
    return page


def _fork(store: Store, a: str, b: str) -> int | None:
    """The last epoch that both lines have in common; None where they have none."""
    branches = store.branches()
    lines: dict[str, Line] = {line.id: line for line in store.lines_by_id().values()}

    def ends(name: str) -> dict[str, float]:
        """By line of its lineage, up to which epoch it belongs to the branch."""
        line, end, found = branches[name], float("inf"), {}
        while True:
            found[line.id] = end
            if line.parent is None or line.at is None:
                return found
            end = min(end, line.at)
            line = lines[line.parent]

    of_a, of_b = ends(a), ends(b)
    shared = [min(of_a[id], of_b[id]) for id in of_a if id in of_b]
    return int(max(shared)) if shared and max(shared) != float("inf") else None


def _spread(first: int, last: int) -> list[int]:
    n = min(MOST_EPOCHS, last - first + 1)
    return sorted({round(t) for t in np.linspace(first, last, n)})


def _compared(store: Store, stage: str, a: str, b: str, t: int, key: Sequence[str]) -> _At:
    left, right = (store.read(stage, t, branch=name) for name in (a, b))
    kinds = compare(left, right, key, f"stage {stage}").column(CHANGE).to_pylist()
    numeric = [f.name for f in left.schema if f.name in right.column_names and f.name not in key and _is_number(f.type)]
    totals = {name: (_total(left.column(name)), _total(right.column(name))) for name in numeric}
    return _At(t, {kind: kinds.count(kind) for kind in _KINDS}, totals)


def _total(column: pa.ChunkedArray) -> float:
    return float(pc.sum(column).as_py() or 0)


def _is_number(type_: pa.DataType) -> bool:
    return bool(pa.types.is_integer(type_) or pa.types.is_floating(type_) or pa.types.is_decimal(type_))


def _sides(found: pa.Table, name: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Both values of a column; nothing counts as zero."""
    a, b = (pc.fill_null(pc.cast(found.column(f"{name}_{side}"), pa.float64()), 0.0).to_numpy() for side in "ab")
    return a, b


def _differs(found: pa.Table, name: str) -> bool:
    a, b = _sides(found, name)
    return bool((a != b).any())


def _column(
    found: pa.Table, key: Sequence[str], name: str, points: Sequence[_At], branches: tuple[str, str]
) -> dict[str, Any]:
    a, b = _sides(found, name)
    difference = b - a
    largest = np.argsort(-np.abs(difference), kind="stable")[:MOST_ROWS]
    keys = found.select(list(key)).take(pa.array(largest)).to_pylist()
    rows = [
        {"key": list(k.values()), "a": a[i], "b": b[i], "difference": difference[i]}
        for k, i in zip(keys, largest, strict=True)
        if difference[i]
    ]
    total_a, total_b = points[-1].totals[name]
    return {
        "name": name,
        "total_a": total_a,
        "total_b": total_b,
        "largest": rows,
        "plots": [_totals_plot(name, points, branches), _histogram(name, difference[difference != 0], branches)],
    }


def _number(value: float) -> str:
    return cell(int(value) if float(value).is_integer() else float(value))


# --- plots ------------------------------------------------------------------------------------------------------------


def _axes(width: float, height: float) -> tuple[Figure, Axes]:
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
    return figure, axes


def _svg(figure: Figure) -> str:
    import matplotlib as mpl  # noqa: PLC0415

    text = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "nosync"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def _timeline(points: Sequence[_At], kinds: Mapping[str, str]) -> str:
    figure, axes = _axes(8.4, 2.8)
    at = [p.t for p in points]
    width = 0.8 * min((y - x for x, y in itertools.pairwise(at)), default=1)
    below = np.zeros(len(points))
    for kind, color in ((CHANGED, "#7d8597"), (ONLY_A, A_COLOR), (ONLY_B, B_COLOR)):
        heights = np.array([p.counts[kind] for p in points], dtype=float)
        if heights.any():
            axes.bar(at, heights, width, bottom=below, color=color, label=kinds[kind])
        below += heights
    axes.set_xlabel("epoch")
    axes.legend(frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
    return _svg(figure)


def _totals_plot(name: str, points: Sequence[_At], branches: tuple[str, str]) -> str:
    from matplotlib.ticker import AutoLocator  # noqa: PLC0415

    figure, axes = _axes(5, 3)
    axes.yaxis.set_major_locator(AutoLocator())
    at = [p.t for p in points]
    for side, color in ((0, A_COLOR), (1, B_COLOR)):
        axes.plot(at, [p.totals[name][side] for p in points], color=color, label=branches[side], linewidth=1.8)
    axes.set_title(f"sum of {name} over all keys, by epoch", loc="left", fontsize=10)
    axes.legend(frameon=False)
    return _svg(figure)


def _histogram(name: str, differences: npt.NDArray[np.float64], branches: tuple[str, str]) -> str:
    from matplotlib.ticker import EngFormatter, MaxNLocator  # noqa: PLC0415

    figure, axes = _axes(5, 3)
    axes.hist(differences, bins=min(30, max(5, len(differences) // 3)), color="#7d8597")
    axes.axvline(0, color="0.3", linewidth=0.8)
    axes.set_title(f"keys by difference of {name}, {branches[1]} less {branches[0]}", loc="left", fontsize=10)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    return _svg(figure)
