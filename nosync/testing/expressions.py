"""The expressions of select and where that tasks evaluate themselves, read without Spark.

It is the part of Spark's SQL that `nosync.spark.expression_translation` takes from Spark's own parser: columns, whole
numbers, texts, booleans, comparisons, IN, BETWEEN, IS NULL, AND, OR, NOT, sums and products of whole numbers, and casts
to wider ones. Whatever else there is only Spark evaluates. Types are found as Spark finds them, so that a stage has the
columns, and the fingerprint, that it has there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pyarrow as pa

from nosync.flow.arguments import ExpressionArguments, arguments_of
from nosync.flow.binder import Analysis
from nosync.flow.kinds import SELECT, STATIC_JOIN
from nosync.flow.stage import Stage
from nosync.kernels.expressions import Expression, Step
from nosync.lsm.columnar.columns import CHANGE_TYPE_COLUMN, describe
from nosync.lsm.errors import FlowError, SchemaError
from nosync.lsm.platform.nearest import did_you_mean

_TOKEN = re.compile(
    r"\s*(?:(`(?:[^`]|``)+`|'(?:[^'\\])*'|\d+L?\b|\w+|<=>|<>|!=|<=|>=|==|-(?!-)|[+*%/=<>(),.])|(--|\S))"
)
"""Two minus signs begin a comment, and are not minus a minus."""
_NAMED = re.compile(r"(?P<text>.*\S)\s+AS\s+(?P<name>`[^`]+`|\w+)\s*\Z", re.IGNORECASE | re.DOTALL)
"""As in nosync.spark.expressions: what is named so is computed by that text alone."""
_COMPARISONS = {
    "=": "EqualTo", "==": "EqualTo", "<": "LessThan", "<=": "LessThanOrEqual", ">": "GreaterThan",
    ">=": "GreaterThanOrEqual",
}  # fmt: skip
_WIDTHS = [pa.int8(), pa.int16(), pa.int32(), pa.int64()]
_TYPES = {
    "smallint": pa.int16(),
    "short": pa.int16(),
    "int": pa.int32(),
    "integer": pa.int32(),
    "bigint": pa.int64(),
    "long": pa.int64(),
}
_COMPARED = {*_WIDTHS, pa.string(), pa.bool_()}
_MOST_INT, _MOST_LONG = (1 << 31) - 1, (1 << 63) - 1
_MOST_DIGITS = 20
_AFTER_VALUES = frozenset({"and", "as", "between", "in", "is", "like", "not", "or"})
"""Words that come after a value."""
_WORDS = frozenset({"and", "or", "not", "in", "is", "between", "as", "null", "true", "false", "like", "case", "cast"})


class _NeedsSpark(Exception):
    """Says what of an expression only Spark evaluates."""


@dataclass(frozen=True)
class _Typed:
    of: Expression
    type: pa.DataType


def analyze(stage: Stage, given: pa.Schema) -> Analysis:
    """Returns what Spark says of a stage over rows of `given`, where tasks evaluate it themselves.

    Raises FlowError where only Spark does, and SchemaError for a column that is not there.
    """
    if stage.kind == STATIC_JOIN:
        raise _refused(stage, "a table of Spark's")
    texts = list(arguments_of(stage, ExpressionArguments).expressions)
    other = next((text for text in texts if not isinstance(text, str)), None)
    if other is not None:
        raise _refused(stage, f"{other!r}, which is an object of Spark's: give it as SQL text")
    try:
        return _selected(stage, texts, given) if stage.kind == SELECT else _filtered(stage, texts[0], given)
    except _NeedsSpark as reason:
        raise _refused(stage, str(reason)) from None


def _refused(stage: Stage, what: str) -> FlowError:
    return FlowError(
        f"stage {stage.name}: needs Spark for {what}. A FlowTester evaluates columns, whole numbers, texts and booleans with "
        "comparisons, IN, BETWEEN, IS NULL, AND, OR, NOT, + - * % and wider casts. Write it as map() over Arrow, or test this "
        "flow with nosync.Job on a local Spark"
    )


def _filtered(stage: Stage, text: str, given: pa.Schema) -> Analysis:
    condition = _Parser(stage, text, given).whole()
    if condition.type != pa.bool_():
        raise SchemaError(f"stage {stage.name}: {text!r} is a {condition.type}, expected a condition")
    kept = {name: name for name in given.names}
    return Analysis(given, text, kept, {}, plain=True, step=Step(condition=condition.of))


def _selected(stage: Stage, texts: list[str], given: pa.Schema) -> Analysis:
    columns: dict[str, _Typed] = {}
    computed: dict[str, str] = {}
    names = [name for name in given.names if name != CHANGE_TYPE_COLUMN]
    for text in texts:
        if text.strip() == "*":
            made = {name: _Typed(Expression(column=name), given.field(name).type) for name in names}
        else:
            name, typed = _Parser(stage, text, given).named()
            made = {name: typed}
            match = _NAMED.match(text)
            if match is not None:
                computed[match["name"].strip("`")] = match["text"]
        twice = next((name for name in made if name in columns), None)
        if twice is not None:
            raise SchemaError(f"stage {stage.name}: two of its columns are named {twice!r}: rename one")
        columns |= made
    schema = pa.schema([pa.field(name, typed.type) for name, typed in columns.items()])
    if CHANGE_TYPE_COLUMN in given.names:
        schema = schema.append(given.field(CHANGE_TYPE_COLUMN))
    kept = {name: typed.of.column for name, typed in columns.items() if typed.of.column}
    step = Step(columns={name: typed.of for name, typed in columns.items()})
    return Analysis(schema, "; ".join(texts), kept, computed, plain=True, step=step)


class _Parser:
    """Reads one expression from left to right, by the precedence of its operators."""

    def __init__(self, stage: Stage, text: str, given: pa.Schema) -> None:
        self._stage, self._text, self._given, self._at = stage, text, given, 0
        self._tokens: list[str] = []
        for good, bad in _TOKEN.findall(text):
            if bad:
                raise _NeedsSpark(f"{bad!r} in {text!r}")
            self._tokens.append(good)

    def whole(self) -> _Typed:
        """Returns the expression that the text is."""
        found = self._or()
        if self._next:
            raise _NeedsSpark(f"{self._tokens[self._at]!r} in {self._text!r}")
        return found

    def named(self) -> tuple[str, _Typed]:
        """Returns an expression of a select, and the name of its column."""
        first, found = self._tokens[:1], self._or()
        is_as = self._took("as")
        if self._next:
            name = self._take()
            if self._next:
                raise _NeedsSpark(f"{self._tokens[self._at]!r} in {self._text!r}")
            return _unquoted(name), found
        if found.of.column and len(self._tokens) == 1 and not is_as:
            return _unquoted(first[0]), found
        raise SchemaError(f"stage {self._stage.name}: {self._text!r} has no name: say {self._text} AS name")

    # --- tokens -----------------------------------------------------------------------------------------------------

    @property
    def _next(self) -> str:
        return self._tokens[self._at].lower() if self._at < len(self._tokens) else ""

    def _take(self) -> str:
        if not self._next:
            raise SchemaError(f"stage {self._stage.name}: {self._text!r} ends too early")
        self._at += 1
        return self._tokens[self._at - 1]

    def _took(self, *words: str) -> bool:
        found = [token.lower() for token in self._tokens[self._at : self._at + len(words)]] == list(words)
        self._at += len(words) if found else 0
        return found

    def _expect(self, sign: str) -> None:
        if not self._took(sign):
            found = self._tokens[self._at] if self._next else "the end"
            raise SchemaError(f"stage {self._stage.name}: expected {sign!r} in {self._text!r}, found {found!r}")

    # --- the grammar ------------------------------------------------------------------------------------------------

    def _or(self) -> _Typed:
        found = self._and()
        while self._took("or"):
            found = self._logical("Or", found, self._and())
        return found

    def _and(self) -> _Typed:
        found = self._not()
        while self._took("and"):
            found = self._logical("And", found, self._not())
        return found

    def _not(self) -> _Typed:
        return self._logical("Not", self._not()) if self._took("not") else self._predicate()

    def _predicate(self) -> _Typed:
        left = self._sum()
        if self._took("is"):
            kind = "IsNotNull" if self._took("not") else "IsNull"
            self._expect("null")
            return _Typed(Expression(kind, (left.of,)), pa.bool_())
        is_not = self._took("not")
        if self._took("in"):
            found = self._in(left)
        elif self._took("between"):
            low = self._sum()
            self._expect("and")
            high = self._sum()
            found = self._logical(
                "And", self._compared("GreaterThanOrEqual", left, low), self._compared("LessThanOrEqual", left, high)
            )
        elif is_not:
            raise _NeedsSpark(f"{self._text!r}")
        elif self._next in _COMPARISONS:
            return self._compared(_COMPARISONS[self._take()], left, self._sum())
        elif self._next in ("<>", "!="):
            self._take()
            return self._logical("Not", self._compared("EqualTo", left, self._sum()))
        else:
            return left
        return self._logical("Not", found) if is_not else found

    def _in(self, left: _Typed) -> _Typed:
        self._expect("(")
        others = [self._sum()]
        while self._took(","):
            others.append(self._sum())
        self._expect(")")
        alike = self._alike([left, *others])
        return _Typed(Expression("In", tuple(one.of for one in alike)), pa.bool_())

    def _sum(self) -> _Typed:
        found = self._product()
        while self._next in ("+", "-"):
            found = self._computed("Add" if self._take() == "+" else "Subtract", found, self._product())
        return found

    def _product(self) -> _Typed:
        found = self._value()
        while self._next in ("*", "%"):
            is_remainder = self._take() == "%"
            by = self._value()
            if is_remainder and (by.of.literal is None or by.of.literal.as_py() <= 0):
                raise _NeedsSpark(f"the remainder of what is no positive number, in {self._text!r}")
            found = self._computed("Remainder" if is_remainder else "Multiply", found, by)
        return found

    def _value(self) -> _Typed:
        token = self._take()
        word = token.lower()
        if token == "(":
            found = self._or()
            self._expect(")")
            return found
        if token == "-" and self._next[:1].isdigit():
            return self._number(f"-{self._take()}")
        if token[0].isdigit():
            return self._number(token)
        if token[0] == "'":
            return _Typed(Expression(literal=pa.scalar(token[1:-1], pa.string())), pa.string())
        if word in ("true", "false"):
            return _Typed(Expression(literal=pa.scalar(word == "true", pa.bool_())), pa.bool_())
        if word == "cast":
            return self._cast()
        if self._next in ("(", ".") or word in _WORDS or not (token[0] == "`" or word.isidentifier()):
            raise _NeedsSpark(f"{token + self._next!r} in {self._text!r}")
        if self._is_other_word(token):  # such as DATE '2026-01-01', INTERVAL 1 DAY, or a SELECT
            raise _NeedsSpark(f"{f'{token} {self._next}'!r} in {self._text!r}")
        return self._column(_unquoted(token))

    def _is_other_word(self, token: str) -> bool:
        """Returns whether a name that is no column has a value, or another name, after it."""
        after = self._next.lower()
        is_value = (
            after[:1] in ("'", '"') or after[:1].isdigit() or (after.isidentifier() and after not in _AFTER_VALUES)
        )
        return is_value and token.lower() not in {name.lower() for name in self._given.names}

    def _cast(self) -> _Typed:
        self._expect("(")
        found = self._or()
        self._expect("as")
        to = _TYPES.get(self._take().lower())
        self._expect(")")
        if to is None or found.type not in _WIDTHS or _WIDTHS.index(to) < _WIDTHS.index(found.type):
            raise _NeedsSpark(f"a cast that is none to a wider whole number, in {self._text!r}")
        return _widened(found, to)

    def _number(self, text: str) -> _Typed:
        digits, is_long = text.rstrip("Ll"), text[-1] in "Ll"
        if not digits.removeprefix("-").isdecimal() or len(digits) > _MOST_DIGITS:
            raise _NeedsSpark(f"{text} is no whole number, in {self._text!r}")
        value = int(digits)
        if not -_MOST_LONG - 1 <= value <= _MOST_LONG:
            raise _NeedsSpark(f"{text} is no long, in {self._text!r}")
        type_ = pa.int64() if is_long or not -_MOST_INT - 1 <= value <= _MOST_INT else pa.int32()
        return _Typed(Expression(literal=pa.scalar(value, type_)), type_)

    def _column(self, name: str) -> _Typed:
        known = {one.lower(): one for one in self._given.names}
        if name.lower() not in known:
            raise SchemaError(
                f"stage {self._stage.name}: {self._text!r}: its input has no column {name!r}; it has "
                f"{describe(self._given)}{did_you_mean(name, self._given.names)}"
            )
        column = known[name.lower()]
        return _Typed(Expression(column=column), self._given.field(column).type)

    # --- types ------------------------------------------------------------------------------------------------------

    def _logical(self, function: str, *arguments: _Typed) -> _Typed:
        if any(one.type != pa.bool_() for one in arguments):
            raise _NeedsSpark(f"a condition over what is no condition, in {self._text!r}")
        return _Typed(Expression(function, tuple(one.of for one in arguments)), pa.bool_())

    def _compared(self, function: str, left: _Typed, right: _Typed) -> _Typed:
        alike = self._alike([left, right])
        return _Typed(Expression(function, tuple(one.of for one in alike)), pa.bool_())

    def _computed(self, function: str, left: _Typed, right: _Typed) -> _Typed:
        alike = self._alike([left, right])
        if alike[0].type not in _WIDTHS:
            raise _NeedsSpark(f"arithmetic with a {alike[0].type}, in {self._text!r}")
        return _Typed(Expression(function, tuple(one.of for one in alike)), alike[0].type)

    def _alike(self, several: list[_Typed]) -> list[_Typed]:
        """Returns the values as those of one type, as Spark widens whole numbers."""
        types = {one.type for one in several}
        if types <= {*_WIDTHS}:
            widest = max(types, key=_WIDTHS.index)
            return [_widened(one, widest) for one in several]
        if len(types) > 1 or not types <= _COMPARED:
            raise _NeedsSpark(f"comparing {' and '.join(sorted(map(str, types)))}, in {self._text!r}")
        return several


def _widened(one: _Typed, to: pa.DataType) -> _Typed:
    if one.type == to:
        return one
    if one.of.literal is not None:
        return _Typed(Expression(literal=one.of.literal.cast(to)), to)
    return _Typed(Expression("to", (one.of,), type=to), to)


def _unquoted(name: str) -> str:
    return name[1:-1].replace("``", "`") if name.startswith("`") else name
