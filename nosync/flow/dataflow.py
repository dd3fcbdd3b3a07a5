"""Dataflows: a graph of named stages, declared without Spark and without data.

    flow = nosync.Dataflow("flights")
    flights = flow.source("flights", "origin string, carrier string, dep_delay double")
    flown = flights.map("flown", drop_cancelled)
    delays = flown.aggregate("delays", key=["origin"], n=nosync.count(), worst=nosync.max("dep_delay"))

Every stage is a pure function of its inputs' changes at an epoch and its own state before it. `Job` runs a flow.

All operators take `persist=`, how well the stage's layers are kept (see `persistence`); the default is the flow's for
sources and keyed stages, `memory` for stateless ones, and `none` for those that run in the JVM and have consumers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from nosync.flow import declared
from nosync.flow.declared import Known
from nosync.flow.foreign_words import unknown_operator
from nosync.flow.persistence import NONE, parse_level
from nosync.flow.pickled_function import PickledFunction
from nosync.kernels.aggregates import Aggregate
from nosync.kernels.windows import parse_window
from nosync.lsm.errors import FlowError, UnknownStageError
from nosync.lsm.manifests.input_policy import POLICIES
from nosync.lsm.manifests.manifest import KEEP
from nosync.lsm.model.layer import check_name
from nosync.lsm.platform.nearest import did_you_mean
from nosync.lsm.platform.store_marker import DEFAULT_KEY_GROUPS, MAX_KEY_GROUPS

SOURCE, MAP, FILTER, UNION = "source", "map", "filter", "union"
SELECT, WHERE, STATIC_JOIN = "select", "where", "static_join"
AGGREGATE, UPDATE, DEDUPE, JOIN, WINDOW, LOOP = "aggregate", "update", "dedupe", "join", "window", "loop"
IN_JVM = frozenset({SELECT, WHERE, STATIC_JOIN})
STATELESS = frozenset({MAP, FILTER, UNION}) | IN_JVM
PART_SEPARATOR = "__"
"""Stages that an operator consists of are named `<stage>__<part>`."""
_FOR_EXPRESSIONS = {MAP: "select()", FILTER: "where()"}
"""What is called in the place of these where there is no function."""

MapFunction = Callable[[pa.Table], pa.Table]
FilterFunction = Callable[[pa.Table], Any]
UpdateFunction = Callable[[pa.Table, pa.Table], pa.Table]
LoopBody = Callable[["Stage"], "Stage"]
KeyFunction = Callable[[tuple[Any, ...], list[dict[str, Any]], dict[str, Any] | None], Mapping[str, Any] | None]


@dataclass(frozen=True)
class Stage:
    """The declaration of one stage, and the handle to build on it. Made by the methods of Dataflow and Stage."""

    flow: Dataflow = field(repr=False, compare=False)
    name: str
    kind: str
    inputs: tuple[str, ...] = ()
    key: tuple[str, ...] = ()
    function: Callable[..., Any] | None = field(default=None, repr=False)
    schema: str | None = None
    """DDL: of a source its columns, of an update its state columns, of a map its output where it cannot be inferred."""
    aggregates: Mapping[str, Aggregate] = field(default_factory=dict)
    version: str | None = None
    persist: str | None = None
    deterministic: bool = True
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """What else the kind of stage needs."""
    loop: str | None = None
    """The loop in whose body it was built."""
    at_safe_point: str = KEEP
    """Of a source: what is done with an epoch's rows once everything computed from them is safe."""

    # --- stateless ------------------------------------------------------------------------------------------------

    def map(
        self,
        name: str,
        fn: MapFunction,
        *,
        schema: str | None = None,
        version: str | None = None,
        persist: str | None = None,
        deterministic: bool = True,
    ) -> Stage:
        """Applies a pure function to the rows of each shard and epoch: `fn(rows: pa.Table) -> pa.Table`.

        It may drop, change and add rows and columns. Each row must be treated by itself: how rows are cut into tables
        is not part of the contract. Over an input that changes (after aggregate or update) the table has a
        `_change_type` column that must be kept. `schema` (DDL) states the output where calling `fn` on an empty table
        cannot show it; `version` replaces the code in the fingerprint. `deterministic=False` is for functions that may
        return something else each time: what was recorded first counts, is durable before anything is computed from it,
        and is never computed again.
        """
        return self._then(
            name, MAP, function=fn, schema=schema, version=version, persist=persist, deterministic=deterministic
        )

    def flat_map(self, name: str, fn: MapFunction, **options: Any) -> Stage:
        """As `map`, for functions that make several rows of one: a synonym, for readers."""
        return self.map(name, fn, **options)

    def filter(
        self,
        name: str,
        predicate: FilterFunction,
        *,
        version: str | None = None,
        persist: str | None = None,
        deterministic: bool = True,
    ) -> Stage:
        """Keeps the rows for which `predicate(rows: pa.Table)`, a boolean array of the same length, is true."""
        return self._then(
            name, FILTER, function=predicate, version=version, persist=persist, deterministic=deterministic
        )

    def select(self, name: str, *expressions: Any, persist: str | None = None) -> Stage:
        """Spark expressions over each row, run in the JVM: `select("priced", "item", "price * n AS total")`.

        SQL text or Column objects, as for DataFrame.select; one row out for each row in. No aggregates, generators or
        random functions.
        """
        if not expressions:
            raise FlowError(f"stage {name}: give at least one column or expression")
        return self._then(name, SELECT, persist=persist, options={"expressions": tuple(expressions)})

    def where(self, name: str, condition: Any, *, persist: str | None = None) -> Stage:
        """Keeps the rows for which a Spark expression is true, run in the JVM: `where("big", "total > 100")`."""
        return self._then(name, WHERE, persist=persist, options={"expressions": (condition,)})

    def union(self, name: str, *others: Stage, persist: str | None = None) -> Stage:
        """The rows of this stage and of others with the same columns and types (UNION ALL)."""
        if not others:
            raise FlowError(f"stage {name}: give at least one other stage to unite with")
        self._check_siblings(name, others)
        inputs = (self.name, *(other.name for other in others))
        return self.flow._add(Stage(self.flow, name, UNION, inputs, persist=persist))

    def join_static(
        self, name: str, table: Any, *, on: Sequence[str], how: str = "inner", persist: str | None = None
    ) -> Stage:
        """Joins each row with a table that does not change, broadcast to the workers. `how`: inner or left.

        The contents of the table are part of the stage's fingerprint.
        """
        if how not in ("inner", "left"):
            raise FlowError(f"stage {name}: how={how!r}, expected 'inner' or 'left'")
        if not hasattr(table, "schema") or not hasattr(table, "join"):
            raise FlowError(f"stage {name}: {type(table).__name__} was given, expected a Spark DataFrame")
        options = {"table": table, "on": _check_key(name, on), "how": how}
        return self._then(name, STATIC_JOIN, persist=persist, options=options)

    # --- keyed ----------------------------------------------------------------------------------------------------

    def aggregate(self, name: str, *, key: Sequence[str], persist: str | None = None, **aggregates: Aggregate) -> Stage:
        """Keeps aggregates per key, up to date with all epochs: `n=nosync.count(), total=nosync.sum("x")`.

        Output: one row per key, key columns then one column per aggregate. With `key=[]` one row over all rows, which
        is there also where there are none; one shard makes it.
        """
        keys = () if isinstance(key, list | tuple) and not key else _check_key(name, key)
        return self._then(name, AGGREGATE, key=keys, aggregates=aggregates, persist=persist)

    def dedupe(self, name: str, *, key: Sequence[str] | None = None, persist: str | None = None) -> Stage:
        """Keeps one row per key, the first that came (default: per whole row). Where it is taken back, the next one."""
        checked = _check_key(name, key) if key is not None else ()
        return self._then(name, DEDUPE, key=checked, persist=persist)

    def update(
        self,
        name: str,
        *,
        key: Sequence[str],
        state: str,
        fn: UpdateFunction,
        ttl: int | None = None,
        version: str | None = None,
        persist: str | None = None,
        deterministic: bool = True,
    ) -> Stage:
        """Keeps arbitrary state per key: `fn(changes: pa.Table, state: pa.Table) -> pa.Table`, once a shard and epoch.

        `changes` has the input's columns and `_change_type`, in canonical order; `state` the rows (key columns and the
        columns of the DDL `state`) of those keys in `changes` that have one. `fn` returns the new rows of
        these keys, in any order; a key with state that it leaves out is deleted.
        `ttl`: a key without changes for so many epochs is deleted.
        """
        if ttl is not None and (isinstance(ttl, bool) or not isinstance(ttl, int) or ttl < 1):
            raise FlowError(f"stage {name}: ttl={ttl!r}, expected a number of epochs, 1 or more")
        return self._then(
            name,
            UPDATE,
            key=_check_key(name, key),
            function=fn,
            schema=state,
            version=version,
            persist=persist,
            deterministic=deterministic,
            options={"ttl": ttl},
        )

    def update_per_key(self, name: str, *, key: Sequence[str], state: str, fn: KeyFunction, **options: Any) -> Stage:
        """As `update`, one key at a time: `fn(key: tuple, changes: list[dict], state: dict | None) -> dict | None`.

        It gets the key's values, the epoch's changes of that key, and the state columns or None; it returns the new
        state columns, or None to delete the key. A Python call per key: use `update` where many keys change in an
        epoch.
        """
        if not callable(fn):
            raise FlowError(f"stage {name}: {fn!r} is not a function")
        per_key = PerKey(_check_key(name, key), fn)
        return self.update(name, key=key, state=state, fn=per_key, **options)

    def window(
        self,
        name: str,
        *,
        time: str,
        size: str | None = None,
        slide: str | None = None,
        gap: str | None = None,
        key: Sequence[str] = (),
        watermark: str | None = None,
        keep: str | None = None,
        policy: str | None = None,
        idle_after: int | None = None,
        persist: str | None = None,
        **aggregates: Aggregate,
    ) -> Stage:
        """Aggregates per key and window of event time: tumbling (`size`), sliding (`size`, `slide`), session (`gap`).

        Durations are text such as `"10 minutes"`. Output: key, `window_start`, `window_end`, the aggregates (of
        sessions `window_end` comes last); results are updated while rows come. `watermark`: how far behind the newest
        event time of all earlier epochs a window stays open; a row for a closed window is late: not counted, but
        recorded in the stage `.late`. Where rows come by several inputs (a union), each has a watermark, and that of
        the slowest counts; with `policy="max"` that of the fastest. `idle_after`: an input that had no row with a time
        for so many epochs is not waited for until it has one again (default: it always is). `keep`: how long after
        closing a window stays in the state (default: for ever). Windows begin at multiples of `slide` since 1970-01-01
        UTC. For windows of processing time add the tick to the rows as a column, so that replay sees the same.
        """
        keys = _check_key(name, key) if key else ()
        window = parse_window(
            name, time=time, size=size, slide=slide, gap=gap, watermark=watermark, keep=keep, policy=policy,
            idle_after=idle_after,
        )  # fmt: skip
        return self._then(name, WINDOW, key=keys, aggregates=aggregates, persist=persist, options={"window": window})

    @property
    def late(self) -> Stage:
        """Of a window stage: its late rows, as a stage to build on or to read."""
        if self.kind != WINDOW:
            raise FlowError(f"stage {self.name} is not a window: it has no late rows")
        return Stage(self.flow, f"{self.name}{PART_SEPARATOR}late", MAP, (self.name,))

    def join(
        self, name: str, other: Stage, *, on: Sequence[str], how: str = "inner", persist: str | None = None
    ) -> Stage:
        """Joins two stages that both may grow and change, kept up to date: `how` is inner, left or full.

        Output: the `on` columns, then the other columns of this stage and of `other`, whose names must differ.
        A null key matches nothing, as in SQL. All rows of both sides are kept as state.
        """
        if how not in ("inner", "left", "full"):
            raise FlowError(f"stage {name}: how={how!r}, expected 'inner', 'left' or 'full'")
        self._check_siblings(name, [other])
        options = {"on": _check_key(name, on), "how": how}
        return self.flow._add(Stage(self.flow, name, JOIN, (self.name, other.name), options=options, persist=persist))

    # --- loops ----------------------------------------------------------------------------------------------------

    def iterate(self, name: str, body: LoopBody, *, max_rounds: int = 1000, persist: str | None = None) -> Stage:
        """The smallest set of rows that holds this stage's rows and all that `body` derives from rows of the set.

            reached = roots.iterate("reached", lambda reached: reached.join("hops", edges, on=["node"]).map("next", to_node))

        `body` gets the set as a stage and returns one with the same columns, built from it and from stages outside with
        map, flat_map, filter, select, where, union and inner join: what more rows can only add to. Rows are a set; all
        columns must be usable as keys. Kept up to date with every epoch, deletions included (nosync.operators.loops);
        each round is a Spark job. A fixpoint that takes more than `max_rounds` rounds is an error.
        """
        if isinstance(max_rounds, bool) or not isinstance(max_rounds, int) or max_rounds < 1:
            raise FlowError(f"stage {name}: max_rounds={max_rounds!r}, expected a number of rounds, 1 or more")
        if self.flow._loop is not None:
            raise FlowError(f"stage {name}: a loop inside the loop {self.flow._loop} is not possible")
        options: dict[str, Any] = {"max_rounds": max_rounds}
        variable = self._then(name, LOOP, persist=persist, options=options)
        self.flow._loop = name
        try:
            result = body(variable)
        finally:
            self.flow._loop = None
        if not isinstance(result, Stage) or result.flow is not self.flow:
            raise FlowError(
                f"stage {name}: the loop's body returned {result!r}, expected a stage of dataflow {self.flow.name}"
            )
        if result.loop != name:
            raise FlowError(f"stage {name}: the loop's body returned {result.name}, which it did not build")
        options["result"] = result.name
        return variable

    # ----------------------------------------------------------------------------------------------------------------

    def __getattr__(self, word: str) -> Any:
        if word.startswith("_"):  # what Python and notebooks ask of any object
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {word!r}")
        raise unknown_operator(f"stage {self.name}", word, _own(Stage))

    def _then(self, name: str, kind: str, **fields: Any) -> Stage:
        return self.flow._add(Stage(self.flow, name, kind, (self.name,), **fields))

    def _check_siblings(self, name: str, others: Sequence[Stage]) -> None:
        for other in others:
            if not isinstance(other, Stage) or other.flow is not self.flow:
                raise FlowError(f"stage {name}: {other!r} is not a stage of dataflow {self.flow.name}")


