"""Rules of Spark's optimizer, called one by one, also on the plans that subqueries have inside."""

from __future__ import annotations

from typing import Any

from pyspark.sql import SparkSession

from nosync.spark.plans.catalyst import SUBQUERIES as SUBQUERY_KINDS
from nosync.spark.plans.catalyst import Node, items, kind_of
from nosync.spark.session import contains

SUBQUERIES = (
    "RewriteNonCorrelatedExists",
    "PullupCorrelatedPredicates",
    "RewriteCorrelatedScalarSubquery",
    "RewriteLateralSubquery",
    "RewritePredicateSubquery",
)
"""Rules that make joins of subqueries, in Spark's order."""
_NESTING = 3
"""How deep subqueries may be in each other."""
_CONDITIONS = (
    "NullPropagation", "OptimizeIn", "ConstantFolding", "BooleanSimplification", "SimplifyConditionals",
    "PushFoldableIntoBranches", "SimplifyBinaryComparison", "ReplaceNullWithFalseInPredicate", "PushDownPredicates",
)  # fmt: skip
"""Rules that bring NOT to what it is said of, and conditions of joins to the side that they are of."""
_SEMI_JOINS = ("RemoveNoopOperators", "PushLeftSemiLeftAntiThroughJoin")
_COMPARISONS = (
    "EqualTo",
    "EqualNullSafe",
    "LessThan",
    "LessThanOrEqual",
    "GreaterThan",
    "GreaterThanOrEqual",
    "In",
    "InSet",
)
_MOST_PASSES = 10
_PULL_UP = SUBQUERIES[1]
_AWARE = "org.apache.spark.sql.catalyst.expressions.TimeZoneAwareExpression"


class Rules:
    """The rules, for the plans of one session."""

    def __init__(self, session: SparkSession) -> None:
        self._session, self._jvm = session, session._jvm
        self._known: dict[str, Any] = {}
        self._functions: dict[str, Any] = {}

    def apply(self, plan: Node, *names: str) -> Node:
        """Returns what rules make of a plan, one after the other."""
        for name in names:
            plan = self._rule(name).apply(plan)
        return plan

    def without_subqueries(self, plan: Node) -> Node:
        """Returns a plan with joins in the places of subqueries.

        What Spark's rules make of `x IN (SELECT ...)` is false where SQL says null, and what they make of `x NOT IN (SELECT
        ...)` is not. So they count on conditions in which NOT is said of nothing else than that, in the filters below joins.
        Conditions that are so already are left alone.
        """
        for _ in range(_NESTING):
            if self._has_hidden_in(plan):  # others keep the plan, and so the stages, that they have in stores
                plan = self._with_plain_conditions(self._within(plan, _PULL_UP))
            plan = self.apply(plan, *SUBQUERIES)
        return plan

    def with_semi_joins_first(self, plan: Node) -> Node:
        """Returns a plan whose joins are of the rows that subqueries let through, where these ask for those of one side."""
        if not contains(self._session, plan, "LEFT_SEMI_OR_ANTI_JOIN"):
            return plan
        for _ in range(_MOST_PASSES):  # each brings one through one join
            before = plan
            plan = self.apply(plan, *_SEMI_JOINS)
            if plan.fastEquals(before):
                break
        return plan

    def _has_hidden_in(self, plan: Node) -> bool:
        """Returns whether a plan, or one of its subqueries, has an IN of a subquery in something that is not AND and OR, or a
        NOT of one in a join's condition.
        """
        if not contains(self._session, plan, "IN_SUBQUERY"):
            return False
        is_join = kind_of(plan) == "Join"
        return any(self._hides_in(one, is_join=is_join) for one in items(plan.expressions())) or any(
            map(self._has_hidden_in, items(plan.children()))
        )

    def _hides_in(self, e: Node, *, is_join: bool) -> bool:
        if not contains(self._session, e, "IN_SUBQUERY"):
            return False
        kind, children = kind_of(e), items(e.children())
        if kind == "Not" and (is_join or kind_of(children[0]) != "InSubquery"):
            return True
        if kind in _COMPARISONS and any(contains(self._session, one, "IN_SUBQUERY") for one in children):
            return True
        if kind in SUBQUERY_KINDS and self._has_hidden_in(e.plan()):
            return True
        return any(self._hides_in(one, is_join=is_join) for one in children)

    def _with_plain_conditions(self, plan: Node) -> Node:
        for _ in range(_MOST_PASSES):
            before = plan
            for name in _CONDITIONS:
                plan = self._within(plan, name)
            if plan.fastEquals(before):
                break
        return plan

    def _within(self, plan: Node, name: str) -> Node:
        """Returns what a rule makes of a plan, and of the plans of its subqueries."""
        if name not in self._functions:
            self._functions[name] = self._function_of(self._rule(name))
        return plan.transformWithSubqueries(self._functions[name])

    def _function_of(self, rule: Any) -> Any:
        (method,) = (
            one
            for one in rule.getClass().getMethods()
            if one.getName() == "apply" and one.getParameterTypes()[0].getSimpleName() == "LogicalPlan"
        )
        lookup = self._jvm.java.lang.invoke.MethodHandles.publicLookup()  # type: ignore[union-attr]
        return function_of(self._jvm, lookup.unreflect(method).bindTo(rule))

    def _rule(self, name: str) -> Any:
        if name not in self._known:
            package = self._jvm.org.apache.spark.sql.catalyst.optimizer  # type: ignore[union-attr]
            self._known[name] = getattr(getattr(package, f"{name}$"), "MODULE$")
        return self._known[name]

    def has_subqueries_in_groups(self, plan: Node) -> bool:
        """Returns whether a plan groups by what a subquery says."""
        groups = items(plan.groupingExpressions()) if kind_of(plan) == "Aggregate" else []
        return any(contains(self._session, group, "PLAN_EXPRESSION") for group in groups) or any(
            map(self.has_subqueries_in_groups, items(plan.children()))
        )


