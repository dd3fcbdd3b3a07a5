"""Views as they are declared: a query of Spark over stages by name. Pure data; Spark's side makes stages of it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nosync.flow.kinds import CHANGES, FINAL
from nosync.lsm.errors import FlowError

if TYPE_CHECKING:
    from nosync.flow.dataflow import Dataflow

_TRANSLATES = "nosync.spark.plans.declaring"
Query = str | Callable[[Mapping[str, Any]], Any]
"""SQL text, or a function of DataFrames by the names of stages that returns one."""


class NoSessionError(FlowError):
    """A view is declared, and there is no session of Spark to read it."""


@dataclass(frozen=True)
class View:
    """A view and what it is made of."""

    name: str
    query: Query
    columns: tuple[tuple[str, str], ...] = ()
    """The names and types (Spark's) of its columns."""
    inputs: tuple[str, ...] = ()
    """The stages, views included, that it reads."""
    stages: tuple[str, ...] = ()
    """The stages that it is made of, the last one under its own name. Others are shared with views that have the same part."""
    goes_on: bool = False
    """Whether with another query it goes on from what it has, as stages do, and does not begin anew, as views do."""
    emit: str = CHANGES
    """How windows that a watermark closes give their rows: as they change, or once, when they are final."""
    notes: tuple[str, ...] = ()
    """What whoever runs it should know."""

    def with_query(self, query: Query) -> View:
        return replace(self, query=query)


def views_below(view: View, views: Mapping[str, View]) -> list[str]:
    """Returns the names of a view and of those that it reads, in any number of steps."""
    found = [view.name]
    for name in found:
        found += [one for one in views[name].inputs if one in views and one not in found]
    return found


def translate(flow: Dataflow, view: View, spark: Any) -> View:
    """Adds the stages of a view to a flow. Raises FlowError for what cannot be kept up to date.

    Flows know no Spark: its side is loaded where a view is declared, which takes a session in any case.
    """
    if not isinstance(view.query, str) and not callable(view.query):
        raise FlowError(f"view {view.name}: {view.query!r} is neither SQL text nor a function of DataFrames")
    if view.emit not in (CHANGES, FINAL):
        raise FlowError(f"view {view.name}: emit={view.emit!r}, expected {CHANGES!r} or {FINAL!r}")
    made: View = importlib.import_module(_TRANSLATES).declare(flow, view, spark)
    return made
