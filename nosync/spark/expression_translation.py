"""Spark's expressions as those that Python evaluates itself (nosync.kernels.expressions), where they are of such a kind."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date
from decimal import Decimal
from itertools import groupby
from typing import Any

import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from nosync.kernels.expressions import ARITHMETIC, COMPARISONS, Expression, Step

_INTEGERS = {"byte": pa.int8(), "short": pa.int16(), "integer": pa.int32(), "long": pa.int64()}
_FLOATS = {"float": pa.float32(), "double": pa.float64()}
_TYPES = {
    **_INTEGERS,
    **_FLOATS,
    "string": pa.string(),
    "boolean": pa.bool_(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}
_NO_TEXT = "\ufffd"
"""What JSON has for bytes that are no text."""
_DECIMAL = re.compile(r"decimal\((\d+),(\d+)\)")
_MOST_DIGITS, _MOST_WIDE_DIGITS = 38, 76
"""Of a decimal, and of one that Arrow computes with on the way."""
_LEAST_SCALE = 6
"""Of a quotient."""
_WIDTHS = list(_INTEGERS)
_DIGITS = {"byte": 3, "short": 5, "integer": 10, "long": 19}
_REPLACED = {"Between", "Nvl", "NullIf", "Extract", "DatePart", "KnownNullable", "KnownNotNull"}
"""Functions that stand for another one, or for a value, which is their only child."""
_TIMES = {"timestamp", "timestamp_ntz"}
_OF_FORMAT = {"yyyy": "%Y", "MM": "%m", "dd": "%d", "HH": "%H", "mm": "%M", "ss": "%S"}
"""The letters of Spark's `date_format` that have two or four digits always, as `strftime` has them."""
_BETWEEN = frozenset("-/:., _")
_MOST_DEPTH = 50
"""Of an expression. Tasks get it pickled, and evaluate it, by recursion."""
_REFERENCE = "CommonExpressionRef"
_OF_MANY_DIGITS = ('.Divide"', '.Multiply"', '.Add"', '.Subtract"')
_LIKE, _ESCAPE = '.Like"', " ESCAPE "
Node = Mapping[str, Any]
Names = Mapping[int, str]
"""Of the columns of the rows, by Spark's ids for them."""
Typed = tuple[Expression, str]
"""An expression, and Spark's name of its type."""


class _Other(Exception):
    """Says that an expression is of a kind that Python cannot evaluate."""


def step_of(plan: Any, jvm: Any, *, may_lose_digits: bool = True) -> Step | None:
    """Returns a where or a select over rows, as Spark has analyzed it. None where it is of a kind that only Spark
    evaluates.

    `plan`: analyzed with UTC as the session's zone, in which constants are computed here. `may_lose_digits`: what the
    session says of decimals of more than 38 digits.
    """
    try:
        folded = jvm.org.apache.spark.sql.catalyst.optimizer.ConstantFolding.apply(plan)
    except (PySparkException, Py4JError):
        return None  # Spark says what is wrong with a constant where it asks for it
    text = folded.toJSON()
    if _LIKE in text and _ESCAPE in _sql_of(folded):
        return None  # JSON does not say what escapes in a pattern
    root, *below = json.loads(text)
    if len(below) != 1 or "output" not in below[0]:  # of columns that other expressions of the same select make
        return None
    names = {_id(nodes[0]): nodes[0]["name"] for nodes in below[0]["output"]}
    try:
        match _name(root):
            case "Filter":
                step = Step(condition=_parsed(root["condition"], names)[0])
            case "Project":
                step = Step(columns=dict(_named(nodes, names) for nodes in root["projectList"]))
            case _:
                return None
        return step if may_lose_digits or not any(name in text for name in _OF_MANY_DIGITS) else None
    except _Other:
        return None


def _sql_of(plan: Any) -> str:
    expressions = plan.expressions()
    return "\n".join(expressions.apply(i).sql() for i in range(expressions.size()))


def _named(nodes: Sequence[Node], names: Names) -> tuple[str, Expression]:
    is_alias = _name(nodes[0]) == "Alias"
    return nodes[0]["name"], _parsed(nodes[1:] if is_alias else nodes, names)[0]


def _parsed(nodes: Sequence[Node], names: Names) -> Typed:
    """Returns the expression whose nodes these are, each before its children; and the name of its type."""
    left = iter(nodes)
    parsed = _next(left, names)
    if next(left, None) is not None:
        raise _Other
    return parsed


