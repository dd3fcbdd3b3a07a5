"""Windows that a watermark closes: what a plan says of them, after Spark has written them as expressions over each row.

Spark's analyzer turns `window(at, "5 minutes")` into a struct that is computed of `at`, and marks the column; that of the
event time has the delay of its watermark. The length of windows is read back from the struct.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from py4j.java_gateway import get_field

from nosync.flow.kinds import FINAL
from nosync.kernels.windows import MAX, MIN
from nosync.spark.plans.catalyst import Node, Refused, conjuncts, id_of, ids_in, items, kind_of, nodes_of, refused

WATERMARK_NODE = "EventTimeWatermark"
_DELAY, _WINDOW, _SESSION = "spark.watermarkDelayMs", "spark.timeWindow", "spark.sessionWindow"
_UNITS = (
    ("hour", 3_600_000_000), ("minute", 60_000_000), ("second", 1_000_000), ("millisecond", 1000), ("microsecond", 1),
)  # fmt: skip
_DAY_US = 86_400_000_000
_UTC = ("UTC", "Etc/UTC", "Z", "GMT", "+00:00")
ADDS_INTERVAL = ("TimeAdd", "TimestampAddInterval")
_PASSES_ALL = (
    "Project", "Union", "Expand", "SubqueryAlias", "ResolvedHint", "Repartition", "RepartitionByExpression",
    "Aggregate", "Deduplicate", "DeduplicateWithinWatermark",
)  # fmt: skip
"""What may be between a watermark and what goes by it. An aggregate or a deduplication there goes by it too."""
_MADE_OF_ELEMENTS = ("CreateArray", "CreateMap")
"""What has an element for each of its arguments."""
POLICY = "spark.sql.streaming.multipleWatermarkPolicy"


@dataclass(frozen=True)
class Watermark:
    """A watermark, as stages take it."""

    delay: str
    policy: str
    """Which input counts where rows come by several ones. One watermark over all of them is that of the fastest."""


@dataclass(frozen=True)
class EventWindow:
    """The windows by which a plan groups rows."""

    attribute: Node
    """The column of the plan that has the window."""
    time: Node
    made_in: Node
    """The part of the plan that puts rows into windows: Project or Expand."""
    above: tuple[Node, ...]
    """What is between it and the aggregate, the lowest first: Project and Filter."""
    size: str
    slide: str | None
    """None: of sessions, of which `size` is the gap."""
    watermark: Watermark


def windows_of(aggregate: Node, emit: str, whole: int) -> EventWindow | None:
    """Returns the windows by which an aggregate groups rows that have a watermark. None: it does not, or they are windows of
    windows that still change, of which no watermark says when they are over. `whole`: how many watermarks the query has.

    Raises Refused for windows that are not there, and for other groups by a time with a watermark.
    """
    if not whole:
        return None
    groups = items(aggregate.groupingExpressions())
    windows = next(
        (found for group in groups if (found := _window_of(aggregate, group, emit, whole)) is not None), None
    )
    if windows is not None:
        _check_alone(aggregate, windows)
    elif emit == FINAL or not _is_of_windows(aggregate):
        for group in groups:
            check_not_timed(group, "grouping")
    return windows


def _check_alone(aggregate: Node, windows: EventWindow) -> None:
    """Raises Refused where a window is used for more than grouping by it."""
    inside = [one for e in items(aggregate.aggregateExpressions()) for one in nodes_of(e)]
    calls = [one for one in inside if kind_of(one) == "AggregateExpression"]
    others = [group for group in items(aggregate.groupingExpressions()) if kind_of(group) != "AttributeReference"]
    used = next((e for e in [*calls, *others] if id_of(windows.attribute) in ids_in(e)), None)
    if used is not None:
        raise refused(used, "of the window itself: compute it after the aggregate, of its window column")


def _window_of(aggregate: Node, group: Node, emit: str, whole: int) -> EventWindow | None:
    """Returns the windows of a grouping expression. See `windows_of`."""
    marks = _marks(group)
    if _DELAY not in marks or not (_WINDOW in marks or _SESSION in marks):
        return None
    of_windows = _is_of_windows(aggregate)
    if of_windows and emit != FINAL:
        return None
    above: list[Node] = []
    plan = aggregate.child()
    while True:
        made = _made_in(plan, group)
        if made is not None:
            break
        if kind_of(plan) not in ("Project", "Filter"):
            return None  # a window of windows: it groups rows that are given when their window is final
        above.insert(0, plan)
        plan = plan.child()
    struct = made.child() if kind_of(made) == "Alias" else made
    if kind_of(struct) != "CreateNamedStruct":
        return None
    # Windows that are final come when the watermark has passed them, in order.
    watermark = watermark_of(aggregate, 0 if of_windows else marks[_DELAY], whole)
    zone = str(aggregate.conf().sessionLocalTimeZone())
    time, size, slide = _session(group, struct, zone) if _SESSION in marks else _aligned(group, struct)
    return EventWindow(group, time, plan, tuple(above), size, slide, watermark)


def _is_of_windows(aggregate: Node) -> bool:
    """Returns whether an aggregate is over one, whose watermark it has."""
    return any(kind_of(one) == "Aggregate" and has_watermark(one) for one in _nodes(aggregate.child()))


def of_rows(plan: Node, whole: int) -> tuple[Node, Watermark] | None:
    """Returns the column of a plan's rows that has a watermark. `whole`: how many the query has."""
    for one in items(plan.output()) if whole else ():
        delay = _marks(one).get(_DELAY)
        if delay is not None and kind_of(one.dataType()) != "StructType":
            return one, watermark_of(plan, delay, whole)
    return None


