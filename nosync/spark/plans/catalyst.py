"""Spark's plans and expressions, as Python sees them through py4j."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from nosync.lsm.errors import FlowError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Node = Any
"""A plan, an expression, or another object of Catalyst in the JVM."""


SUBQUERIES = ("ScalarSubquery", "ListQuery", "Exists", "LateralSubquery")
"""Expressions that have a plan inside."""
_REPLACEABLE = ("RuntimeReplaceable", "InheritAnalysisRules", "RuntimeReplaceableAggregate")


class Refused(FlowError):
    """A clause of a query cannot be kept up to date. The message begins with the clause; whoever declares the view names it."""


def items(sequence: Any) -> list[Node]:
    """Returns the elements of a Scala sequence."""
    return [sequence.apply(i) for i in range(sequence.size())]


def sequence_of(session: SparkSession, elements: Sequence[Any]) -> Any:
    """Returns a Scala sequence."""
    return session._jvm.org.apache.spark.api.python.PythonUtils.toSeq(list(elements))  # type: ignore[union-attr]


def kind_of(node: Node) -> str:
    """Returns the name of the class of a node."""
    return str(node.getClass().getSimpleName()).rstrip("$")


def found(option: Any) -> Node | None:
    """Returns what a Scala option has."""
    return option.get() if option.isDefined() else None


def id_of(attribute: Node) -> int:
    """Returns the number by which an attribute is the same in all of a plan."""
    return int(attribute.exprId().id())


def ids_in(expression: Node) -> set[int]:
    """Returns the attributes that an expression is of."""
    return {id_of(attribute) for attribute in items(expression.references().toSeq())}


def conjuncts(condition: Node | None) -> list[Node]:
    """Returns the conditions that are all to be true."""
    if condition is None:
        return []
    if kind_of(condition) == "And":
        return [part for child in items(condition.children()) for part in conjuncts(child)]
    return [condition]


def nodes_of(expression: Node) -> Iterator[Node]:
    """Yields an expression and all that it is made of."""
    yield expression
    for child in items(expression.children()):
        yield from nodes_of(child)


def is_attribute(expression: Node) -> bool:
    return kind_of(expression) == "AttributeReference"


def has_one_row(plan: Node) -> bool:
    """Returns whether a plan has one row at most, whatever its inputs have. (Spark knows that these have none now.)"""
    while kind_of(plan) in ("Project", "Filter", "Sort", "SubqueryAlias"):
        plan = plan.child()
    if kind_of(plan) in ("GlobalLimit", "LocalLimit"):
        return str(plan.limitExpr().toString()) in ("0", "1")
    return kind_of(plan) == "OneRowRelation" or (kind_of(plan) == "Aggregate" and not items(plan.groupingExpressions()))


def refuse_null_on_overflow(call: Node, function: Node) -> None:
    """Raises Refused for an aggregate such as try_sum, which gives null for what is too large."""
    if str(function.prettyName()).startswith("try_"):
        raise refused(
            call,
            "what is too large would be an error and not null: sum a wider type, as in sum(CAST(x AS decimal(38, 0)))",
        )


def refused(node: Node, why: str) -> Refused:
    """Returns the error for a plan or an expression. It shows the clause, and the line where it begins."""
    try:
        text = str(node.sql())
    except Exception:  # noqa: BLE001 - a plan has no SQL, and some expressions have none either
        text = str(node.simpleString(120))
    return Refused(f"{text if len(text) <= 160 else text[:157] + '...'}{_line(node)}: {why}")


def _line(node: Node) -> str:
    line = found(node.origin().line())
    return "" if line is None else f", line {line}"


def is_replaceable(node: Node) -> bool:
    """Returns whether an expression is one that Spark replaces before it runs: it prints what users wrote, and not what it
    is.
    """
    of = node.getClass()
    while of is not None:
        if any(str(one.getSimpleName()) in _REPLACEABLE for one in of.getInterfaces()):
            return True
        of = of.getSuperclass()
    return False
