"""Joins of two streams whose conditions bound the difference of their event times: interval joins, as Spark has them too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nosync.kernels.windows import MIN
from nosync.spark.plans.catalyst import Node, Refused, id_of, is_replaceable, items, kind_of
from nosync.spark.plans.event_time import (
    ADDS_INTERVAL,
    POLICY,
    Watermark,
    duration,
    length_us,
    of_rows,
    policy_of,
    watermarks_in,
)

_COMPARISONS = {"GreaterThanOrEqual": (1, 0), "GreaterThan": (1, 1), "LessThanOrEqual": (-1, 0), "LessThan": (-1, 1)}
"""By comparison: in which direction its left side is the larger one, and the microseconds that equality does without."""


@dataclass(frozen=True)
class Interval:
    """An interval join: how far the time of the right side may be from that of the left one."""

    times: tuple[Node, Node]
    watermarks: tuple[Watermark, Watermark]
    lower_us: int
    upper_us: int

    @property
    def within(self) -> tuple[str, str]:
        return duration(self.lower_us), duration(self.upper_us)


def interval_of(plan: Node, conditions: Sequence[Node], whole: int) -> tuple[Interval, list[Node]] | None:
    """Returns the interval of a join, and the conditions that say something else. None: its sides do not both have a
    watermark. `whole`: how many the query has. Raises Refused where there is no bound on both sides.
    """
    of_sides = [watermarks_in(side) for side in (plan.left(), plan.right())]
    if not all(of_sides):
        return None
    timed_left, timed_right = of_rows(plan.left(), whole - of_sides[1]), of_rows(plan.right(), whole - of_sides[0])
    if timed_left is None or timed_right is None:
        return None
    (left, of_left), (right, of_right) = timed_left, timed_right
    zone = str(plan.conf().sessionLocalTimeZone())
    bounds, rest = list[_Bound](), []
    for one in conditions:
        found = _bounds(one, (id_of(left), id_of(right)), zone)
        bounds += found
        rest += [] if found else [one]
    lower = [us for larger, us in bounds if larger > 0]
    upper = [us for larger, us in bounds if larger < 0]
    if not lower or not upper:
        raise Refused(
            "a join of two streams with watermarks needs bounds on both times, as in seen BETWEEN at AND at + INTERVAL 1 HOUR: "
            "so rows are kept no longer than they can match. Without bounds leave withWatermark out, and all rows are kept"
        )
    if policy_of(plan) != MIN:
        raise Refused(f"a join of two streams goes by the slower one here: set {POLICY} to {MIN}")
    if max(lower) > min(upper):
        raise Refused("a join of two streams: no times are within its bounds")
    return Interval((left, right), (of_left, of_right), max(lower), min(upper)), rest


_Bound = tuple[int, int]
"""A bound of right time less left time: 1 for a lower one and -1 for an upper one, and the microseconds."""


def _bounds(condition: Node, times: tuple[int, int], zone: str) -> list[_Bound]:
    """Returns the bounds that a condition is; none for one that says something else."""
    kind = kind_of(condition)
    if kind == "Between":
        value, low, high = (_moved(one, zone) for one in (condition.input(), condition.lower(), condition.upper()))
        both = [_bound(value, low, times, 1, 0), _bound(value, high, times, -1, 0)]
    elif kind in _COMPARISONS:
        a, b = (_moved(one, zone) for one in items(condition.children()))
        both = [_bound(a, b, times, *_COMPARISONS[kind])]
    else:
        return []
    return [one for one in both if one is not None] if None not in both else []


def _bound(
    a: tuple[int, int] | None, b: tuple[int, int] | None, times: tuple[int, int], larger: int, strict_us: int
) -> _Bound | None:
    """Returns the bound that a comparison of two moved times is."""
    if a is None or b is None:
        return None
    (of_a, moved_a), (of_b, moved_b) = a, b
    if (of_a, of_b) == (times[1], times[0]):  # right + x >= left + y
        return larger, moved_b - moved_a + larger * strict_us
    if (of_a, of_b) == times:  # left + x >= right + y
        return -larger, moved_a - moved_b - larger * strict_us
    return None


def _moved(expression: Node, zone: str) -> tuple[int, int] | None:
    """Returns the column of an expression that is a time, and by how many microseconds it is moved."""
    kind = kind_of(expression)
    if kind == "AttributeReference":
        return id_of(expression), 0
    if is_replaceable(expression):
        return _moved(expression.replacement(), zone)
    if kind == "Cast" and expression.dataType().sql() == items(expression.children())[0].dataType().sql():
        return _moved(expression.child(), zone)
    if kind not in ADDS_INTERVAL:
        return None
    time, interval = items(expression.children())
    below = _moved(time, zone)
    if below is None or not interval.foldable():
        return None
    return below[0], below[1] + length_us(expression, interval, zone)