def check_not_timed(expression: Node, what: str) -> None:
    """Raises Refused for a key that has a watermark, of which nothing is made that goes by it."""
    if _DELAY in _marks(expression):
        raise refused(
            expression,
            f"{what} by a time with a watermark is there for window(...) alone: without CUBE or ROLLUP, and for windows of "
            "windows by window(window_time(window), ...)",
        )


def watermark_of(plan: Node, delay_ms: int, whole: int) -> Watermark:
    """Returns the watermark of what comes to a plan. `whole`: how many the query has.

    Raises Refused where Spark's would be another one: it has one for the whole query, which goes by all rows where
    withWatermark stands; here each stage has one, which goes by the rows that reach it.
    """
    marks = list(_watermarks(plan))
    name = str(marks[0].eventTime().name()) if marks else ""
    if len(marks) != whole:
        raise Refused(
            f"withWatermark({name!r}): Spark has one watermark for all of a query, that of the slowest part, and here each part "
            "has its own: make them two views"
        )
    if any(has_watermark(mark.child()) for mark in marks):
        raise Refused(f"withWatermark({name!r}): the rows have a watermark already: say it once")
    if len({_delay_of(one) for one in marks}) > 1:
        raise Refused(
            f"withWatermark({name!r}): rows that come together here have watermarks of different delays: give them the same"
        )
    _check_unions(plan, name, marks)
    for mark in marks:
        for one in _above(plan, mark):
            if not (one.equals(mark) or (one.equals(plan) and kind_of(plan) == "Aggregate")):
                _check_passes_all(one)
    return Watermark(duration(1000 * delay_ms), policy_of(plan) if len(marks) > 1 else MAX)


def policy_of(plan: Node) -> str:
    """Returns by which of several watermarks a query goes, as the session has it."""
    return str(plan.conf().getConfString(POLICY, MIN)).lower()


def _check_unions(plan: Node, name: str, marks: Sequence[Node]) -> None:
    """Raises Refused where rows with and without a watermark come together, or those of one input by two ways."""
    unions = [one for one in _nodes(plan) if kind_of(one) == "Union" and has_watermark(one)]
    if any(not has_watermark(child) for one in unions for child in items(one.children())):
        raise Refused(
            f"withWatermark({name!r}): a UNION has rows without one: say it after the UNION, or in each of its parts"
        )
    inputs = [_inputs_of(mark) for mark in marks]
    if len(inputs) > 1 and len(set.union(*inputs)) < sum(map(len, inputs)):
        raise Refused(
            f"withWatermark({name!r}): rows of one input come by two ways, each with a watermark: say it once, after the UNION"
        )


def _inputs_of(plan: Node) -> set[str]:
    if kind_of(plan) == "View":
        return {str(plan.desc().identifier().table())}
    children = items(plan.children())
    return set[str]().union(*map(_inputs_of, children)) if children else {str(plan.canonicalized().hashCode())}