def _own(kind: type) -> list[str]:
    """What users call on an object of a class."""
    return [name for name, what in vars(kind).items() if callable(what) and not name.startswith("_")]


def _check_key(stage: str, key: Sequence[str]) -> tuple[str, ...]:
    if isinstance(key, str):
        raise FlowError(f"stage {stage}: key is {key!r}, expected a list of column names: [{key!r}]")
    if not key or not all(isinstance(name, str) for name in key) or len(set(key)) != len(key):
        raise FlowError(f"stage {stage}: key is {list(key)}, expected one or more different column names")
    return tuple(key)


def _with_other_code(stage: Stage, code: Any) -> Stage:
    if stage.kind in (MAP, FILTER, UPDATE) and callable(code):
        old = stage.function
        is_per_key = old.is_per_key if isinstance(old, PickledFunction) else isinstance(old, PerKey)
        function = PerKey(stage.key, code) if is_per_key else code
        return replace(stage, function=function, version=None)
    if stage.kind in (SELECT, WHERE) and not callable(code):
        expressions = tuple(code) if isinstance(code, list | tuple) else (code,)
        return replace(stage, options={**stage.options, "expressions": expressions})
    if stage.kind in (AGGREGATE, WINDOW) and isinstance(code, Mapping):
        return replace(stage, aggregates=dict(code))
    raise FlowError(
        f"stage {stage.name}: a {stage.kind} cannot be replaced by {code!r}: give a function for map, filter and update, "
        "expressions for select and where, a dictionary of aggregates for aggregate and window"
    )


