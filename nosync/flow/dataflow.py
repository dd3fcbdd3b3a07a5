"""Dataflows: a graph of named stages, declared without Spark and without data.

    flow = nosync.Dataflow("flights")
    flights = flow.source("flights", "origin string, carrier string, dep_delay double")
    flown = flights.map("flown", drop_cancelled)
    delays = flown.aggregate("delays", key=["origin"], n=nosync.count(), worst=nosync.max("dep_delay"))

`Job` runs a flow. What stages are is in `stage`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nosync.flow import declared
from nosync.flow.arguments import (
    DedupeArguments,
    ExpressionArguments,
    JoinArguments,
    StaticJoinArguments,
    TableArguments,
    TimedJoinArguments,
    TimedUpdateArguments,
    WindowArguments,
    arguments_of,
)
from nosync.flow.ddl import columns_of, ddl_without
from nosync.flow.declared import Known
from nosync.flow.foreign_words import unknown_operator
from nosync.flow.key_names import check_key_names
from nosync.flow.kinds import (
    AGGREGATE,
    DEDUPE,
    FILTER,
    JOIN,
    LOOP,
    MAP,
    PART_SEPARATOR,
    PER_KEY,
    SELECT,
    SOURCE,
    STATELESS,
    STATIC_JOIN,
    UNION,
    UPDATE,
    WHERE,
    WINDOW,
)
from nosync.flow.per_key import PerKey
from nosync.flow.persistence import NONE, asks_for_remote, parse_level
from nosync.flow.pickled_function import PickledFunction
from nosync.flow.stage import Stage, own_methods
from nosync.flow.tables import GIVEN_CHANGE_TYPE, NewestRows, source_of, version_by
from nosync.flow.view_methods import DeclaresViews
from nosync.flow.views import View
from nosync.kernels.join_types import INNER
from nosync.lsm.errors import FlowError, SchemaError, UnknownStageError
from nosync.lsm.manifests.input_policy import POLICIES
from nosync.lsm.manifests.manifest import KEEP
from nosync.lsm.model.layer import check_name
from nosync.lsm.platform.nearest import did_you_mean, named_stages
from nosync.lsm.platform.store_marker import DEFAULT_KEY_GROUPS, MAX_KEY_GROUPS

_OF_FUNCTIONS = (MAP, FILTER, UPDATE, PER_KEY)
"""The kinds of stages that have a function of users."""
_FOR_EXPRESSIONS = {MAP: "select()", FILTER: "where()"}
"""The methods to call in the place of these where there is no function."""


class Dataflow(DeclaresViews):
    """A graph of stages.

    `key_groups` is the most shards it can ever run with. It must be the store's. `persist` is the level of sources and
    keyed stages that do not say their own.
    """

    def __init__(self, name: str, *, key_groups: int = DEFAULT_KEY_GROUPS, persist: str | None = None) -> None:
        self.name = check_name(name, "dataflow name")
        if not isinstance(key_groups, int) or not 1 <= key_groups <= MAX_KEY_GROUPS:
            raise FlowError(f"dataflow {name}: key_groups is {key_groups!r}, expected 1 to {MAX_KEY_GROUPS}")
        self.key_groups = key_groups
        if parse_level(persist or "disk", f"dataflow {name}") == NONE:
            raise FlowError(f"dataflow {name}: persist='none' records nothing to go on from; use 'memory' or 'disk'")
        self.persist = persist or "disk"
        self.persist_given = persist
        """The level that was given. None: on as many nodes as the store keeps, which is one where it is alone."""
        self._stages: dict[str, Stage] = {}
        self._known: dict[str, Known] = {}
        self._views: dict[str, View] = {}
        self.asked: object = None
        """What Spark's side knows of the stages, so that it is asked once while views are declared."""
        self._loop: str | None = None  # the loop whose body is being built

    def source(self, name: str, schema: str, *, persist: str | None = None, at_safe_point: str = KEEP) -> Stage:
        """Declares an input, to which each epoch brings new rows. `schema` is Spark DDL: `"origin string, n bigint"`.

        `at_safe_point` says what is done with the rows of an epoch once everything computed from them is safe: `keep`
        (they can be replayed and explained), `disk` (one node of several keeps them), `drop`. A branch holds what came
        after its fork.
        """
        policy = _checked_policy(name, at_safe_point)
        return self._add(Stage(self, name, SOURCE, schema=schema, persist=persist, at_safe_point=policy))

    def table(
        self,
        name: str,
        schema: str,
        *,
        key: Sequence[str],
        sequence_by: str | None = None,
        persist: str | None = None,
        at_safe_point: str = KEEP,
    ) -> Stage:
        """Declares an input whose rows are added, changed and deleted by key: `table("customers", "id bigint, city string",
        key=["id"])`.

        Each epoch brings rows under the table's name. A row replaces the one of its key; where a column `_change_type` says
        `delete` it removes it. The words are those of Delta's change data feed (`insert`, `update_postimage`, `delete`;
        `update_preimage` is passed over). Of several rows of a key in an epoch, or of rows that come late, the one counts
        whose column `sequence_by` is the largest; without it a key may come once in an epoch. What came late after a
        deletion is not told from a new row.
        The stage that is returned has one row for each key. What was given is recorded in the source `<name>_changes`, of
        which `at_safe_point` is. Flink calls it an upsert source, Declarative Pipelines AUTO CDC.
        """
        check_name(name, "table name")
        columns = columns_of(schema, f"table {name}")
        keys = check_key_names(name, key)
        unknown = next((c for c in (*keys, sequence_by) if c is not None and c not in columns), None)
        if unknown is not None:
            raise SchemaError(
                f"table {name}: {unknown!r} is not one of its columns, {', '.join(columns)}{did_you_mean(unknown, columns)}"
            )
        rest = [column for column in columns if column not in keys]
        if not rest:
            raise FlowError(
                f"table {name}: its key is all of its columns, so that no row can change: give it a column beside, or "
                "declare a source of new rows and dedupe() it"
            )
        if GIVEN_CHANGE_TYPE in columns:
            raise SchemaError(
                f"table {name}: {GIVEN_CHANGE_TYPE!r} is what the changes of a table have beside: rename it"
            )
        source = source_of(name)
        if {name, source} & {*self._stages}:
            raise FlowError(
                f"table {name}: a stage is named {name} or {source} already, and the table takes both names"
            )
        changes = self._add(
            Stage(
                self, source, SOURCE, schema=f"{schema}, {GIVEN_CHANGE_TYPE} string", persist=persist,
                at_safe_point=_checked_policy(source, at_safe_point), arguments=TableArguments(name),
            )
        )  # fmt: skip
        newest = NewestRows(name, keys, tuple(columns), sequence_by)
        state = ddl_without(schema, keys)
        version = version_by(sequence_by, columns.get(sequence_by) if sequence_by else None)
        return changes.update(name, key=keys, state=state, fn=newest, version=version, persist=persist)

    @property
    def asks_for_remote(self) -> bool:
        """Returns whether the flow, or a stage of it, asks for copies in an object store."""
        return any(map(asks_for_remote, (self.persist, *(stage.persist for stage in self.stages))))

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Returns the stages in the order of declaration, which is a topological one: a stage is built on one that
        exists.
        """
        return tuple(self._stages.values())

    @property
    def sources(self) -> tuple[Stage, ...]:
        return tuple(stage for stage in self.stages if stage.kind == SOURCE)

    def consumers(self, name: str) -> tuple[Stage, ...]:
        return tuple(stage for stage in self.stages if name in stage.inputs)

    def __getitem__(self, name: str) -> Stage:
        """Returns the stage of a name, to build on."""
        if name not in self._stages:
            raise UnknownStageError(
                f"no stage {name!r} in {self.name}; stages: {named_stages(self._stages)}{did_you_mean(name, self._stages)}"
            )
        return self._stages[name]

    def changed(
        self,
        replaced: Mapping[str, Any] | None = None,
        add: Callable[[Dataflow], object] | None = None,
        drop: Sequence[str] = (),
    ) -> Dataflow:
        """Returns a copy with other functions for some stages, more stages, or fewer.

        `replaced` has, by stage, a function (map, filter, update, per_key), expressions (select, where), or a mapping of
        aggregates (aggregate, window). `add(flow)` builds on the copy. `drop` names stages that nothing is built on.
        """
        if replaced is not None and not isinstance(replaced, Mapping):
            raise FlowError(f"replace is {replaced!r}, expected a dictionary: {{stage name: its new function}}")
        if isinstance(drop, str):
            raise FlowError(f"drop is {drop!r}, expected a list of stage names: [{drop!r}]")
        if add is not None and not callable(add):
            raise FlowError(
                f"add is {add!r}, expected a function that is given the flow and declares more stages on it"
            )
        copy = Dataflow(self.name, key_groups=self.key_groups, persist=self.persist_given)
        for name in drop:
            users = [s.name for s in self.consumers(self[name].name) if s.name not in drop]
            if users:
                raise FlowError(f"stage {name} cannot be dropped: {', '.join(users)} is built on it")
        unknown = [name for name in replaced or {} if name in drop or self[name].name in drop]
        if unknown:
            raise FlowError(f"stage {unknown[0]} is both replaced and dropped")
        for stage in self.stages:
            if stage.name not in drop:
                new = replace(stage, flow=copy)
                if replaced and stage.name in replaced:
                    new = _with_other_code(new, replaced[stage.name])
                copy._known |= copy._learned(new)
                copy._stages[stage.name] = new
        copy._views = {name: view for name, view in self._views.items() if {*view.stages} <= {*copy._stages}}
        if add is not None:
            add(copy)
        return copy

    def with_stages(self, change: Callable[[Stage], Stage]) -> Dataflow:
        """Returns a copy with what `change` makes of the stages, under the same names. What is declared later is not in
        it.
        """
        copy = self.changed()
        copy._stages = {stage.name: change(stage) for stage in copy.stages}
        return copy

    def _add(self, stage: Stage) -> Stage:
        check_name(stage.name, "stage name")
        if PART_SEPARATOR in stage.name:
            raise FlowError(f"stage {stage.name}: names with {PART_SEPARATOR!r} are kept for the parts of operators")
        if stage.name in self._stages:
            raise FlowError(f"dataflow {self.name}: two stages are named {stage.name!r}; give each its own name")
        if not callable(stage.function) and (stage.function is not None or stage.kind in _OF_FUNCTIONS):
            instead = _FOR_EXPRESSIONS.get(stage.kind)
            hint = f"; {instead} takes SQL text or a Column" if instead and stage.function is not None else ""
            raise FlowError(f"stage {stage.name}: {stage.function!r} is not a function{hint}")
        if stage.persist is not None:
            level = parse_level(stage.persist, f"stage {stage.name}")
            if level == NONE and stage.kind not in STATELESS:
                raise FlowError(
                    f"stage {stage.name}: persist='none', but the layers of a {stage.kind} are what it goes on from; "
                    "use 'memory' or 'disk'"
                )
        if not stage.deterministic and stage.persist in ("none", "memory"):
            raise FlowError(
                f"stage {stage.name}: what a stage with deterministic=False returns must be durable: "
                f"persist={stage.persist!r} does not fit"
            )
        if self._loop is not None:
            _check_in_loop(stage, self._loop)
            stage = replace(stage, loop=self._loop)
        else:
            inside = next((name for name in stage.inputs if name in self._stages and self._stages[name].loop), None)
            if inside is not None:
                raise FlowError(
                    f"stage {stage.name}: its input {inside} is inside the loop {self._stages[inside].loop}; "
                    f"build on {self._stages[inside].loop} itself, or inside its body"
                )
        self._known |= self._learned(stage)
        self._stages[stage.name] = stage
        return stage

    def undeclare(self, name: str) -> None:
        """Removes a stage, which is to be declared under another name. Raises FlowError where one is built on it."""
        if self.consumers(name):
            raise FlowError(f"stage {name} cannot be removed: {self.consumers(name)[0].name} is built on it")
        del self._stages[name], self._known[name]

    def _changed(self, stage: Stage) -> Stage:
        """Puts a declaration in the place of the one of its name, of which more is known now."""
        self._stages[stage.name] = stage
        return stage

    def _learned(self, stage: Stage) -> dict[str, Known]:
        """Returns what is known now of the columns of a stage and of its parts. Raises SchemaError or FlowError for a
        declaration that cannot be right.
        """
        if stage.kind == SOURCE:
            return {stage.name: declared.of_source(stage.name, stage.schema)}
        given = stage.inputs[0]
        known = self._known[given]
        if stage.kind == WINDOW:
            arguments = arguments_of(stage, WindowArguments)
            window = arguments.window
            found = declared.of_window(stage.name, window, stage.key, stage.aggregates, given, known)
            if arguments.is_final:
                found = declared.Known(found.columns)
            return {stage.name: found, f"{stage.name}{PART_SEPARATOR}late": declared.expanded(window, known)}
        if isinstance(stage.arguments, TimedUpdateArguments):
            return self._learned_of_update(stage, stage.arguments, given, known)
        if isinstance(stage.arguments, DedupeArguments):
            declared.check_times(stage.name, stage.arguments.window.time, given, known)
            return {
                f"{stage.name}{PART_SEPARATOR}late": known,
                stage.name: declared.of_dedupe(stage.name, stage.key, given, known),
            }
        if isinstance(stage.arguments, JoinArguments):
            inputs = [(name, self._known[name]) for name in stage.inputs]
            if isinstance(stage.arguments, TimedJoinArguments):
                return self._learned_of_timed_join(stage, stage.arguments, inputs)
            return {stage.name: declared.of_join(stage.name, stage.arguments.on, stage.arguments.how, inputs)}
        if stage.kind == UNION:
            return {stage.name: declared.of_union(stage.name, {name: self._known[name] for name in stage.inputs})}
        return {stage.name: _LEARN_OF_ONE[stage.kind](stage, given, known)}

    def _learned_of_update(
        self, stage: Stage, arguments: TimedUpdateArguments, given: str, known: Known
    ) -> dict[str, Known]:
        found = {stage.name: declared.of_update(stage.name, stage.key, stage.schema, given, known)}
        if arguments.window is not None:
            declared.check_times(stage.name, arguments.window.time, given, known)
            found[f"{stage.name}{PART_SEPARATOR}late"] = known
        for name, ddl in arguments.outputs.items():
            columns = columns_of(ddl, f"stage {stage.name}: output {name}", "'message string'")
            found[f"{stage.name}{PART_SEPARATOR}{name}"] = Known(columns)
        return found

    def _learned_of_timed_join(
        self, stage: Stage, arguments: TimedJoinArguments, inputs: Sequence[tuple[str, Known]]
    ) -> dict[str, Known]:
        for window, (given, known) in zip(arguments.windows, inputs, strict=True):
            declared.check_times(stage.name, window.time, given, known)
        joined = declared.of_join(stage.name, arguments.on, arguments.how, inputs)
        (_, left), (_, right) = inputs
        late = {f"{stage.name}{PART_SEPARATOR}late_{side}": known for side, known in (("left", left), ("right", right))}
        return {stage.name: Known(joined.columns), **late}

    def __getattr__(self, word: str) -> Any:
        if word.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {word!r}")
        raise unknown_operator(f"dataflow {self.name}", word, own_methods(Dataflow), in_flow=True)

    def __repr__(self) -> str:
        return f"<nosync.Dataflow {self.name}: {' '.join(self._stages)}>"


_LEARN_OF_ONE: Mapping[str, Callable[[Stage, str, Known], Known]] = {
    MAP: lambda s, given, known: declared.of_map(s.name, s.schema, known),
    FILTER: lambda s, given, known: known,
    WHERE: lambda s, given, known: declared.of_where(s.name, _expressions(s)[0], given, known),
    SELECT: lambda s, given, known: declared.of_select(s.name, _expressions(s), given, known),
    STATIC_JOIN: lambda s, given, known: declared.of_static_join(
        s.name, arguments_of(s, StaticJoinArguments).on, arguments_of(s, StaticJoinArguments).table, given, known
    ),
    AGGREGATE: lambda s, given, known: declared.of_aggregate(s.name, s.key, s.aggregates, given, known),
    DEDUPE: lambda s, given, known: declared.of_dedupe(s.name, s.key, given, known),
    UPDATE: lambda s, given, known: declared.of_update(s.name, s.key, s.schema, given, known),
    PER_KEY: lambda s, given, known: declared.of_per_key(s.name, s.key, s.schema, given, known),
    LOOP: lambda s, given, known: Known(known.columns),
}
"""The functions that say, by kind, how the columns of a stage with one input follow from that input's."""