def _next(nodes: Iterator[Node], names: Names, depth: int = 0, *, is_in_with: bool = False) -> Typed:
    if depth > _MOST_DEPTH:
        raise _Other
    node = next(nodes)
    name = _name(node)
    if name == "With":
        if is_in_with:
            raise _Other  # it is not said which of the two a reference is to
        children = [_next(nodes, names, depth + 1, is_in_with=i == 0) for i in range(node["num-children"])]
        return _with(children)
    children = [_next(nodes, names, depth + 1, is_in_with=is_in_with) for _ in range(node["num-children"])]
    found = _leaf(name, node, names) if not children else _of_structure(name, node, children)
    if found is not None:
        return found
    arguments, types = [expression for expression, _ in children], [type_ for _, type_ in children]
    if _is_condition(name, arguments, types):
        return Expression(name, tuple(arguments)), "boolean"
    type_ = _type_of_number(name, arguments, types) or _type_of_other(name, arguments, types)
    if type_ is not None:
        return Expression(name, tuple(arguments)), type_
    return _of_decimals(name, children) if name in ARITHMETIC or name == "Divide" else _choice(name, children)


def _leaf(name: str, node: Node, names: Names) -> Typed | None:
    """Returns a column, a literal, or what refers to an expression elsewhere. None: it is something else."""
    match name:
        case "AttributeReference":
            # Not by the name that it is asked for here, which may be written otherwise: `ID` for `id`.
            if not names[_id(node)]:
                raise _Other
            return Expression(column=names[_id(node)]), _text(node["dataType"])
        case "Literal":
            return _literal(node)
        case "CommonExpressionRef":
            return Expression(_REFERENCE), _text(node["dataType"])
    return None


def _of_structure(name: str, node: Node, children: Sequence[Typed]) -> Typed | None:
    """Returns a cast, a struct, or what stands for its child. None: it is a function."""
    match name:
        case "Cast":
            return _cast(children[0], _text(node["dataType"]))
        case "CommonExpressionDef":
            return children[0]
        case "TypedNullLiteral":  # of Spark 4.2's nullif: a null of the type of its child
            return _null(children[0][1]), children[0][1]
        case "PreciseTimestampConversion":
            return _of_micros(children[0], _text(node["fromType"]), _text(node["toType"]))
        case "CreateNamedStruct":
            return _struct(children)
        case "GetStructField":
            return _field(children[0], node["ordinal"])
        case "DateFormatClass":
            return _formatted(*children)
        case _ if name in _REPLACED and len(children) == 1:
            return children[0]
    return None


def _is_condition(name: str, arguments: Sequence[Expression], types: Sequence[str]) -> bool:
    is_alike = len(set(types)) == 1 and _is_known({*types})
    match name:
        case "IsNull" | "IsNotNull":
            return True
        case "And" | "Or" | "Not":
            return {*types} == {"boolean"}
        case "In":
            return is_alike and not _FLOATS.keys() & types
        case "Like":
            return {*types} == {"string"} and _is_pattern(arguments[1])
        case _:
            return name in COMPARISONS and is_alike


def _type_of_number(name: str, arguments: Sequence[Expression], types: Sequence[str]) -> str | None:
    """Returns the type of arithmetic on numbers that are no decimals. None: it is something else."""
    type_ = types[0] if len(set(types)) == 1 else ""
    match name:
        case "Remainder" if type_ in _INTEGERS and _is_positive(arguments[1]):
            return type_
        case "UnaryMinus" if type_ in _INTEGERS:
            return type_
        case "Abs" if type_ in _INTEGERS or type_ in _FLOATS or _DECIMAL.fullmatch(type_):
            return type_
        case "Divide" if type_ == "double":
            return type_
        case _ if name in ARITHMETIC and (type_ in _INTEGERS or type_ in _FLOATS):
            return type_
    return None


def _type_of_other(name: str, arguments: Sequence[Expression], types: Sequence[str]) -> str | None:
    """Returns the type of a function of texts or dates. None: it is something else."""
    match (name, *types):
        case ("Length", "string") | ("Year" | "Month" | "DayOfMonth", "date") | ("DateDiff", "date", "date"):
            return "integer"
        case ("Lower" | "Upper", "string") | ("Concat", "string", *_) if {*types} == {"string"}:
            return "string"
        case ("StringReplace", "string", "string", "string") if _constant(arguments[1]) and _is_text(arguments[2]):
            return "string"
        case ("SecondsToTimestamp" | "MillisToTimestamp" | "MicrosToTimestamp", _) if types[0] in _INTEGERS:
            return "timestamp"
        case ("UnixSeconds" | "UnixMillis" | "UnixMicros", "timestamp"):
            return "long"
        case ("Substring", "string", "integer", "integer") if all(map(_is_positive, arguments[1:])):
            return "string"
        case ("Hour" | "Minute" | "Second", "timestamp" | "timestamp_ntz"):
            return "integer"
        case ("DateAdd", "date", "byte" | "short" | "integer"):
            return "date"
    return None