def _check_passes_all(plan: Node) -> None:
    """Raises Refused for what leaves rows out between a watermark and what goes by it: they move Spark's watermark."""
    kind = kind_of(plan)
    if kind == "Deduplicate" and not any(_DELAY in _marks(key) for key in items(plan.keys())):
        raise Refused(
            "dropDuplicates without the time leaves rows out that move Spark's watermark: name the time as well, or say "
            "dropDuplicatesWithinWatermark"
        )
    if kind in _PASSES_ALL or (kind == "Generate" and _gives_rows_for_all(plan)):
        return
    if kind == "Join":
        raise Refused(
            "a join after withWatermark leaves rows out, which move Spark's watermark, or gives them long after their time: join "
            "before it, or have the windows in one view and the join in another"
        )
    if kind == "Generate":
        raise Refused(
            "explode after withWatermark leaves rows out whose list is empty or null, and they move Spark's watermark: "
            "explode before withWatermark, or say explode_outer"
        )
    if kind != "Filter":
        raise Refused(
            f"a {kind} between withWatermark and what goes by it leaves rows out that move Spark's watermark: do it before, or "
            "in a view over this one"
        )
    for condition in conjuncts(plan.condition()):
        is_there = kind_of(condition) == "IsNotNull" and _is_of_time(condition.child())
        if not is_there and not _says_where_a_window_is(condition):
            raise refused(
                condition,
                "rows are left out after withWatermark by their time, by what is computed after it, or after duplicates went, "
                "and Spark's watermark goes by all: filter before withWatermark, or have what goes by it in a view over the one "
                "with the filter",
            )


_OF_WINDOWS = frozenset(
    {
        "AttributeReference", "GetStructField", "PreciseTimestampConversion", "CreateNamedStruct", "KnownNullable",
        "Literal", "Add", "Subtract", "Multiply", "Remainder", "LessThan",
    }
)  # fmt: skip
"""Expressions that Spark makes windows of."""


def _gives_rows_for_all(generate: Node) -> bool:
    """Returns whether each row gives one at least: a list of no elements, or none at all, gives none."""
    if generate.outer():
        return True
    children = items(generate.generator().children())
    return len(children) == 1 and kind_of(children[0]) in _MADE_OF_ELEMENTS and bool(items(children[0].children()))


def _is_of_time(value: Node) -> bool:
    """Returns whether a value is there where the time is, or its window; a window of windows is computed of one."""
    attributes = [one for one in nodes_of(value) if kind_of(one) == "AttributeReference"]
    is_of_windows = all(_marks(one).keys() & {_DELAY, _WINDOW, _SESSION} for one in attributes)
    return bool(attributes) and is_of_windows and all(map(_is_there_with_all, nodes_of(value)))


def _is_there_with_all(value: Node) -> bool:
    """Returns whether an expression is there where all that it is made of is: Spark's of windows are."""
    if kind_of(value) == "CaseWhen":
        return bool(value.elseValue().isDefined())
    if kind_of(value) == "Cast":
        return kind_of(value.child()) == "Literal"
    return kind_of(value) in _OF_WINDOWS


def _says_where_a_window_is(condition: Node) -> bool:
    """Returns whether a condition is the one that Spark adds where windows slide by a part of their size."""
    if kind_of(condition) not in ("GreaterThanOrEqual", "LessThan"):
        return False
    left, right = items(condition.children())
    marked = [one for one in nodes_of(right) if kind_of(one) == "AttributeReference"]
    of_window = [_WINDOW in _marks(one) or _SESSION in _marks(one) for one in marked]
    return _DELAY in _marks(left) and bool(of_window) and all(of_window)


def _above(plan: Node, mark: Node) -> Iterator[Node]:
    """Yields the nodes from a plan down to one in it."""
    if any(one.equals(mark) for one in _watermarks(plan)):
        yield plan
        if not plan.equals(mark):
            for child in items(plan.children()):
                yield from _above(child, mark)


def watermarks_in(plan: Node) -> int:
    """Returns how many watermarks a plan has."""
    return sum(1 for _ in _watermarks(plan))


def has_watermark(plan: Node) -> bool:
    """Returns whether rows of a plan have a watermark."""
    return next(_watermarks(plan), None) is not None


def _watermarks(plan: Node) -> Iterator[Node]:
    return (one for one in _nodes(plan) if kind_of(one) == WATERMARK_NODE) if plan.isStreaming() else iter(())


def _nodes(plan: Node) -> Iterator[Node]:
    yield plan
    for child in items(plan.children()):
        yield from _nodes(child)