def function_of(jvm: Any, handle: Any) -> Any:
    """Returns a method of the JVM as a function of Scala, which Python need not be asked for."""
    lang = jvm.java.lang
    function = lang.invoke.MethodHandleProxies.asInterfaceInstance(lang.Class.forName("scala.Function1"), handle)
    return getattr(getattr(jvm.scala, "PartialFunction$"), "MODULE$").fromFunction(function)


def in_utc(session: SparkSession, plan: Node) -> Node:
    """Returns an analyzed plan of which all expressions go by UTC, as those of epochs do. Its constants stay as they are."""
    jvm: Any = session._jvm
    lang, invoke = jvm.java.lang, jvm.java.lang.invoke
    handles, type_of = invoke.MethodHandles, invoke.MethodType.methodType
    aware, any_ = lang.Class.forName(_AWARE), lang.Class.forName("java.lang.Object")
    lookup = handles.publicLookup()
    with_zone = lookup.findVirtual(aware, "withTimeZone", type_of(aware, lang.Class.forName("java.lang.String")))
    zone = session.sparkContext._gateway.new_array(lang.Object, 1)  # type: ignore[union-attr]
    zone[0] = "UTC"
    changed = handles.insertArguments(with_zone, 1, zone).asType(type_of(any_, any_))
    is_aware = lookup.unreflect(any_.getClass().getMethod("isInstance", _classes(session, any_))).bindTo(aware)
    return plan.transformAllExpressionsWithSubqueries(
        function_of(jvm, handles.guardWithTest(is_aware, changed, handles.identity(any_)))
    )


def _classes(session: SparkSession, *classes: Any) -> Any:
    found = session.sparkContext._gateway.new_array(session._jvm.java.lang.Class, len(classes))  # type: ignore[union-attr]
    for i, one in enumerate(classes):
        found[i] = one
    return found