def _choice(name: str, children: Sequence[Typed]) -> Typed:
    """Returns one of several values of one type. Raises _Other for all else."""
    conditions: Sequence[Typed] = ()
    match name:
        case "Coalesce":
            values = children
        case "If":
            conditions, values = children[:1], children[1:]
        case "NullIfResult":
            conditions, values = children[:1], children[1:]
        case "CaseWhen":
            pairs = len(children) // 2 * 2
            conditions, values = children[:pairs:2], [*children[1:pairs:2], *children[pairs:]]
        case _:
            raise _Other
    types = {type_ for _, type_ in values}
    if len(types) != 1 or not _is_known(types) or any(type_ != "boolean" for _, type_ in conditions):
        raise _Other
    arguments = tuple(expression for expression, _ in children)
    if name == "NullIfResult":
        name, arguments = "If", (arguments[0], _null(values[0][1]), arguments[1])
    return Expression(name, arguments), types.pop()


def _of_micros(of: Typed, before: str, to: str) -> Typed:
    """Returns a time as a number of microseconds, or the other way round."""
    if {before, to} - _TIMES != {"long"} or of[1] != before:
        raise _Other
    return Expression("to", (of[0],), type=_arrow(to)), to


def _formatted(time: Typed, pattern: Typed) -> Typed:
    """Returns a time as a text. Raises _Other for a pattern with letters whose texts Arrow does not have."""
    if time[1] != "timestamp" or not _is_text(pattern[0]):
        raise _Other
    parts = ["".join(run) for _, run in groupby(_constant(pattern[0]))]
    if any(part not in _OF_FORMAT and not _BETWEEN.issuperset(part) for part in parts):
        raise _Other
    text = pa.scalar("".join(_OF_FORMAT.get(part, part) for part in parts))
    return Expression("DateFormatClass", (time[0], Expression(literal=text))), "string"


def _struct(children: Sequence[Typed]) -> Typed:
    names = [expression.literal for expression, _ in children[::2]]
    values = children[1::2]
    if any(name is None or not name.is_valid for name in names):
        raise _Other
    fields = [{"name": str(name), "type": type_} for name, (_, type_) in zip(names, values, strict=True)]
    made = Expression("CreateNamedStruct", tuple(expression for expression, _ in children))
    return made, json.dumps({"type": "struct", "fields": fields})


def _field(of: Typed, ordinal: int) -> Typed:
    expression, type_ = of
    fields = json.loads(type_)["fields"]
    return Expression("GetStructField", (expression, _number(ordinal))), _text(fields[ordinal]["type"])


def _with(children: Sequence[Typed]) -> Typed:
    """Returns an expression in which another one stands for what refers to it."""
    if len(children) != 2:
        raise _Other  # what refers to which is not said
    (expression, type_), (common, _) = children
    return _replaced(expression, common), type_


def _replaced(expression: Expression, common: Expression) -> Expression:
    if expression.function == _REFERENCE:
        return common
    return replace(expression, arguments=tuple(_replaced(one, common) for one in expression.arguments))


def _of_decimals(name: str, children: Sequence[Typed]) -> Typed:
    """Returns arithmetic on two decimals where each digit is as in Spark. Raises _Other elsewhere."""
    (p1, s1), (p2, s2) = (_digits(type_) for _, type_ in children)
    left, right = (expression for expression, _ in children)
    if name == "Divide":
        precision, scale = _digits_of_quotient(p1, s1, p2, s2)
        made = Expression("QuotientOfDecimals", (left, right, _number(scale)))
        return replace(made, type=pa.decimal128(precision, scale)), f"decimal({precision},{scale})"
    exact = s1 + s2 if name == "Multiply" else max(s1, s2)
    precision = p1 + p2 + 1 if name == "Multiply" else max(p1 - s1, p2 - s2) + exact + 1
    if precision <= _MOST_DIGITS:
        return Expression(name, (left, right), type=pa.decimal128(precision, exact)), f"decimal({precision},{exact})"
    return _of_wide_decimals(name, children, precision, exact)


def _of_wide_decimals(name: str, children: Sequence[Typed], precision: int, exact: int) -> Typed:
    """Returns arithmetic whose type has no place for every value. A value that is too long is left to Spark."""
    if precision > _MOST_WIDE_DIGITS or exact > _MOST_DIGITS:
        raise _Other
    wide = [Expression("to", (expression,), type=pa.decimal256(*_digits(type_))) for expression, type_ in children]
    found: Typed = (
        Expression(name, tuple(wide), type=pa.decimal128(_MOST_DIGITS, exact)),
        f"decimal({_MOST_DIGITS},{exact})",
    )
    scale = max(_MOST_DIGITS - (precision - exact), min(exact, _LEAST_SCALE))
    return _cast(found, f"decimal({_MOST_DIGITS},{scale})")