def _check_in_loop(stage: Stage, loop: str) -> None:
    allowed = {MAP, FILTER, UNION, SELECT, WHERE, JOIN}
    if stage.kind not in allowed or stage.options.get("how", "inner") != "inner":
        kind = f"{stage.options['how']} join" if stage.kind == JOIN else stage.kind
        raise FlowError(
            f"stage {stage.name}: a {kind} cannot be inside the loop {loop}: more rows must never take away others "
            "(use map, filter, select, where, union and inner join)"
        )
    if not stage.deterministic:
        raise FlowError(f"stage {stage.name}: a stage inside the loop {loop} must be deterministic")


@dataclass(frozen=True)
class PerKey:
    """Calls a function of one key for each key of an epoch's changes: what `update_per_key` gives to `update`."""

    key: tuple[str, ...]
    fn: KeyFunction

    def __call__(self, changes: pa.Table, state: pa.Table) -> pa.Table:
        before = {self._key_of(row): row for row in state.to_pylist()}
        grouped: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for row in changes.to_pylist():
            grouped.setdefault(self._key_of(row), []).append(row)
        after = []
        for key, rows in grouped.items():
            old = before.get(key)
            values = self.fn(key, rows, None if old is None else self._without_key(old))
            if values is not None:
                after.append({**dict(zip(self.key, key, strict=True)), **values})
        unknown = {name for row in after for name in row} - set(state.column_names)
        if unknown:
            raise FlowError(
                f"the function returned {sorted(unknown)}, which are not state columns; it has {state.column_names}"
            )
        return pa.Table.from_pylist(after, schema=state.schema)

    def _key_of(self, row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in self.key)

    def _without_key(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in row.items() if name not in self.key}


