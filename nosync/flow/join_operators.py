"""The joins of two stages, as methods of a stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nosync.flow.arguments import AsofJoinArguments, IntervalJoinArguments, JoinArguments
from nosync.flow.key_names import check_key_names
from nosync.flow.kinds import JOIN
from nosync.kernels.join_types import INNER, JOIN_TYPES, LEFT
from nosync.kernels.windows import Window, check_policy, duration_us, policy_of
from nosync.lsm.errors import FlowError

if TYPE_CHECKING:
    from nosync.flow.stage import Stage


class JoinOperators:
    """A stage has these beside the other operators."""

    if TYPE_CHECKING:

        def _then(self, name: str, kind: str, *others: Stage, **fields: Any) -> Stage: ...

        def _check_siblings(self, name: str, others: Sequence[Stage]) -> None: ...

    def join(
        self,
        name: str,
        other: Stage,
        *,
        on: Sequence[str],
        how: str = "inner",
        time: tuple[str, str] | None = None,
        within: tuple[str, str] | None = None,
        watermark: str | tuple[str, str] | None = None,
        policy: str | None = None,
        idle_after: int | None = None,
        persist: str | None = None,
    ) -> Stage:
        """Joins two stages that both may grow and change, kept up to date.

        `how` is inner, left, right, full, left_semi (this stage's rows that have a match) or left_anti (those that have
        none), or any other name that Spark has for these. Output: the `on` columns, then the other columns of this
        stage and of `other`, whose names must differ; of left_semi and left_anti the columns of this stage. A null key
        matches nothing, as in SQL. All rows of both sides are kept as state, until a side forgets them (`ttl=` of
        update, `keep=` of window): what was joined with them stays.

        An interval join also compares event times: `time=("shown", "clicked"), within=("0 seconds", "1 hour")` joins
        clicks from 0 seconds to 1 hour after what was shown; a bound may be negative. `watermark` (one for both sides,
        or one for each) bounds both: a row is kept until no row that is in time can match it, and one without a match
        is given then. Both stages may only grow, and so does the join. Rows behind the watermark are in `.late_left`
        and `.late_right`. `policy` and `idle_after` are those of `window`.
        """
        of_type = JOIN_TYPES.get(how.lower()) if isinstance(how, str) else None
        if of_type is None:
            raise FlowError(
                f"stage {name}: how={how!r}, expected {', '.join(map(repr, dict.fromkeys(JOIN_TYPES.values())))}"
            )
        self._check_siblings(name, [other])
        keys = check_key_names(name, on)
        arguments = JoinArguments(keys, of_type)
        given = {"time": time, "within": within, "watermark": watermark, "policy": policy, "idle_after": idle_after}
        if any(value is not None for value in given.values()):
            arguments = _interval(name, keys, of_type, time, within, watermark, policy, idle_after)
        return self._then(name, JOIN, other, arguments=arguments, persist=persist)

    def join_asof(
        self,
        name: str,
        other: Stage,
        *,
        on: Sequence[str],
        time: tuple[str, str],
        watermark: str | tuple[str, str],
        how: str = "inner",
        within: str | None = None,
        policy: str | None = None,
        idle_after: int | None = None,
        persist: str | None = None,
    ) -> Stage:
        """Joins each row with the newest row of `other` that has its `on` columns and is not younger: an order with the
        rate of its time. Flink's temporal join by event time, and `merge_asof` of Pandas.

        `time` has the columns of event time of both sides, as in `("ordered", "valid_from")`. `how` is inner, or left:
        a row that nothing is old enough for comes with nulls. `within`: how much older the other row may be (default:
        as old as it is); one that is older counts as none. A row comes once, when the watermark has passed its time, so
        the result does not depend on the order in which rows come. Of rows of `other` with equal times the last counts.
        Both stages may only grow, and so does the join. `other` keeps for each key the newest row that the watermark
        has passed. `watermark`, `policy`, `idle_after`, `.late_left` and `.late_right` are those of an interval join.
        """
        of_type = JOIN_TYPES.get(how.lower()) if isinstance(how, str) else None
        if of_type not in (INNER, LEFT):
            raise FlowError(f"stage {name}: how={how!r}, expected 'inner' or 'left'")
        self._check_siblings(name, [other])
        keys = check_key_names(name, on)
        within_us = None if within is None else duration_us(name, within, least=0)
        windows = _windows_of_sides(name, time, watermark, policy, idle_after)
        arguments = AsofJoinArguments(keys, of_type, windows=windows, within_us=within_us)
        return self._then(name, JOIN, other, arguments=arguments, persist=persist)


def _interval(
    name: str,
    on: tuple[str, ...],
    how: str,
    time: tuple[str, str] | None,
    within: tuple[str, str] | None,
    watermark: str | tuple[str, str] | None,
    policy: str | None,
    idle_after: int | None,
) -> IntervalJoinArguments:
    """Returns the arguments of an interval join. Raises FlowError for what is missing, or does not fit."""
    windows = _windows_of_sides(name, time, watermark, policy, idle_after)
    bounds = _pair(
        name, "within", within,
        "both bounds of right time less left time, as in within=('0 seconds', '1 hour'); without both of them rows "
        "would be kept for ever",
    )  # fmt: skip
    lower_us, upper_us = (_signed_duration_us(name, bound) for bound in bounds)
    if lower_us > upper_us:
        raise FlowError(f"stage {name}: within={within!r}: the first bound is larger than the second: swap them")
    return IntervalJoinArguments(on, how, windows=windows, lower_us=lower_us, upper_us=upper_us)


def _windows_of_sides(
    name: str,
    time: tuple[str, str] | None,
    watermark: str | tuple[str, str] | None,
    policy: str | None,
    idle_after: int | None,
) -> tuple[Window, ...]:
    """Returns the event time of each side of a join. Raises FlowError for what is missing, or does not fit."""
    times = _pair(name, "time", time, "the columns of event time of both sides, as in time=('shown', 'clicked')")
    if isinstance(watermark, str):
        watermark = (watermark, watermark)
    delays = _pair(name, "watermark", watermark, "how late rows may be, as in watermark='10 minutes'")
    check_policy(name, watermark, policy, idle_after)
    return tuple(
        Window.of_times(column, duration_us(name, delay, least=0), policy_of(policy, idle_after), idle_after)
        for column, delay in zip(times, delays, strict=True)
    )


def _pair(name: str, word: str, given: object, expected: str) -> tuple[str, str]:
    if not (isinstance(given, tuple | list) and len(given) == 2 and all(isinstance(one, str) for one in given)):
        raise FlowError(f"stage {name}: {word}={given!r}, expected {expected}")
    return given[0], given[1]


def _signed_duration_us(name: str, text: str) -> int:
    negative = text.lstrip().startswith("-")
    us = duration_us(name, text.lstrip().removeprefix("-"), least=0)
    return -us if negative else us