def _digits_of_quotient(p1: int, s1: int, p2: int, s2: int) -> tuple[int, int]:
    """Returns the precision and the scale that Spark gives a quotient. Raises _Other where Arrow has no type for all its
    digits that count.
    """
    before, scale = p1 - s1 + s2, max(_LEAST_SCALE, s1 + p2 + 1)
    if before + scale > _MOST_DIGITS:
        scale = max(_MOST_DIGITS - before, min(scale, _LEAST_SCALE))
    of_arrow = max(_MOST_DIGITS + 1, s1 + p2 - s2 + 1)
    if before + of_arrow >= _MOST_WIDE_DIGITS:
        raise _Other
    return min(before + scale, _MOST_DIGITS), scale


def _digits(type_: str) -> tuple[int, int]:
    """Returns the precision and the scale of a decimal. Raises _Other for another type."""
    found = _DECIMAL.fullmatch(type_)
    if found is None:
        raise _Other
    return int(found[1]), int(found[2])


def _literal(node: Node) -> Typed:
    type_, value = _text(node["dataType"]), node["value"]
    if not _is_known({type_}):
        raise _Other
    if value is None:
        return _null(type_), type_
    if type_ in _TIMES:
        raise _Other  # Spark writes them in the zone of a session
    if type_ in _INTEGERS:
        value = int(value)
    elif type_ in _FLOATS:
        value = float(value)
    elif type_ == "boolean":
        value = value == "true"
    elif type_ == "date":
        value = _date(value)
    elif type_ == "string":
        if _NO_TEXT in value:
            raise _Other
    else:
        value = Decimal(value)
    return Expression(literal=pa.scalar(value, _arrow(type_))), type_


def _date(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:  # a year that Python does not have
        raise _Other from None


def _null(type_: str) -> Expression:
    return Expression(literal=pa.scalar(None, _arrow(type_)))


def _number(value: int) -> Expression:
    return Expression(literal=pa.scalar(value, pa.int32()))


def _cast(of: Typed, to: str) -> Typed:
    """Returns a cast. Raises _Other for one in which Arrow may come to another value than Spark."""
    expression, before = of
    if to == before:
        return of
    if before in _INTEGERS and to in _INTEGERS:
        if _WIDTHS.index(to) < _WIDTHS.index(before):
            raise _Other
        if expression.literal is not None:
            return Expression(literal=expression.literal.cast(_INTEGERS[to])), to
        return Expression("to", (expression,), type=_INTEGERS[to]), to
    if before in _TIMES and to == "date":  # in UTC, for constants and epochs have that zone
        return Expression("DateOfTime", (expression,)), to
    # The cast says where a value has no place in the type.
    if before in _INTEGERS and (to == "double" or _DECIMAL.fullmatch(to)):
        if to != "double" and expression.literal is None:  # Arrow wants a type with a place for every number
            wide = pa.decimal128(_DIGITS[before], 0)
            expression = Expression("to", (expression,), type=wide)
        return Expression("to", (expression,), type=_arrow(to)), to
    (_, scale), (_, scale_there) = _digits(before), _digits(to)
    if scale_there < scale:
        expression = Expression("Round", (expression, _number(scale_there)))
    return Expression("to", (expression,), type=_arrow(to)), to


def _is_known(types: set[str]) -> bool:
    return all(type_ in _TYPES or _DECIMAL.fullmatch(type_) for type_ in types)


def _arrow(type_: str) -> pa.DataType:
    return _TYPES.get(type_) or pa.decimal128(*_digits(type_))


def _constant(expression: Expression) -> Any:
    """Returns the value of a literal. None: it is null, or no literal."""
    return None if expression.literal is None else expression.literal.as_py()


def _is_positive(expression: Expression) -> bool:
    value = _constant(expression)
    return value is not None and value > 0


def _is_text(expression: Expression) -> bool:
    return isinstance(_constant(expression), str)


def _is_pattern(expression: Expression) -> bool:
    """Returns whether Arrow reads it as Spark does, which a backslash is not."""
    text = _constant(expression)
    return text is not None and "\\" not in text


def _id(attribute: Node) -> int:
    id: int = attribute["exprId"]["id"]
    return id


def _name(node: Node) -> str:
    name: str = node["class"]
    return name.rpartition(".")[2]


def _text(type_: Any) -> str:
    """Returns the name of a simple type, and another one as JSON."""
    return type_ if isinstance(type_, str) else json.dumps(type_)
