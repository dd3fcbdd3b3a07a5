"""Stages as they are declared: each is the handle to build more of the flow on. Without Spark and without data.

Every stage is a pure function of its inputs' changes at an epoch and its own state before it.

All operators take `persist=`, how well the stage's layers are kept (see `persistence`). The default is the flow's for
sources and keyed stages, `memory` for stateless ones, and `none` for those that run in the JVM and have consumers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from nosync.flow.foreign_words import unknown_operator
from nosync.kernels.aggregates import Aggregate
from nosync.kernels.join_types import JOIN_TYPES
from nosync.kernels.windows import parse_window
from nosync.lsm.errors import FlowError
from nosync.lsm.manifests.manifest import KEEP

if TYPE_CHECKING:
    from nosync.flow.dataflow import Dataflow

SOURCE, MAP, FILTER, UNION = "source", "map", "filter", "union"
SELECT, WHERE, STATIC_JOIN = "select", "where", "static_join"
AGGREGATE, UPDATE, DEDUPE, JOIN, WINDOW, LOOP = "aggregate", "update", "dedupe", "join", "window", "loop"
IN_JVM = frozenset({SELECT, WHERE, STATIC_JOIN})
STATELESS = frozenset({MAP, FILTER, UNION}) | IN_JVM
FORGET, RETRACT = "forget", "retract"
"""What becomes of results when a row expires that they were made of: they stay, or are taken back."""
PART_SEPARATOR = "__"
"""Stages that an operator consists of are named `<stage>__<part>`."""
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
    """DDL: the columns of a source, the state columns of an update, or the output of a map where it cannot be inferred.
    """
    aggregates: Mapping[str, Aggregate] = field(default_factory=dict)
    version: str | None = None
    persist: str | None = None
    deterministic: bool = True
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The arguments that only some kinds of stage have, by name."""
    loop: str | None = None
    """The loop in whose body it was built."""
    at_safe_point: str = KEEP
    """The name of what is done with an epoch's rows of a source once everything computed from them is safe."""

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
        """Does what `map` does: a synonym, for readers, where a function makes several rows of one."""
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
        """Computes Spark expressions over each row, in the JVM: `select("priced", "item", "price * n AS total")`.

        Expressions are SQL text or Column objects, as for DataFrame.select. There is one row out for each row in: no
        aggregates, generators or random functions.
        """
        if not expressions:
            raise FlowError(f"stage {name}: give at least one column or expression")
        return self._then(name, SELECT, persist=persist, options={"expressions": tuple(expressions)})

    def where(self, name: str, condition: Any, *, persist: str | None = None) -> Stage:
        """Keeps the rows for which a Spark expression is true, run in the JVM: `where("big", "total > 100")`."""
        return self._then(name, WHERE, persist=persist, options={"expressions": (condition,)})

    def union(self, name: str, *others: Stage, persist: str | None = None) -> Stage:
        """Unites the rows of this stage and of others with the same columns and types (UNION ALL)."""
        if not others:
            raise FlowError(f"stage {name}: give at least one other stage to unite with")
        self._check_siblings(name, others)
        inputs = (self.name, *(other.name for other in others))
        return self.flow._add(Stage(self.flow, name, UNION, inputs, persist=persist))

    def join_static(
        self, name: str, table: Any, *, on: Sequence[str], how: str = "inner", persist: str | None = None
    ) -> Stage:
        """Joins each row with a table that does not change, broadcast to the workers. `how` is inner or left.

        The contents of the table are part of the stage's fingerprint.
        """
        if how not in ("inner", "left"):
            raise FlowError(f"stage {name}: how={how!r}, expected 'inner' or 'left'")
        if not hasattr(table, "schema") or not hasattr(table, "join"):
            raise FlowError(f"stage {name}: {type(table).__name__} was given, expected a Spark DataFrame")
        options = {"table": table, "on": check_key_names(name, on), "how": how}
        return self._then(name, STATIC_JOIN, persist=persist, options=options)

    # --- keyed ----------------------------------------------------------------------------------------------------

    def aggregate(self, name: str, *, key: Sequence[str], persist: str | None = None, **aggregates: Aggregate) -> Stage:
        """Keeps aggregates per key, up to date with all epochs: `n=nosync.count(), total=nosync.sum("x")`.

        Output: one row per key, key columns then one column per aggregate. With `key=[]` one row over all rows, which
        is there also where there are none; one shard makes it.
        """
        keys = () if isinstance(key, list | tuple) and not key else check_key_names(name, key)
        return self._then(name, AGGREGATE, key=keys, aggregates=aggregates, persist=persist)

    def dedupe(self, name: str, *, key: Sequence[str] | None = None, persist: str | None = None) -> Stage:
        """Keeps one row per key (default: per whole row), the first that came. Where that is taken back, it keeps the
        next.
        """
        checked = check_key_names(name, key) if key is not None else ()
        return self._then(name, DEDUPE, key=checked, persist=persist)

    def update(
        self,
        name: str,
        *,
        key: Sequence[str],
        state: str,
        fn: UpdateFunction,
        ttl: int | None = None,
        expiry: str | None = None,
        version: str | None = None,
        persist: str | None = None,
        deterministic: bool = True,
    ) -> Stage:
        """Keeps arbitrary state per key: `fn(changes: pa.Table, state: pa.Table) -> pa.Table`, once a shard and epoch.

        `changes` has the input's columns and `_change_type`, in canonical order; `state` the rows (key columns and the
        columns of the DDL `state`) of those keys in `changes` that have one. `fn` returns the new rows of
        these keys, in any order; a key with state that it leaves out is deleted.
        With `ttl` the state of a key without changes for so many epochs is forgotten: the key has no row any more, and
        what later stages have made of it stays. With `expiry="retract"` they take it back.
        """
        if ttl is not None and (isinstance(ttl, bool) or not isinstance(ttl, int) or ttl < 1):
            raise FlowError(f"stage {name}: ttl={ttl!r}, expected a number of epochs, 1 or more")
        _check_expiry(name, expiry, "ttl" if ttl is not None else None)
        return self._then(
            name,
            UPDATE,
            key=check_key_names(name, key),
            function=fn,
            schema=state,
            version=version,
            persist=persist,
            deterministic=deterministic,
            options={"ttl": ttl, "expiry": expiry},
        )

    def update_per_key(self, name: str, *, key: Sequence[str], state: str, fn: KeyFunction, **options: Any) -> Stage:
        """Does what `update` does, one key at a time: `fn(key: tuple, changes: list[dict], state: dict | None)`.

        `fn` gets the key's values, the epoch's changes of that key, and the state columns or None; it returns the new
        state columns, or None to delete the key. A Python call per key: use `update` where many keys change in an
        epoch.
        """
        if not callable(fn):
            raise FlowError(f"stage {name}: {fn!r} is not a function")
        per_key = PerKey(check_key_names(name, key), fn)
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
        expiry: str | None = None,
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
        closing a window stays in the state (default: for ever); then it is forgotten, as by `ttl` of `update`. Windows
        begin at multiples of `slide` since 1970-01-01 UTC. For windows of processing time add the tick to the rows as a
        column, so that replay sees the same.
        """
        keys = check_key_names(name, key) if key else ()
        window = parse_window(
            name, time=time, size=size, slide=slide, gap=gap, watermark=watermark, keep=keep, policy=policy,
            idle_after=idle_after,
        )  # fmt: skip
        _check_expiry(name, expiry, "keep" if keep is not None else None)
        options = {"window": window, "expiry": expiry}
        return self._then(name, WINDOW, key=keys, aggregates=aggregates, persist=persist, options=options)

    @property
    def late(self) -> Stage:
        """Returns the late rows of a window stage, as a stage to build on or to read."""
        if self.kind != WINDOW:
            raise FlowError(f"stage {self.name} is not a window: it has no late rows")
        return Stage(self.flow, f"{self.name}{PART_SEPARATOR}late", MAP, (self.name,))

    def join(
        self, name: str, other: Stage, *, on: Sequence[str], how: str = "inner", persist: str | None = None
    ) -> Stage:
        """Joins two stages that both may grow and change, kept up to date.

        `how` is inner, left, right, full, left_semi (this stage's rows that have a match) or left_anti (those that have
        none), or any other name that Spark has for these. Output: the `on` columns, then the other columns of this
        stage and of `other`, whose names must differ; of left_semi and left_anti the columns of this stage. A null key
        matches nothing, as in SQL. All rows of both sides are kept as state, until a side forgets them (`ttl=` of
        update, `keep=` of window): what was joined with them stays.
        """
        of_type = JOIN_TYPES.get(how.lower()) if isinstance(how, str) else None
        if of_type is None:
            raise FlowError(
                f"stage {name}: how={how!r}, expected {', '.join(map(repr, dict.fromkeys(JOIN_TYPES.values())))}"
            )
        self._check_siblings(name, [other])
        options = {"on": check_key_names(name, on), "how": of_type}
        return self.flow._add(Stage(self.flow, name, JOIN, (self.name, other.name), options=options, persist=persist))

    # --- loops ----------------------------------------------------------------------------------------------------

    def iterate(self, name: str, body: LoopBody, *, max_rounds: int = 1000, persist: str | None = None) -> Stage:
        """Computes the smallest set of rows that holds this stage's rows and all that `body` derives from rows of the
        set.

            def follow(reached):
                return reached.join("hops", edges, on=["node"]).map("next", to_node)

            reached = roots.iterate("reached", follow)

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
        raise unknown_operator(f"stage {self.name}", word, own_methods(Stage))

    def _then(self, name: str, kind: str, **fields: Any) -> Stage:
        return self.flow._add(Stage(self.flow, name, kind, (self.name,), **fields))

    def _check_siblings(self, name: str, others: Sequence[Stage]) -> None:
        for other in others:
            if not isinstance(other, Stage) or other.flow is not self.flow:
                raise FlowError(f"stage {name}: {other!r} is not a stage of dataflow {self.flow.name}")


