"""Constants that Spark makes of the clock when it reads a query: `DATE 'today'`. The plan has the day of then, for ever.

Spark notes for each constant from where to where the text goes that it was read from, so however a word is written it is found.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from nosync.lsm.errors import FlowError
from nosync.spark.expressions import OF_TODAY
from nosync.spark.plans.catalyst import SUBQUERIES, Node, found, items, kind_of, nodes_of

_MAY_BE = re.compile(r"now|today|tomorrow|yesterday|\\", re.IGNORECASE)
"""What a text has that may say such a constant: a backslash may write any letter."""
_WORD = re.compile(r"\s*(?:now|today|tomorrow|yesterday)\b", re.IGNORECASE)
_TIMES = ("DateType", "TimestampType", "TimestampNTZType")


def check_no_clock(session: SparkSession, view: str, query: object, plan: Node) -> None:
    """Raises FlowError where the plan of a query, as Spark has analyzed it, has such a constant."""
    if isinstance(query, str) and _MAY_BE.search(query) is None:
        return
    for text, begin, end in _constants(plan):
        said = text[begin : end + 1]
        if _WORD.match(_value(session, said)) is not None:
            line = text.count("\n", 0, begin) + 1
            raise FlowError(f"view {view}: {said}, line {line}: {OF_TODAY}")


def _constants(plan: Node) -> Iterator[tuple[str, int, int]]:
    """Yields the texts in which constant times are, with where in them."""
    for one in (one for expression in items(plan.expressions()) for one in nodes_of(expression)):
        if kind_of(one) in SUBQUERIES:
            yield from _constants(one.plan())
        elif kind_of(one) == "Literal" and kind_of(one.dataType()) in _TIMES:
            origin = one.origin()
            text, begin, end = (found(part) for part in (origin.sqlText(), origin.startIndex(), origin.stopIndex()))
            if text is not None and begin is not None and end is not None:
                yield str(text), int(begin), int(end)
    for child in items(plan.children()):
        yield from _constants(child)


def _value(session: SparkSession, said: str) -> str:
    """Returns the string that such a constant is read from; an empty one for what is no constant in the text, such as the
    null that GROUP BY CUBE has for a date.
    """
    parser: Any = session._jsparkSession.sessionState().sqlParser()
    begin = min((at for quote in "'\"" if (at := said.find(quote)) >= 0), default=None)
    try:
        if begin is None or kind_of(parser.parseExpression(said)) != "Literal":
            return ""
        begin -= said[:begin].lower().endswith("r")
        return str(parser.parseExpression(said[begin:]).eval(None))
    except PySparkException:  # a clause, and no expression
        return ""