class Dataflow:
    """A graph of stages. `key_groups` is the most shards it can ever run with; it must be the store's.

    `persist`: the level of sources and keyed stages that do not say their own.
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
        """None: on as many nodes as the store keeps, which alone is this disk."""
        self._stages: dict[str, Stage] = {}
        self._known: dict[str, Known] = {}
        self._loop: str | None = None  # the loop whose body is being built

    def source(self, name: str, schema: str, *, persist: str | None = None, at_safe_point: str = KEEP) -> Stage:
        """An input: `schema` is Spark DDL such as `"origin string, dep_delay double"`. Each epoch brings new rows.

        `at_safe_point`: what is done with the rows of an epoch once everything computed from them is safe: `keep` (they
        can be replayed and explained), `disk` (one node of several keeps them), `drop`. A branch holds what came after
        its fork.
        """
        if at_safe_point not in POLICIES:
            raise FlowError(f"source {name}: at_safe_point is {at_safe_point!r}, expected one of {', '.join(POLICIES)}")
        return self._add(Stage(self, name, SOURCE, schema=schema, persist=persist, at_safe_point=at_safe_point))

    @property
    def stages(self) -> tuple[Stage, ...]:
        """In the order of declaration, which is a topological one: a stage is built on one that exists."""
        return tuple(self._stages.values())

    @property
    def sources(self) -> tuple[Stage, ...]:
        return tuple(stage for stage in self.stages if stage.kind == SOURCE)

    def consumers(self, name: str) -> tuple[Stage, ...]:
        return tuple(stage for stage in self.stages if name in stage.inputs)

    def __getitem__(self, name: str) -> Stage:
        """The stage of a name, to build on."""
        if name not in self._stages:
            raise UnknownStageError(
                f"no stage {name!r} in {self.name}; stages: {', '.join(self._stages)}{did_you_mean(name, self._stages)}"
            )
        return self._stages[name]

    def changed(
        self,
        replaced: Mapping[str, Any] | None = None,
        add: Callable[[Dataflow], object] | None = None,
        drop: Sequence[str] = (),
    ) -> Dataflow:
        """A copy with other functions for some stages, more stages, or fewer.

        `replaced`: by stage a function (map, filter, update), expressions (select, where), or a mapping of aggregates
        (aggregate, window). `add(flow)` builds on the copy. `drop`: stages that nothing is built on.
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
        if add is not None:
            add(copy)
        return copy

    def frozen(self, freeze: Callable[[Stage], Stage]) -> Dataflow:
        """A copy with what `freeze` makes of the stages, under the same names; what is declared later is not in it."""
        copy = self.changed()
        copy._stages = {stage.name: freeze(stage) for stage in copy.stages}
        return copy

    def _add(self, stage: Stage) -> Stage:
        check_name(stage.name, "stage name")
        if PART_SEPARATOR in stage.name:
            raise FlowError(f"stage {stage.name}: names with {PART_SEPARATOR!r} are kept for the parts of operators")
        if stage.name in self._stages:
            raise FlowError(f"dataflow {self.name}: two stages are named {stage.name!r}; give each its own name")
        if not callable(stage.function) and (stage.function is not None or stage.kind in (MAP, FILTER, UPDATE)):
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

    def _learned(self, stage: Stage) -> dict[str, Known]:
        """What is known of a stage's columns now, and of its parts'. Raises SchemaError or FlowError where it cannot be
        right.
        """
        if stage.kind == SOURCE:
            return {stage.name: declared.of_source(stage.name, stage.schema)}
        given = stage.inputs[0]
        known = self._known[given]
        if stage.kind == WINDOW:
            window = stage.options["window"]
            found = declared.of_window(stage.name, window, stage.key, stage.aggregates, given, known)
            return {stage.name: found, f"{stage.name}{PART_SEPARATOR}late": declared.expanded(window, known)}
        if stage.kind == JOIN:
            inputs = [(name, self._known[name]) for name in stage.inputs]
            return {stage.name: declared.of_join(stage.name, stage.options["on"], stage.options["how"], inputs)}
        if stage.kind == UNION:
            return {stage.name: declared.of_union(stage.name, {name: self._known[name] for name in stage.inputs})}
        return {stage.name: _LEARN_OF_ONE[stage.kind](stage, given, known)}

    def __getattr__(self, word: str) -> Any:
        if word.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {word!r}")
        raise unknown_operator(f"dataflow {self.name}", word, _own(Dataflow), in_flow=True)

    def __repr__(self) -> str:
        return f"<nosync.Dataflow {self.name}: {' '.join(self._stages)}>"


_LEARN_OF_ONE: Mapping[str, Callable[[Stage, str, Known], Known]] = {
    MAP: lambda s, given, known: declared.of_map(s.name, s.schema, known),
    FILTER: lambda s, given, known: known,
    WHERE: lambda s, given, known: known,
    SELECT: lambda s, given, known: declared.of_select(s.name, s.options["expressions"], given, known),
    STATIC_JOIN: lambda s, given, known: declared.of_static_join(
        s.name, s.options["on"], s.options["table"], given, known
    ),
    AGGREGATE: lambda s, given, known: declared.of_aggregate(s.name, s.key, s.aggregates, given, known),
    DEDUPE: lambda s, given, known: declared.of_dedupe(s.name, s.key, given, known),
    UPDATE: lambda s, given, known: declared.of_update(s.name, s.key, s.schema, given, known),
    LOOP: lambda s, given, known: Known(known.columns),
}
"""By kind, how the columns of a stage with one input follow from that input's."""