def own_methods(kind: type) -> list[str]:
    """Returns the names of what users call on an object of a class."""
    return [name for name, what in vars(kind).items() if callable(what) and not name.startswith("_")]


def _check_expiry(stage: str, expiry: str | None, bound: str | None) -> None:
    """`bound` is the argument that bounds the state, if one was given."""
    if expiry not in (None, FORGET, RETRACT):
        raise FlowError(
            f"stage {stage}: expiry={expiry!r}, expected {FORGET!r} (what was made of a row that expires stays) or "
            f"{RETRACT!r} (it is taken back)"
        )
    if expiry is not None and bound is None:
        raise FlowError(f"stage {stage}: expiry= says what becomes of rows that expire: give ttl= or keep= with it")


def check_key_names(stage: str, key: Sequence[str]) -> tuple[str, ...]:
    """Returns the key as a tuple. Raises FlowError for what is no list of different names."""
    if isinstance(key, str):
        raise FlowError(f"stage {stage}: key is {key!r}, expected a list of column names: [{key!r}]")
    if not key or not all(isinstance(name, str) for name in key) or len(set(key)) != len(key):
        raise FlowError(f"stage {stage}: key is {list(key)}, expected one or more different column names")
    return tuple(key)


@dataclass(frozen=True)
class PerKey:
    """Calls a function of one key for each key of an epoch's changes. `update_per_key` gives it to `update`."""

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
