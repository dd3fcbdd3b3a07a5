"""The methods of a dataflow that declare views."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from nosync.flow.declared import Known
from nosync.flow.kinds import CHANGES
from nosync.flow.stage import Stage
from nosync.flow.views import Query, View, translate
from nosync.lsm.errors import FlowError, UnknownStageError
from nosync.lsm.model.layer import check_name
from nosync.lsm.platform.nearest import did_you_mean

if TYPE_CHECKING:
    from nosync.flow.dataflow import Dataflow


class DeclaresViews:
    """A dataflow has these beside those that declare inputs."""

    if TYPE_CHECKING:
        name: str
        key_groups: int
        persist_given: str | None
        _stages: dict[str, Stage]
        _known: dict[str, Known]
        _views: dict[str, View]

        def __init__(self, name: str, *, key_groups: int, persist: str | None) -> None: ...

        @property
        def stages(self) -> tuple[Stage, ...]: ...

        def _learned(self, stage: Stage) -> dict[str, Known]: ...

    def sql(self, name: str, query: str, *, emit: str = CHANGES, spark: Any = None) -> Stage:
        """Declares a view: a query in Spark's SQL over stages by their names, kept up to date.

            flow.sql("late", "SELECT carrier, count(*) AS n FROM flights WHERE delay > 60 GROUP BY carrier")

        It is read by a session of Spark: `spark`, or the active one. It becomes stages of this flow, of which equal parts
        of views share one; `job.explain_view(name)` shows them. Raises FlowError for a query that Spark does not
        understand, or with a clause that cannot be kept up to date, naming clause and line. What there is, and how it
        differs from a query over all rows, is in docs/sql.md.
        """
        if not isinstance(query, str):
            raise FlowError(
                f"view {name}: the query is {query!r}, expected SQL text; view() takes a function of DataFrames"
            )
        return self.declare_view(View(name, query, emit=emit), spark)

    def view(
        self, name: str, query: Callable[[Mapping[str, Any]], Any], *, emit: str = CHANGES, spark: Any = None
    ) -> Stage:
        """Declares a view as a function of DataFrames by the names of stages: `flow.view("late", lambda t:
        t["flights"].where("delay > 60"))`. It returns a DataFrame. The rest is as for `sql`.

        Windows with a watermark may be in it: `withWatermark("at", "10 minutes").groupBy(window("at", "5 minutes"))`. With
        `emit="final"` each gives its row once, when the watermark has passed it: Spark's output mode append. By itself a
        window gives its row as it changes: output mode update.
        """
        if not callable(query):
            raise FlowError(f"view {name}: {query!r} is no function of DataFrames; sql() takes text")
        return self.declare_view(View(name, query, emit=emit), spark)

    @property
    def views(self) -> Mapping[str, View]:
        """Returns the views that were declared, by name."""
        return self._views

    def declare_view(self, view: View, spark: Any = None) -> Stage:
        """Declares a view as `sql` and `view` do."""
        check_name(view.name, "view name")
        if view.name in self._stages:
            raise FlowError(f"dataflow {self.name}: two stages are named {view.name!r}; give each its own name")
        stages, known = dict(self._stages), dict(self._known)
        try:
            self._views[view.name] = translate(cast("Dataflow", self), view, spark)
        except BaseException:  # nothing is half declared
            self._stages, self._known = stages, known
            raise
        return self._stages[view.name]

    def with_queries(self, queries: Mapping[str, Query], spark: Any = None) -> Dataflow:
        """Returns a copy in which views have other queries. What they are made of is made again, and what is built on them
        is as it was. Raises UnknownStageError for something that is no view, and what `sql` raises.
        """
        if not isinstance(queries, Mapping):
            raise FlowError(f"views is {queries!r}, expected a dictionary: {{view: its new query}}")
        unknown = next((name for name in queries if name not in self._views), None)
        if unknown is not None:
            raise UnknownStageError(
                f"no view {unknown!r} in {self.name}; views: {', '.join(self._views) or 'none'}"
                f"{did_you_mean(str(unknown), self._views)}"
            )
        inside = {name for view in self._views.values() for name in view.stages}
        copy = cast("Dataflow", type(self)(self.name, key_groups=self.key_groups, persist=self.persist_given))
        for stage in self.stages:
            if stage.name in self._views:
                view = self._views[stage.name]
                copy.declare_view(view.with_query(queries.get(stage.name, view.query)), spark)
            elif stage.name not in inside:
                copy._known |= copy._learned(replace(stage, flow=copy))
                copy._stages[stage.name] = replace(stage, flow=copy)
        return copy
