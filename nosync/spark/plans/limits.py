"""LIMIT and OFFSET, in any order and inside of each other: which rows, by their places, of what is ordered."""

from __future__ import annotations

from dataclasses import dataclass

from nosync.spark.plans.catalyst import Node, items, kind_of

_LIMITS = ("GlobalLimit", "LocalLimit")
_PASSED = (*_LIMITS, "Offset", "Project", "SubqueryAlias")


@dataclass(frozen=True)
class Limited:
    """Says what a limit takes: of the rows of a plan those at places `first` + 1 to `end` (None: all that come after)."""

    of: Node
    projects: tuple[Node, ...]
    """What is computed of them, the lowest first."""
    first: int
    end: int | None

    @property
    def is_nothing(self) -> bool:
        return self.end is not None and self.end <= self.first


def limited(plan: Node) -> Limited:
    """Returns what a limit or an offset takes, and those below it."""
    passed = []
    while kind_of(plan) in _PASSED:
        passed.append(plan)
        plan = plan.child()
    first, end = 0, None
    projects = []
    for node in reversed(passed):
        if kind_of(node) == "Project":
            projects.append(node)
        elif kind_of(node) == "Offset":
            first += int(node.offsetExpr().eval(None))
        elif kind_of(node) in _LIMITS:
            asked = first + int(node.limitExpr().eval(None))
            end = asked if end is None else min(end, asked)
    return Limited(plan, tuple(projects), first, end)


def same_rows_below(plan: Node) -> Node | None:
    """Returns what is below a limit that takes one of rows that are all the same, as Spark asks whether there are any."""
    below = plan.child().child() if kind_of(plan.child()) == "LocalLimit" else plan.child()
    if kind_of(below) != "Project" or int(plan.limitExpr().eval(None)) != 1:
        return None
    return (
        below if all(kind_of(one) == "Alias" and one.child().foldable() for one in items(below.projectList())) else None
    )
