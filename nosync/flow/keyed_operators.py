"""The operators that keep state by key, as methods of a stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from nosync.flow.arguments import (
    Arguments,
    DedupeArguments,
    TimedJoinArguments,
    TimedUpdateArguments,
    UpdateArguments,
    WindowArguments,
)
from nosync.flow.join_operators import JoinOperators
from nosync.flow.key_names import check_key_names
from nosync.flow.kinds import (
    AGGREGATE,
    CHANGES,
    DEDUPE,
    FINAL,
    FORGET,
    INNER_PARTS,
    PER_KEY,
    RETRACT,
    UPDATE,
    WINDOW,
)
from nosync.flow.per_key import KeyFunction, PerKey
from nosync.kernels.aggregates import Aggregate
from nosync.kernels.windows import Window, check_policy, duration_us, parse_window, policy_of
from nosync.lsm.errors import FlowError

if TYPE_CHECKING:
    from nosync.flow.dataflow import Dataflow
    from nosync.flow.stage import Stage

UpdateFunction = Callable[[pa.Table, pa.Table], pa.Table]
PerKeyFunction = Callable[[pa.Table], pa.Table]


class KeyedOperators(JoinOperators):
    """A stage has these beside the operators that treat each row by itself."""

    if TYPE_CHECKING:
        flow: Dataflow
        name: str
        kind: str

        arguments: Arguments

        def _part(self, part: str, index: int) -> Stage: ...

    def aggregate(self, name: str, *, key: Sequence[str], persist: str | None = None, **aggregates: Aggregate) -> Stage:
        """Keeps aggregates per key, up to date with all epochs: `n=nosync.count(), total=nosync.sum("x")`.

        Output: one row per key, key columns then one column per aggregate. With `key=[]` one row over all rows, which
        is there also where there are none; one shard makes it.
        """
        keys = () if isinstance(key, list | tuple) and not key else check_key_names(name, key)
        return self._then(name, AGGREGATE, key=keys, aggregates=aggregates, persist=persist)

    def dedupe(
        self,
        name: str,
        *,
        key: Sequence[str] | None = None,
        time: str | None = None,
        watermark: str | None = None,
        within: str | None = None,
        policy: str | None = None,
        idle_after: int | None = None,
        persist: str | None = None,
    ) -> Stage:
        """Keeps one row per key (default: per whole row), the first that came. Where that is taken back, it keeps the
        next.

        With `time` and `watermark` a key is forgotten once the watermark is `within` past the time of its first row
        (default: as long as the delay of the watermark): Spark's dropDuplicatesWithinWatermark. Its input may only
        grow, and so does it. Rows behind the watermark are in the stage `.late`. `policy` and `idle_after` are those of
        `window`.
        """
        checked = check_key_names(name, key) if key is not None else ()
        if time is None:
            given = {"watermark": watermark, "within": within, "policy": policy, "idle_after": idle_after}
            first = next((word for word, value in given.items() if value is not None), None)
            if first is not None:
                raise FlowError(f"stage {name}: {first}= goes by event time: say which column has it, as in time='at'")
            return self._then(name, DEDUPE, key=checked, persist=persist)
        if watermark is None:
            raise FlowError(
                f"stage {name}: time= is for keys that are forgotten, which takes watermark=, as in "
                "watermark='10 minutes'; leave time= out to remember each key for ever"
            )
        check_policy(name, watermark, policy, idle_after)
        delay_us = duration_us(name, watermark, least=0)
        window = Window.of_times(time, delay_us, policy_of(policy, idle_after), idle_after)
        within_us = delay_us if within is None else duration_us(name, within, least=0)
        arguments = DedupeArguments(window, within_us)
        return self._then(name, DEDUPE, key=checked, persist=persist, arguments=arguments)

    def update(
        self,
        name: str,
        *,
        key: Sequence[str],
        state: str,
        fn: UpdateFunction,
        ttl: int | str | None = None,
        expiry: str | None = None,
        time: str | None = None,
        watermark: str | None = None,
        timer: str | None = None,
        outputs: Mapping[str, str] | None = None,
        policy: str | None = None,
        idle_after: int | None = None,
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

        With `time` and `watermark` the state goes by event time. `timer` names the state column (a timestamp) that says
        when a key is to be looked at: once the watermark passes it, `state` has that key though it has no changes, and
        `_timer_fired` is true. `ttl` may be a duration then: how far the watermark is past a key's newest row when its
        state is forgotten. Rows behind the watermark are in `.late`. `outputs` (DDL by name) are further rows, which
        only grow: `fn` returns `{"state": ..., "<name>": ...}` then, and `.output(name)` is a stage. `policy` and
        `idle_after` are those of `window`.
        """
        keys = check_key_names(name, key)
        arguments: Arguments
        given = {"watermark": watermark, "timer": timer, "policy": policy, "idle_after": idle_after}
        if time is not None or outputs is not None or any(value is not None for value in given.values()):
            arguments = _in_time(name, time, watermark, timer, ttl, outputs, policy, idle_after)
            if outputs and not deterministic:
                raise FlowError(
                    f"stage {name}: outputs= and deterministic=False do not go together: state and outputs are recorded "
                    "one by one, and could be those of two runs. Call the service in a map before it"
                )
            _check_expiry(name, expiry, None)
        else:
            arguments = _in_epochs(name, ttl, expiry)
        return self._then(
            name,
            UPDATE,
            key=keys,
            function=fn,
            schema=state,
            version=version,
            persist=persist,
            deterministic=deterministic,
            arguments=arguments,
        )

    def output(self, name: str) -> Stage:
        """Returns further rows of an `update(outputs=)`, as a stage to build on or to read."""
        outputs = self.arguments.outputs if isinstance(self.arguments, TimedUpdateArguments) else {}
        if name not in outputs:
            raise FlowError(f"stage {self.name} has no output {name!r}; outputs: {', '.join(outputs) or 'none'}")
        return self._part(name, 0)

    def update_per_key(self, name: str, *, key: Sequence[str], state: str, fn: KeyFunction, **options: Any) -> Stage:
        """Does what `update` does, one key at a time: `fn(key: tuple, changes: list[dict], state: dict | None)`.

        `fn` gets the key's values, the epoch's changes of that key, and the state columns or None; it returns the new
        state columns, or None to delete the key. With `timer` it is also called for keys whose timer fired, and
        `state["_timer_fired"]` says so. With `outputs` it returns both: `(state, {"alerts": [{...}]})`. A Python call
        per key: use `update` where many keys change in an epoch.
        """
        if not callable(fn):
            raise FlowError(f"stage {name}: {fn!r} is not a function")
        per_key = PerKey(check_key_names(name, key), fn)
        return self.update(name, key=key, state=state, fn=per_key, **options)

    def per_key(
        self,
        name: str,
        *,
        key: Sequence[str],
        fn: PerKeyFunction,
        schema: str | None = None,
        version: str | None = None,
        persist: str | None = None,
    ) -> Stage:
        """Makes rows of all rows that a key has, anew whenever one of them comes or goes: `fn(rows: pa.Table) -> pa.Table`.

        For what depends on the other rows of a key: ranks, the newest three, the row before, running sums. `fn` gets the
        rows of the keys that changed, those of a key side by side, and returns rows that have the key columns; what it
        makes of a key must depend on that key's rows only. `key=[]`: all rows are of one key, and one shard. What is taken
        back and given after an epoch is what differs. All rows are kept as state, and an epoch reads those of the keys
        that it changes: it is for keys of a few thousand rows. `schema` (DDL of the columns beside the key) states the
        output where calling `fn` on an empty table cannot show it. Spark's `groupBy(key).applyInPandas`, kept up to date.
        """
        keys = () if isinstance(key, list | tuple) and not key else check_key_names(name, key)
        return self._then(name, PER_KEY, key=keys, function=fn, schema=schema, version=version, persist=persist)

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
        emit: str = CHANGES,
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
        With `emit="final"` a window gives its row once, when the watermark has passed it, and is forgotten: Spark's
        output mode append. Nothing of it is ever taken back.
        """
        keys = check_key_names(name, key) if key else ()
        window = parse_window(
            name, time=time, size=size, slide=slide, gap=gap, watermark=watermark, keep=keep, policy=policy,
            idle_after=idle_after,
        )  # fmt: skip
        _check_expiry(name, expiry, "keep" if keep is not None else None)
        _check_emit(name, emit, watermark, keep)
        arguments = WindowArguments(window, expiry, emit)
        return self._then(name, WINDOW, key=keys, aggregates=aggregates, persist=persist, arguments=arguments)

    @property
    def late(self) -> Stage:
        """Returns the rows of a window, or of a dedupe or an update by event time, that came too late, as a stage to build
        on or to read.
        """
        of_sides = isinstance(self.arguments, TimedJoinArguments)
        if of_sides or not self.arguments.event_times:
            also = ": say late_left or late_right" if of_sides else ""
            raise FlowError(f"stage {self.name} is not a window: it has no late rows{also}")
        return self._part("late", 0)

    @property
    def late_left(self) -> Stage:
        """Returns the rows of this stage that came too late for an interval join."""
        return self._late_of("left", 0)

    @property
    def late_right(self) -> Stage:
        """Returns the rows of the other stage that came too late for an interval join."""
        return self._late_of("right", 1)

    def _late_of(self, side: str, index: int) -> Stage:
        if not isinstance(self.arguments, TimedJoinArguments):
            raise FlowError(f"stage {self.name} is no join by event time: it has no late rows of a side")
        return self._part(f"late_{side}", index)


def _in_epochs(name: str, ttl: int | str | None, expiry: str | None) -> UpdateArguments:
    """Returns the arguments of an update whose state does not go by event time. Raises FlowError."""
    if ttl is not None and (isinstance(ttl, bool) or not isinstance(ttl, int) or ttl < 1):
        also = "; a duration goes by event time, which takes time= and watermark=" if isinstance(ttl, str) else ""
        raise FlowError(f"stage {name}: ttl={ttl!r}, expected a number of epochs, 1 or more{also}")
    _check_expiry(name, expiry, "ttl" if ttl is not None else None)
    return UpdateArguments(ttl, expiry)


def _in_time(
    name: str,
    time: str | None,
    watermark: str | None,
    timer: str | None,
    ttl: int | str | None,
    outputs: Mapping[str, str] | None,
    policy: str | None,
    idle_after: int | None,
) -> TimedUpdateArguments:
    """Returns the arguments of an update by event time, or with several outputs. Raises FlowError for what does not fit."""
    if (time is None) != (watermark is None):
        raise FlowError(
            f"stage {name}: time= and watermark= go together, as in time='at', watermark='10 minutes': the state goes by "
            "how far event time has come"
        )
    if time is None and (timer is not None or policy is not None or idle_after is not None):
        raise FlowError(f"stage {name}: timer=, policy= and idle_after= go by event time: give time= and watermark=")
    if ttl is not None and not (isinstance(ttl, str) and time is not None):
        raise FlowError(
            f"stage {name}: ttl={ttl!r}: beside time=, timer= or outputs= it is a duration of event time, such as "
            "'1 hour', which takes time= and watermark="
        )
    if outputs is not None and not (
        isinstance(outputs, Mapping) and all(isinstance(one, str) for pair in outputs.items() for one in pair)
    ):
        raise FlowError(
            f"stage {name}: outputs={outputs!r}, expected DDL by name, as in {{'alerts': 'message string'}}"
        )
    wrong = [one for one in outputs or {} if one in {"state", "late", *INNER_PARTS} or not one.isidentifier()]
    if wrong:
        raise FlowError(f"stage {name}: an output cannot be named {wrong[0]!r}: give it another name")
    if time is None or watermark is None:
        return TimedUpdateArguments(dict(outputs or {}), timer, None, None)
    check_policy(name, watermark, policy, idle_after)
    delay_us = duration_us(name, watermark, least=0)
    window = Window.of_times(time, delay_us, policy_of(policy, idle_after), idle_after)
    return TimedUpdateArguments(
        dict(outputs or {}), timer, None if ttl is None else duration_us(name, str(ttl)), window
    )


def _check_emit(stage: str, emit: str, watermark: str | None, keep: str | None) -> None:
    if emit not in (CHANGES, FINAL):
        raise FlowError(
            f"stage {stage}: emit={emit!r}, expected {CHANGES!r} (a result each time it changes) or {FINAL!r} (each "
            "result once, when its window is closed)"
        )
    if emit == FINAL and watermark is None:
        raise FlowError(
            f"stage {stage}: emit={FINAL!r} gives a window when the watermark has passed it: say watermark=, as in "
            "watermark='10 minutes'"
        )
    if emit == FINAL and keep is not None:
        raise FlowError(f"stage {stage}: emit={FINAL!r} forgets a window when it is given: leave keep= out")


def _check_expiry(stage: str, expiry: str | None, bound: str | None) -> None:
    """`bound` is the argument that bounds the state, if one was given."""
    if expiry not in (None, FORGET, RETRACT):
        raise FlowError(
            f"stage {stage}: expiry={expiry!r}, expected {FORGET!r} (what was made of a row that expires stays) or "
            f"{RETRACT!r} (it is taken back)"
        )
    if expiry is not None and bound is None:
        raise FlowError(f"stage {stage}: expiry= says what becomes of rows that expire: give ttl= or keep= with it")