def is_within(condition: Node, window: EventWindow) -> bool:
    """Returns whether a condition only says that the event time is in the window."""
    if kind_of(condition) == "IsNotNull":
        return ids_in(condition) == {id_of(window.attribute)}
    if kind_of(condition) not in ("GreaterThanOrEqual", "LessThan"):
        return False
    left, right = items(condition.children())
    return ids_in(left) == {id_of(window.time)} and ids_in(right) == {id_of(window.attribute)}


def _marks(attribute: Node) -> dict[str, int]:
    if kind_of(attribute) != "AttributeReference":
        return {}
    found_marks: dict[str, int] = json.loads(str(attribute.metadata().json()))
    return found_marks


def _made_in(plan: Node, group: Node) -> Node | None:
    """Returns the expression that makes a group's window, if a plan does."""
    wanted = id_of(group)
    if kind_of(plan) == "Project":
        return next(
            (one for one in items(plan.projectList()) if kind_of(one) == "Alias" and id_of(one) == wanted), None
        )
    if kind_of(plan) == "Expand":
        ids = [id_of(one) for one in items(plan.output())]
        if wanted in ids:
            first = items(items(plan.projections())[0])
            expression: Node = first[ids.index(wanted)]
            return expression
    return None


def _aligned(group: Node, struct: Node) -> tuple[Node, str, str | None]:
    """Returns the time, the size and the slide of tumbling and sliding windows."""
    _, start, _, end = items(struct.children())
    rest = next((one for one in nodes_of(start) if kind_of(one) == "Remainder"), None)
    if rest is None or kind_of(items(rest.children())[0]) != "Subtract":
        raise refused(group, _UNKNOWN)
    since, slide = items(rest.children())
    time, begin = items(since.children())
    if _number(begin) != 0:
        raise refused(group, "windows begin at multiples of their slide since 1970: leave startTime out")
    added = next((one for one in nodes_of(end) if kind_of(one) == "Add"), None)
    if added is None:
        raise refused(group, _UNKNOWN)
    size_us, slide_us = _number(items(added.children())[1]), _number(slide)
    return _time_in(group, time), duration(size_us), duration(slide_us)


def _session(group: Node, struct: Node, zone: str) -> tuple[Node, str, str | None]:
    """Returns the time and the gap of sessions."""
    _, start, _, end = items(struct.children())
    time = _time_in(group, start)
    added = next((one for one in nodes_of(end) if kind_of(one) in ADDS_INTERVAL), None)
    if added is None:
        raise refused(group, _UNKNOWN)
    gap = items(added.children())[1]
    if not gap.foldable():
        raise refused(group, "sessions with a gap that depends on the row are not there: give one gap for all")
    return time, duration(length_us(group, gap, zone)), None


def length_us(clause: Node, interval: Node, zone: str) -> int:
    """Returns the microseconds of a constant interval. Raises Refused, naming the clause, for one that is not always as long."""
    value = interval.eval(None)
    days, us = 0, 0
    if isinstance(value, int):
        days, us = int(value / _DAY_US), value
    else:
        days = get_field(value, "days")
        us = days * _DAY_US + get_field(value, "microseconds")
        if get_field(value, "months"):
            raise refused(clause, "months are not always as long: say it in hours")
    if days and zone not in _UTC:
        raise refused(
            clause,
            f"where clocks change, as in {zone}, a day is not always 24 hours: set spark.sql.session.timeZone to UTC",
        )
    return us


_UNKNOWN = "this version of Spark says such windows in a way that is not known here"


def _time_in(group: Node, expression: Node) -> Node:
    times = [one for one in nodes_of(expression) if kind_of(one) == "AttributeReference"]
    if len({id_of(one) for one in times}) != 1:
        raise refused(group, "the time of a window is a column here: compute it before, with withColumn")
    return times[0]


def _number(literal: Node) -> int:
    return int(str(literal.eval(None)))


def _delay_of(mark: Node) -> int:
    at = id_of(mark.eventTime())
    return next(_marks(one)[_DELAY] for one in items(mark.output()) if id_of(one) == at)


def duration(us: int) -> str:
    """Returns a duration as users write it."""
    if us == 0:
        return "0 seconds"
    unit, length = next((unit, length) for unit, length in _UNITS if us % length == 0)
    return f"{us // length} {unit}{'' if us == length else 's'}"
