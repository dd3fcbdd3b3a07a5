"""Expressions of a plan as expressions over the columns of a stage: SQL text, and where that cannot say it a Column.

Whatever is made is analyzed again over a table of the stage's columns, and must be the same to Spark.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from py4j.java_gateway import JavaObject
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql.classic.column import Column as ClassicColumn

from nosync.spark.errors import without_log
from nosync.spark.expressions import OF_TODAY, code_of, is_of_today, quoted, text_of
from nosync.spark.plans.catalyst import (
    SUBQUERIES,
    Node,
    id_of,
    is_replaceable,
    items,
    kind_of,
    nodes_of,
    refused,
    sequence_of,
)
from nosync.spark.plans.relation import Coded, Expression, Relation
from nosync.spark.session import ZONE, conf_set, contains, is_in_utc

_NAME = "value"
_COLLATED = re.compile(r"string collate (\w+)", re.IGNORECASE)
"""In the text of a type."""
_WITHOUT_TEXT = (
    "LambdaFunction",
    "KnownNullable",
    "KnownNotNull",
    "PreciseTimestampConversion",
    "PythonUDF",
    "ScalaUDF",
)
"""What Spark prints in a way that it cannot read, or that does not say what it is."""
_TYPES, _MODES = "org.apache.spark.sql.types.", ("EvalMode", "EvalContext", "Val")
_MAP = re.compile(r"(scala\.collection\.immutable\.(Map|HashMap)|.*CaseInsensitiveMap)\b")
"""The names of classes of arguments of expressions: how they begin, end, or are."""
_PLAIN = ("IntegerType", "StringType")
"""What constants are mostly of."""
_FAILING = ("ElementAt", "GetArrayItem")
"""What takes an element that may not be there."""
Known = Sequence[tuple[Node, str]]
"""Expressions, each with the column that has its value already."""

_DECIMAL = "org.apache.spark.sql.types.Decimal"
"""A value, and no type, in the package of types."""


def _unprinted(nodes: Sequence[Node], text: str) -> list[str]:
    """Returns what tells expressions from others and is not in their text: Spark leaves out schemas, options and casts of what
    it has resolved, and calls by one name what fails and what gives null.
    """
    found = []
    casts = Counter(str(one.dataType().sql()) for one in nodes if kind_of(one) == "Cast")
    for place, one in enumerate(nodes):
        kind = kind_of(one)
        if kind == "NamedLambdaVariable":
            continue
        arguments = one.productIterator()
        while arguments.hasNext():
            argument = arguments.next()
            if not isinstance(argument, JavaObject):
                continue
            of_class = str(argument.getClass().getName())
            if of_class == _DECIMAL:
                found.append(f"{place} {kind} {argument.toString()}")
            elif of_class.startswith(_TYPES):
                if kind == "Cast":
                    is_said = text.count(f" AS {argument.sql()})") >= casts[str(argument.sql())]
                else:
                    is_said = kind == "Literal" and kind_of(argument) in _PLAIN and one.value() is not None
                found += [] if is_said else [f"{place} {kind} {argument.json()}"]
            elif _MAP.match(of_class) and argument.nonEmpty():
                found.append(f"{place} {kind} {sorted(str(pair.toString()) for pair in items(argument.toSeq()))}")
            elif of_class.endswith(_MODES) and "TRY" in str(argument.toString()):
                found.append(f"{place} {kind} try")
        if kind in _FAILING and not one.failOnError():
            found.append(f"{place} {kind} null")
    return found


class Expressions:
    """Makes expressions for stages; made for one session."""

    def __init__(self, session: SparkSession) -> None:
        self._session = session
        self._catalyst = session._jvm.org.apache.spark.sql.catalyst  # type: ignore[union-attr]
        self._tables: dict[str, DataFrame] = {}
        self._shared: dict[str, Node] = {}

    def of(self, expression: Node, relation: Relation, known: Known = ()) -> Expression:
        """Returns an expression over a relation's columns. Raises Refused for one that is not a function of one row."""
        if not expression.deterministic():
            raise refused(expression, "it is another value each time: add it to the input")
        if contains(self._session, expression, "CURRENT_LIKE"):
            raise refused(expression, "it depends on when, or by whom, it is asked: add the time to the input")
        if contains(self._session, expression, "CAST") and any(is_of_today(one) for one in nodes_of(expression)):
            raise refused(expression, OF_TODAY)
        if (collated := _COLLATED.search(str(expression.dataType().catalogString()))) is not None:
            raise refused(
                expression,
                f"it has the collation {collated[1]}, and texts are compared by their bytes: give lower(column), say",
            )
        table = self._table(relation.types)
        attributes = {str(one.name()): one for one in items(table._jdf.queryExecution().analyzed().output())}
        meant = self._rewritten(expression, relation.columns, known, attributes.__getitem__)
        if kind_of(meant) == "AttributeReference":
            return quoted(str(meant.name()))
        if not any(kind_of(one) in _WITHOUT_TEXT for one in nodes_of(meant)):
            with self._times_in_utc(meant):
                text = str(meant.sql())
                if self._is_same(table, text, meant):
                    return text
        by_name = self._rewritten(expression, relation.columns, known, self._unresolved)
        column = self._column(by_name)
        if self._is_same(table, column, meant):
            said = self._said(by_name, column)
            return Coded(column if is_in_utc(self._session) else self._column(self._in_utc(by_name)), said)
        raise refused(expression, "what it means cannot be said over the rows of one stage")

    def _column(self, e: Node) -> Column:
        return ClassicColumn(self._session._jvm.org.apache.spark.sql.classic.ExpressionUtils.column(e))  # type: ignore[union-attr]

    def _in_utc(self, e: Node) -> Node:
        """Returns an expression that goes by UTC, as epochs do, where it went by the session's time zone."""
        if not contains(self._session, e, "TIME_ZONE_AWARE_EXPRESSION"):
            return e
        children = items(e.children())
        made = e.withNewChildren(sequence_of(self._session, list(map(self._in_utc, children)))) if children else e
        return made.withTimeZone("UTC") if "withTimeZone" in dir(made) else made

    def subqueries_in(self, e: Node, known: Known) -> Iterator[Node]:
        """Yields the scalar subqueries of an expression, but for those in what is known."""
        if not contains(self._session, e, "SCALAR_SUBQUERY") or any(what.semanticEquals(e) for what, _ in known):
            return
        if kind_of(e) == "ScalarSubquery":
            yield e
        for child in items(e.children()):
            yield from self.subqueries_in(child, known)

    def fields_of(self, struct: Node) -> list[Node]:
        """Returns the expressions of a struct's fields."""
        nothing = self._session._jvm.scala.Option.empty()  # type: ignore[union-attr]
        return [self._catalyst.expressions.GetStructField(struct, i, nothing) for i in range(struct.dataType().size())]

    def is_there(self, value: Node) -> Node:
        """Returns the expression of whether a value is not null."""
        return self._catalyst.expressions.IsNotNull(value)

    def literal(self, value: object, type_: Node) -> str:
        """Returns a constant as SQL text."""
        literal = self._catalyst.expressions.Literal.create(value, type_)
        with self._times_in_utc(literal):
            return str(literal.sql())

    @contextlib.contextmanager
    def _times_in_utc(self, expression: Node) -> Iterator[None]:
        """Has texts say and read instants in UTC, as epochs do; where there are none the session's zone is left as it is."""
        with (
            contextlib.nullcontext()
            if not self._instants(nodes_of(expression))
            else conf_set(self._session, {ZONE: "UTC"})
        ):
            yield

    def _instants(self, nodes: Iterable[Node]) -> list[Node]:
        """Returns the constant instants among nodes; none where the session shows them in UTC."""
        if is_in_utc(self._session):
            return []
        return [one for one in nodes if kind_of(one) == "Literal" and kind_of(one.dataType()) == "TimestampType"]

    def _rewritten(self, e: Node, columns: Mapping[int, str], known: Known, column: Any) -> Node:
        """Returns an expression with columns in the place of its attributes, and of what is known."""
        for what, name in known:
            if what.semanticEquals(e):
                return column(name)
        kind = kind_of(e)
        if kind in ("AttributeReference", "OuterReference"):
            if id_of(e) not in columns:
                raise refused(
                    e, "it is a column of a query around this one, in a place from which Spark cannot move it"
                )
            return column(columns[id_of(e)])
        if kind == "Alias":
            return self._rewritten(e.child(), columns, known, column)
        if kind in SUBQUERIES:
            raise refused(e, "a subquery stands where only an expression over one row can: join with it")
        if kind == "With":  # a value that is used twice is said twice
            self._shared |= {str(one.id().toString()): one.child() for one in items(e.defs())}
            return self._rewritten(e.child(), columns, known, column)
        if kind == "CommonExpressionRef":
            return self._rewritten(self._shared[str(e.id().toString())], columns, known, column)
        if contains(self._session, e, "RUNTIME_REPLACEABLE") and is_replaceable(e):
            return self._rewritten(e.replacement(), columns, known, column)
        if (
            kind == "GetStructField" and column == self._unresolved
        ):  # it asks its child for names that it does not know yet
            below = self._rewritten(e.child(), columns, known, column)
            literal = getattr(getattr(self._catalyst.expressions, "Literal$"), "MODULE$")
            name = literal.apply(str(e.extractFieldName()))
            return self._catalyst.analysis.UnresolvedExtractValue(below, name)
        children = items(e.children())
        new = [self._rewritten(child, columns, known, column) for child in children]
        if all(a is b for a, b in zip(children, new, strict=True)):
            return e
        return e.withNewChildren(sequence_of(self._session, new))

    def _said(self, e: Node, column: Column) -> str:
        """Returns what an expression says, the code of the functions in it, for two may have the same name, and which
        variable of lambdas stands where: the text calls all of them the same. So it does with instants in two zones.
        """
        nodes = list(nodes_of(e))
        more = [code_of(one) for one in nodes if kind_of(one) == "PythonUDF"]
        variables = [id_of(one) for one in nodes if kind_of(one) == "NamedLambdaVariable"]
        places = {id: place for place, id in enumerate(dict.fromkeys(variables))}
        more += [str(places[id]) for id in variables] if len(places) > 1 else []
        more += [str(one.value()) for one in self._instants(nodes)]
        text = text_of(column)
        return " ".join([text, *more, *_unprinted(nodes, text)])

    def _is_same(self, table: DataFrame, expression: str | Column, meant: Node) -> bool:
        try:
            with without_log():
                if isinstance(expression, str):
                    frame = table.selectExpr(f"{expression}\n AS {_NAME}")
                else:
                    frame = table.select(expression.alias(_NAME))
                projected = frame._jdf.queryExecution().analyzed().projectList()
        except PySparkException:  # it is something that Spark cannot read
            return False
        if projected.size() != 1:
            return False
        made = projected.apply(0)
        made = made.child() if kind_of(made) == "Alias" else made
        return bool(made.semanticEquals(meant))

    def _table(self, types: Mapping[str, Node]) -> DataFrame:
        columns = [f"CAST(NULL AS {type_.sql()}) AS {quoted(name)}" for name, type_ in types.items()]
        at = ", ".join(columns)
        if at not in self._tables:
            self._tables[at] = self._session.range(0).selectExpr(*columns)
        return self._tables[at]

    def _unresolved(self, name: str) -> Node:
        return self._catalyst.analysis.UnresolvedAttribute(sequence_of(self._session, [name]))
