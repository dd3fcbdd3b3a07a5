"""Spark's expressions as those that tasks evaluate themselves (nosync.kernels.expressions), where they are of such a
kind.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from nosync.kernels.expressions import ARITHMETIC, COMPARISONS, Expression, Step

_INTEGERS = {"byte": pa.int8(), "short": pa.int16(), "integer": pa.int32(), "long": pa.int64()}
_COMPARED = {**_INTEGERS, "string": pa.string(), "boolean": pa.bool_()}
_WIDTHS = list(_INTEGERS)
_MOST_DEPTH = 50
"""Of an expression. Tasks get it pickled, and evaluate it, by recursion."""
Node = Mapping[str, Any]
Names = Mapping[int, str]
"""Of the columns of the rows, by Spark's ids for them."""


class _Other(Exception):
    """Says that an expression is of a kind that a task cannot evaluate."""


def step_of(plan: Any) -> Step | None:
    """Returns a where or a select over rows, as Spark has analyzed it. None where it is of a kind that only Spark
    evaluates.
    """
    root, *below = json.loads(plan.toJSON())
    if len(below) != 1 or "output" not in below[0]:  # of columns that other expressions of the same select make
        return None
    names = {_id(nodes[0]): nodes[0]["name"] for nodes in below[0]["output"]}
    try:
        match _name(root):
            case "Filter":
                return Step(condition=_parsed(root["condition"], names)[0])
            case "Project":
                return Step(columns=dict(_named(nodes, names) for nodes in root["projectList"]))
            case _:
                return None
    except _Other:
        return None


def _named(nodes: Sequence[Node], names: Names) -> tuple[str, Expression]:
    is_alias = _name(nodes[0]) == "Alias"
    return nodes[0]["name"], _parsed(nodes[1:] if is_alias else nodes, names)[0]


def _parsed(nodes: Sequence[Node], names: Names) -> tuple[Expression, str]:
    """Returns the expression whose nodes these are, each before its children; and the name of its type."""
    left = iter(nodes)
    parsed = _next(left, names)
    if next(left, None) is not None:
        raise _Other
    return parsed


def _next(nodes: Iterator[Node], names: Names, depth: int = 0) -> tuple[Expression, str]:
    if depth > _MOST_DEPTH:
        raise _Other
    node = next(nodes)
    name = _name(node)
    children = [_next(nodes, names, depth + 1) for _ in range(node["num-children"])]
    types = {type_ for _, type_ in children}
    arguments = tuple(expression for expression, _ in children)
    match name:
        case "AttributeReference":
            # Not by the name that it is asked for here, which may be written otherwise: `ID` for `id`.
            return Expression(column=names[_id(node)]), _text(node["dataType"])
        case "Literal":
            return _literal(node)
        case "Cast":
            return _cast(children[0], _text(node["dataType"]))
        case "IsNull" | "IsNotNull":
            return Expression(name, arguments), "boolean"
        case "And" | "Or" | "Not" if types == {"boolean"}:
            return Expression(name, arguments), "boolean"
        case _ if name in COMPARISONS and len(types) == 1 and types <= _COMPARED.keys():
            return Expression(name, arguments), "boolean"
        case "Remainder" if not _is_positive(arguments[1]):
            raise _Other
        case _ if name in ARITHMETIC and len(types) == 1 and types <= _INTEGERS.keys():
            return Expression(name, arguments), types.pop()
    raise _Other


def _literal(node: Node) -> tuple[Expression, str]:
    type_, value = _text(node["dataType"]), node["value"]
    if type_ not in _COMPARED or value is None:
        raise _Other
    if type_ in _INTEGERS:
        value = int(value)
    elif type_ == "boolean":
        value = value == "true"
    return Expression(literal=pa.scalar(value, _COMPARED[type_])), type_


def _cast(of: tuple[Expression, str], type_: str) -> tuple[Expression, str]:
    """Returns a cast to a wider integer. Raises _Other for any other cast."""
    expression, before = of
    if before not in _INTEGERS or type_ not in _INTEGERS or _WIDTHS.index(type_) < _WIDTHS.index(before):
        raise _Other
    if type_ == before:
        return of
    if expression.literal is not None:
        return Expression(literal=expression.literal.cast(_INTEGERS[type_])), type_
    return Expression(f"to_{type_}", (expression,)), type_


def _is_positive(expression: Expression) -> bool:
    return expression.literal is not None and expression.literal.as_py() > 0


def _id(attribute: Node) -> int:
    id: int = attribute["exprId"]["id"]
    return id


def _name(node: Node) -> str:
    name: str = node["class"]
    return name.rpartition(".")[2]


def _text(type_: Any) -> str:
    """Returns the name of a simple type; of another one a name that no type has."""
    return type_ if isinstance(type_, str) else ""
