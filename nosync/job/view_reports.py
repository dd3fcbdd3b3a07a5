"""What a job says of its views: what they are made of, and whether they are what Spark makes of the same rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nosync.flow.arguments import ExpressionArguments, JoinArguments
from nosync.flow.bound_flow import BoundFlow
from nosync.flow.dataflow import Dataflow
from nosync.flow.kinds import PART_SEPARATOR
from nosync.flow.stage import Stage
from nosync.flow.views import View
from nosync.lsm.errors import UnknownStageError
from nosync.lsm.platform.nearest import did_you_mean
from nosync.lsm.platform.notebook import facts_html, rows_html

if TYPE_CHECKING:
    import pyarrow as pa

_MOST_CHARACTERS = 100


@dataclass(frozen=True)
class ViewStage:
    """A stage that a view is made of."""

    name: str
    does: str
    inputs: tuple[str, ...]
    state: str
    """The stages that have its state, or `none`: it is computed when it is asked for."""
    shared_with: tuple[str, ...]
    """Other views that have the same part."""


@dataclass(frozen=True)
class ViewPlan:
    """Says what a view is made of, in the order in which rows go through it."""

    view: str
    query: str
    columns: tuple[tuple[str, str], ...]
    inputs: tuple[str, ...]
    stages: tuple[ViewStage, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        rows = [
            ("stage", "state", "of", "does"),
            *((s.name, s.state, ", ".join(s.inputs), _does(s)) for s in self.stages),
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [
            f"view {self.view} ({', '.join(f'{name} {type_.lower()}' for name, type_ in self.columns)})",
            *("  " + line for line in self.query.strip().splitlines()),
            "",
            *(
                "  ".join([*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[3]]).rstrip()
                for row in rows
            ),
        ]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _repr_html_(self) -> str:
        rows = [(s.name, s.state, ", ".join(s.inputs), _does(s)) for s in self.stages]
        facts = {"query": self.query, "reads": ", ".join(self.inputs)} | {
            f"note {i + 1}": n for i, n in enumerate(self.notes)
        }
        return facts_html(f"view {self.view}", facts, rows_html(["stage", "state", "of", "does"], rows))


def _does(stage: ViewStage) -> str:
    return stage.does + (f" (also in {', '.join(stage.shared_with)})" if stage.shared_with else "")


def plan_of(name: str, declared: Dataflow, bound: BoundFlow) -> ViewPlan:
    """Returns what a view of a flow is made of. Raises UnknownStageError for something that is no view."""
    view = view_of(name, declared)
    others = [other for other in declared.views.values() if other.name != name]
    stages = []
    for stage in (declared[one] for one in view.stages):
        parts = [one.name for one in bound.stages.values() if one.name.partition(PART_SEPARATOR)[0] == stage.name]
        kept = [part for part in parts if bound.stages[part].recorded]
        shared = tuple(other.name for other in others if stage.name in other.stages)
        state = (
            "none"
            if not kept
            else ", ".join(part.removeprefix(stage.name) or "rows" for part in kept).replace("__", "")
        )
        stages.append(ViewStage(stage.name, _said(stage), stage.inputs, state, shared))
    query = (
        view.query if isinstance(view.query, str) else f"the function {getattr(view.query, '__name__', view.query)!s}"
    )
    return ViewPlan(name, query, view.columns, view.inputs, tuple(stages), view.notes)


def view_of(name: str, declared: Dataflow) -> View:
    """Returns a view of a flow. Raises UnknownStageError."""
    if name not in declared.views:
        raise UnknownStageError(
            f"no view {name!r} in {declared.name}; views: {', '.join(declared.views) or 'none'}"
            f"{did_you_mean(name, declared.views)}"
        )
    return declared.views[name]


def _said(stage: Stage) -> str:
    """Returns what a stage does, in a line."""
    words = [stage.kind]
    if isinstance(stage.arguments, ExpressionArguments):
        words.append(", ".join(map(str, stage.arguments.expressions)))
    if isinstance(stage.arguments, JoinArguments):
        words = [stage.arguments.how, "join on", ", ".join(stage.arguments.on)]
    if stage.aggregates:
        words.append(", ".join(f"{name} = {one}" for name, one in stage.aggregates.items()))
    if stage.key:
        words.append(f"by {', '.join(stage.key)}")
    text = " ".join(words)
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 3] + "..."


@dataclass(frozen=True)
class ViewCheck:
    """Says whether a view is what Spark makes of the recorded inputs as of an epoch."""

    view: str
    t: int
    rows: int
    """The rows of the view."""
    expected_rows: int
    """The rows that Spark's own query over the inputs gives."""
    extra: pa.Table
    """Rows of the view that Spark does not give."""
    missing: pa.Table
    """Rows that Spark gives and the view does not have."""

    @property
    def is_equal(self) -> bool:
        return not (self.extra.num_rows or self.missing.num_rows)

    def __str__(self) -> str:
        begin = f"view {self.view} as of epoch {self.t}: {self.rows:,} rows"
        if self.is_equal:
            return f"{begin}, as Spark's query over its inputs gives"
        shown: Sequence[tuple[str, Mapping[str, Any]]] = [
            *(("extra  ", row) for row in self.extra.slice(0, 5).to_pylist()),
            *(("missing", row) for row in self.missing.slice(0, 5).to_pylist()),
        ]
        lines = [f"  {what} {row}" for what, row in shown]
        count = f"{self.extra.num_rows:,} are not there and {self.missing.num_rows:,} are missing"
        return "\n".join([f"{begin}; Spark's query over its inputs gives {self.expected_rows:,}: {count}", *lines])
