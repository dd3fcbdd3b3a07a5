"""A rewritten plan as stages: one method for each kind of node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pyspark.sql import SparkSession

from nosync.flow.dataflow import Dataflow
from nosync.spark.expressions import quoted
from nosync.spark.plans import event_time, generators
from nosync.spark.plans.aggregates import Aggregates, calls_in
from nosync.spark.plans.catalyst import (
    Node,
    Refused,
    conjuncts,
    has_one_row,
    id_of,
    is_attribute,
    items,
    kind_of,
    nodes_of,
    refused,
)
from nosync.spark.plans.event_time import EventWindow, Watermark
from nosync.spark.plans.expressions import Expressions, Known
from nosync.spark.plans.joins import Joins
from nosync.spark.plans.limits import limited, same_rows_below
from nosync.spark.plans.over import Over, is_of_sorted, most_asked, sorted_below
from nosync.spark.plans.query import Analyzed, Planner, is_guard
from nosync.spark.plans.relation import Expression, Relation, Stages, named
from nosync.spark.plans.unions import expanded, united

_NO_INPUT = "it is no input of the flow: give it as a source or a table, or join_static() it"
_OF_INPUTS = ("Range", "StreamingRelationV2")
"""What an input is made of while queries are read."""
_REFUSED: Mapping[str, str] = {
    "LogicalRDD": _NO_INPUT,
    "Range": _NO_INPUT,
    "LogicalRelation": _NO_INPUT,
    "LocalRelation": "rows that are written in a query are no input of the flow: give them as a source or a table",
    "OneRowRelation": "it reads no input: SELECT without FROM is one row for ever",
    "UnionLoop": "WITH RECURSIVE is not translated: iterate() computes it in a flow",
    "Sample": "which rows a sample has is chance: filter by a hash of a column",
    "MapInPandas": "functions over rows of many epochs are a stage of their own: map() in the flow",
    "FlatMapGroupsInPandas": "it is a stage of its own: per_key() in the flow",
    "CollectMetrics": "metrics are of one run: leave observe() out",
}


class Translator:
    """Turns the plan of one view into stages of a flow."""

    def __init__(
        self,
        session: SparkSession,
        planner: Planner,
        flow: Dataflow,
        inputs: Mapping[str, Mapping[str, Node]],
        emit: str,
    ) -> None:
        """`inputs`: the stages that a view can name, each with its columns and their types. `emit`: how windows give
        their rows.
        """
        self._planner, self._flow, self._inputs = planner, flow, inputs
        self.stages, self.notes = Stages(flow), dict[str, None]()
        self._expressions = Expressions(session)
        self._aggregates = Aggregates(self.stages, self._expressions, self.note, emit)
        self._joins = Joins(self.stages, self._expressions, self.note)
        self._emit, self._whole = emit, 0
        self._over = Over(self.stages, self._expressions)
        self._ctes: Mapping[int, Node] = {}
        self._top: Node = None
        self._wanted: Mapping[int, str] = {}
        self._most: Mapping[int, int] = {}
        """Up to which ranks rows are asked for, of the window function that is translated next."""
        self.used: dict[str, None] = {}
        """The inputs that the view reads."""

    def note(self, text: str) -> None:
        """Keeps something that whoever runs the view should know."""
        self.notes[text] = None

    def translate(self, analyzed: Analyzed) -> Relation:
        self._ctes, self._top = analyzed.ctes, analyzed.plan
        self._wanted = {i: name for i, name, _ in analyzed.columns}
        self._whole = sum(
            map(event_time.watermarks_in, (analyzed.plan, *(one.child() for one in analyzed.ctes.values())))
        )
        return self._of(analyzed.plan)

    def _of(self, plan: Node) -> Relation:
        kind = kind_of(plan)
        translate: Callable[[Node], Relation] | None = getattr(self, f"_{kind.lower()}", None)
        if translate is not None:
            return translate(plan)
        outside = None if items(plan.children()) else self._outside(plan)
        if outside is None:
            raise refused(plan, _REFUSED.get(kind, f"{kind} cannot be kept up to date"))
        return outside

    # --- leaves -----------------------------------------------------------------------------------------------------

    def _view(self, plan: Node) -> Relation:
        name = str(plan.desc().identifier().table())
        if name not in self._inputs:
            return self._of(plan.child())
        below = plan.child()
        while kind_of(below) in ("Project", "SubqueryAlias") or is_guard(below):
            below = below.child()
        if kind_of(below) not in _OF_INPUTS:  # what is done below the name of an input would be lost here
            raise refused(below, f"Spark has moved it into the input {name}, where it cannot be kept up to date")
        self.used[name] = None
        types = self._inputs[name]
        stage = self._flow[name]
        self.stages.know(stage, list(types))
        return Relation(stage, {id_of(one): _column_of(str(one.name()), types) for one in items(plan.output())}, types)

    def _outside(self, leaf: Node) -> Relation | None:
        found = self._planner.outside(self._flow, leaf)
        if found is None:
            return None
        stage, names = found
        outputs = items(leaf.output())
        self.used[stage.name] = None
        self.stages.know(stage, names)
        types = {name: one.dataType() for name, one in zip(names, outputs, strict=True)}
        return Relation(stage, {id_of(one): name for name, one in zip(names, outputs, strict=True)}, types)

    def _subqueryalias(self, plan: Node) -> Relation:
        return self._of(plan.child())

    _subquery = _resolvedhint = _subqueryalias

    def _sort(self, plan: Node) -> Relation:
        self.note("ORDER BY without LIMIT is dropped: a view has no order")
        return self._of(plan.child())

    def _repartition(self, plan: Node) -> Relation:
        return self._of(plan.child())

    _repartitionbyexpression = _repartition

    def _cterelationref(self, plan: Node) -> Relation:
        if plan.recursive():
            raise refused(plan, _REFUSED["UnionLoop"])
        inner = self._ctes[int(plan.cteId())].child()
        # By place: a reference has attributes of its own, in the order of the query's.
        relation = self._of(self._planner.rewritten(inner))
        ids = [id_of(one) for one in items(inner.output())]
        at = {place: relation.columns[i] for place, i in enumerate(ids) if i in relation.columns}
        names = [str(one.name()) for one in items(inner.output())]
        columns = {id_of(one): at[_place_of(one, n, names)] for n, one in enumerate(items(plan.output()))}
        return Relation(relation.stage, columns, relation.types)

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _project(self, plan: Node) -> Relation:
        relation = self._of(plan.child())
        chosen = items(plan.projectList())
        return self.projected(relation, chosen)

    def projected(self, relation: Relation, chosen: Sequence[Node], known: Known = ()) -> Relation:
        """Returns a relation with what expressions make of another one. Columns that are there keep their names."""
        columns: dict[str, Expression] = {}
        by_id: dict[int, str] = {}
        types: dict[str, Node] = {}
        computed = False
        for one in chosen:
            value = one.child() if kind_of(one) == "Alias" else one
            if kind_of(value) == "AttributeReference" and id_of(value) in relation.columns:
                name = relation.columns[id_of(value)]
                columns[name] = quoted(name)
            else:
                relation, known = self._with_subqueries(value, relation, known)
                text = self._expressions.of(value, relation, known)
                is_there = (column for column in relation.types if text == quoted(column))
                name = next(is_there, named(str(one.name()), str(text)))
                is_column = text == quoted(name)
                if not is_column and (name in relation.types or str(columns.get(name, text)) != str(text)):
                    # The same text over another relation, of which a join has both.
                    name = named(str(one.name()), relation.stage.name, str(text))
                columns[name], computed = text, computed or name not in relation.types
            by_id[id_of(one)], types[name] = name, value.dataType()
        if not computed:
            return Relation(relation.stage, by_id, relation.types)
        return Relation(self.stages.select(relation.stage, columns), by_id, types)

    def _filter(self, plan: Node) -> Relation:
        self._most = {**self._most, **most_asked(plan)}
        relation = self._of(plan.child())
        relation, known = self._with_subqueries(plan.condition(), relation, ())
        condition = self._expressions.of(plan.condition(), relation, known)
        return relation.with_stage(self.stages.where(relation.stage, condition))

    def _with_subqueries(self, e: Node, relation: Relation, known: Known) -> tuple[Relation, Known]:
        """Returns a relation with the values of the scalar subqueries in an expression, as columns."""
        for one in self._expressions.subqueries_in(e, known):
            if any(what.semanticEquals(one) for what, _ in known):  # it stands in the expression twice
                continue
            if items(one.outerAttrs()):
                raise refused(one, "Spark does not turn this correlated subquery into a join: write it as a join")
            value = items(one.plan().output())[0]
            of_one = self._of(self._planner.rewritten(one.plan()))
            relation, column = self._joins.with_value(relation, of_one, value, is_checked=has_one_row(one.plan()))
            known = [*known, (one, column)]
        return relation, known

    def _aggregate(self, plan: Node) -> Relation:
        wanted = self._wanted if plan is self._top else {}
        windows = event_time.windows_of(plan, self._emit, self._whole)
        rows = self._of(plan.child()) if windows is None else self._rows_of(windows)
        given: Known = ()
        for call in calls_in(items(plan.aggregateExpressions())):
            rows, given = self._with_subqueries(call, rows, given)
        groups, known = self._aggregates.of(plan, rows, wanted, windows, given)
        return self.projected(groups, items(plan.aggregateExpressions()), known)

    def _rows_of(self, windows: EventWindow) -> Relation:
        """Returns the rows that are put into windows, which a stage does."""
        relation = self._of(windows.made_in.child())
        if kind_of(windows.made_in) == "Project":
            relation = self._without_window(relation, windows.made_in, windows)
        for plan in windows.above:
            if kind_of(plan) == "Project":
                relation = self._without_window(relation, plan, windows)
                continue
            for condition in conjuncts(plan.condition()):
                if not event_time.is_within(condition, windows):
                    stage = self.stages.where(relation.stage, self._expressions.of(condition, relation))
                    relation = relation.with_stage(stage)
        return relation

    def _without_window(self, relation: Relation, plan: Node, windows: EventWindow) -> Relation:
        window, time = id_of(windows.attribute), id_of(windows.time)
        chosen = [one for one in items(plan.projectList()) if id_of(one) != window]
        return self.projected(relation, chosen if time in map(id_of, chosen) else [*chosen, windows.time])

    def _eventtimewatermark(self, plan: Node) -> Relation:
        return self._of(plan.child())

    def _join(self, plan: Node) -> Relation:
        return self._joins.of(plan, self._of(plan.left()), self._of(plan.right()), self._whole)

    def _union(self, plan: Node) -> Relation:
        return united(self.stages, [(self._of(child), items(child.output())) for child in items(plan.children())], plan)

    def _expand(self, plan: Node) -> Relation:
        return expanded(self.stages, self._expressions, self._of(plan.child()), plan)

    def _distinct(self, plan: Node) -> Relation:
        relation = self.only(self._of(plan.child()), items(plan.output()))
        return relation.with_stage(self.stages.distinct(relation.stage))

    def _deduplicate(self, plan: Node) -> Relation:
        for one in items(plan.keys()):
            if kind_of(one.dataType()) == "StructType":
                event_time.check_not_timed(one, "dropping duplicates")
        timed = event_time.of_rows(plan.child(), self._whole)
        if timed is not None and id_of(timed[0]) in map(id_of, items(plan.keys())):
            return self._deduped(plan, *timed, within="0 seconds")
        relation = self.only(self._of(plan.child()), items(plan.output()))
        self.note("dropDuplicates of some columns: of several rows the first that came stays; Spark's choice is chance")
        key = [relation.columns[id_of(one)] for one in items(plan.keys())]
        return relation.with_stage(self.stages.dedupe(relation.stage, key))

    def _deduplicatewithinwatermark(self, plan: Node) -> Relation:
        timed = event_time.of_rows(plan.child(), self._whole)
        if timed is None:
            raise refused(plan, "it takes a watermark: say withWatermark(column, delay) before")
        return self._deduped(plan, *timed, within=timed[1].delay)

    def _deduped(self, plan: Node, time: Node, watermark: Watermark, *, within: str) -> Relation:
        relation = self.only(self._of(plan.child()), items(plan.output()))
        key = [relation.columns[id_of(one)] for one in items(plan.keys())]
        stage = self.stages.dedupe_within(relation.stage, key, relation.columns[id_of(time)], watermark, within)
        self.note(f"rows that come {watermark.delay} after the newest ones are in the stage {stage.late.name}")
        return relation.with_stage(stage)

    def only(self, relation: Relation, attributes: Sequence[Node]) -> Relation:
        """Returns a relation without the columns that nothing is asked of."""
        by_id = {id_of(one): relation.columns[id_of(one)] for one in attributes}
        columns = dict.fromkeys(by_id.values())
        stage = self.stages.select(relation.stage, {name: quoted(name) for name in columns})
        return Relation(stage, by_id, {name: relation.types[name] for name in columns})

    def _generate(self, plan: Node) -> Relation:
        relation = self._of(plan.child())
        generator, outputs = plan.generator(), items(plan.generatorOutput())
        if kind_of(generator) == "ReplicateRows":
            return generators.replicated(self.stages, self._expressions, relation, generator, outputs)
        return generators.exploded(
            self.stages, self._expressions, relation, generator, outputs, outer=bool(plan.outer())
        )

    # --- places of rows -----------------------------------------------------------------------------------------------

    def _window(self, plan: Node) -> Relation:
        most, self._most = self._most, {}
        if not is_of_sorted(plan):
            return self._over.of(plan, self._of(plan.child()), items(plan.orderSpec()), most)
        sort, projects = sorted_below(plan)
        relation = self._of(sort.child())
        kept = {id_of(one): one for order in items(sort.order()) for one in nodes_of(order) if is_attribute(one)}
        for project in projects:
            chosen = items(project.projectList())
            more = [one for i, one in kept.items() if i not in map(id_of, chosen)]
            relation = self.projected(relation, [*chosen, *more])
        return self._over.of(plan, relation, items(sort.order()), most)

    def _globallimit(self, plan: Node) -> Relation:
        below = same_rows_below(plan)
        if below is None:
            return self._between(plan)
        relation = self.only(self._of(below), items(plan.output()))
        return relation.with_stage(self.stages.distinct(relation.stage))

    _locallimit = _globallimit

    def _between(self, plan: Node) -> Relation:
        """Returns the rows at some places, by LIMIT and OFFSET."""
        asked = limited(plan)
        sort = asked.of
        if asked.is_nothing or has_one_row(sort):
            relation = self._of(sort)
            if asked.is_nothing or asked.first:
                relation = relation.with_stage(self.stages.where(relation.stage, "FALSE"))
        elif kind_of(sort) != "Sort":
            raise refused(plan, "without ORDER BY any rows would do: say by what they are ordered")
        else:
            self.note("ORDER BY ... LIMIT: all rows are kept on one shard, and read where one of the first goes")
            relation = self._of(sort.child())
            known: Known = ()
            for one in items(sort.order()):
                relation, known = self._with_subqueries(one, relation, known)
            relation, place = self._over.placed(relation, items(sort.order()), asked.end, known)
            if asked.first:
                relation = relation.with_stage(self.stages.where(relation.stage, f"{quoted(place)} > {asked.first}"))
        for project in asked.projects:
            relation = self.projected(relation, items(project.projectList()))
        return relation

    _offset = _between


def _column_of(name: str, types: Mapping[str, Node]) -> str:
    """Returns the column of an input that is meant. Where letters' case matters it may have `a` and `A`."""
    return name if name in types else next(column for column in types if column.lower() == name.lower())


def _place_of(attribute: Node, place: int, names: Sequence[str]) -> int:
    """Returns the place of a reference's attribute in the query that it refers to. Pruning leaves some out."""
    name = str(attribute.name())
    if place < len(names) and names[place] == name:
        return place
    places = [i for i, other in enumerate(names) if other == name]
    if len(places) != 1:
        raise Refused(f"column {name!r} of a WITH query is there {len(places)} times: give its columns different names")
    return places[0]