def _checked_policy(source: str, at_safe_point: str) -> str:
    if at_safe_point not in POLICIES:
        raise FlowError(f"source {source}: at_safe_point is {at_safe_point!r}, expected one of {', '.join(POLICIES)}")
    return at_safe_point


def _expressions(stage: Stage) -> tuple[Any, ...]:
    return arguments_of(stage, ExpressionArguments).expressions


def _with_other_code(stage: Stage, code: Any) -> Stage:
    if stage.kind in _OF_FUNCTIONS and callable(code):
        old = stage.function
        is_per_key = old.is_per_key if isinstance(old, PickledFunction) else isinstance(old, PerKey)
        function = PerKey(stage.key, code) if is_per_key else code
        return replace(stage, function=function, version=None)
    if stage.kind in (SELECT, WHERE) and not callable(code):
        expressions = tuple(code) if isinstance(code, list | tuple) else (code,)
        return replace(stage, arguments=ExpressionArguments(expressions))
    if stage.kind in (AGGREGATE, WINDOW) and isinstance(code, Mapping):
        return replace(stage, aggregates=dict(code))
    raise FlowError(
        f"stage {stage.name}: a {stage.kind} cannot be replaced by {code!r}: give a function for map, filter and "
        "update, "
        "expressions for select and where, a dictionary of aggregates for aggregate and window"
    )


def _check_in_loop(stage: Stage, loop: str) -> None:
    allowed = {MAP, FILTER, UNION, SELECT, WHERE, JOIN}
    how = stage.arguments.how if isinstance(stage.arguments, JoinArguments) else INNER
    if stage.kind not in allowed or how != INNER:
        kind = f"{how} join" if stage.kind == JOIN else stage.kind
        raise FlowError(
            f"stage {stage.name}: a {kind} cannot be inside the loop {loop}: more rows must never take away others "
            "(use map, filter, select, where, union and inner join)"
        )
    if not stage.deterministic:
        raise FlowError(f"stage {stage.name}: a stage inside the loop {loop} must be deterministic")
