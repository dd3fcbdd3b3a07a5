"""The columns that Spark's DDL declares, read without Spark, so that a mistake in it is told where the flow is
declared.

Spark reads the text again when a job is made, and its word counts. What a setting of the session or a newer Spark may
decide otherwise is left open here: such a column has a name and no type.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping

import pyarrow as pa

from nosync.flow.internal_columns import is_ours
from nosync.lsm.errors import SchemaError
from nosync.lsm.platform.nearest import nearest

Columns = Mapping[str, pa.DataType | None]
"""The types of columns, by name. None: only Spark knows it."""

_TOKEN = re.compile(
    r"""\s+|--[^\n]*|/\*.*?\*/|(`(?:[^`]|``)+`|'(?:[^'\\]|\\.|'')*'|"(?:[^"\\]|\\.|"")*"|\w+|[<>(),:])""", re.DOTALL
)
_EXAMPLE = "'name string, n bigint'"
_PLAIN: dict[str, pa.DataType | None] = {
    "boolean": pa.bool_(), "tinyint": pa.int8(), "byte": pa.int8(), "smallint": pa.int16(), "short": pa.int16(),
    "int": pa.int32(), "integer": pa.int32(), "bigint": pa.int64(), "long": pa.int64(), "float": pa.float32(),
    "real": pa.float32(), "double": pa.float64(), "date": pa.date32(), "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ltz": pa.timestamp("us", "UTC"), "timestamp_ntz": pa.timestamp("us"), "string": pa.string(),
    "binary": pa.binary(), "void": pa.null(),
    # Spark knows them; whether a store takes them is told when the job is made.
    "char": None, "character": None, "varchar": None, "variant": None, "time": None, "geometry": None,
    "geography": None,
}  # fmt: skip
_DECIMAL = frozenset({"decimal", "dec", "numeric"})
_NESTED = frozenset({"array", "map", "struct"})
_OF_TIME = ("day", "hour", "minute", "second")
_UNITS = ("year", "month", *_OF_TIME)
TYPE_NAMES = (*_PLAIN, *_DECIMAL, *_NESTED, "interval")
_ELSEWHERE = {
    "str": "string", "text": "string", "utf8": "string", "object": "string", "int8": "tinyint", "int16": "smallint",
    "int32": "int", "int64": "bigint", "uint64": "decimal(20, 0)", "float32": "float", "float64": "double",
    "number": "double", "bool": "boolean", "bytes": "binary", "datetime": "timestamp", "list": "array",
    "dict": "struct",
}  # fmt: skip
"""The names that types have in Python, Arrow and databases, with those that Spark has for them."""


def columns_of(text: object, whose: str, expected: str = _EXAMPLE) -> dict[str, pa.DataType | None]:
    """Returns the columns that a text declares. Raises SchemaError, which begins with `whose`."""
    if not isinstance(text, str):
        hint = ": schema.simpleString() is that of a StructType" if hasattr(text, "simpleString") else ""
        raise SchemaError(f"{whose}: the columns are a {type(text).__name__}, expected text such as {expected}{hint}")
    parser = _Parser(text, whose)
    columns: dict[str, pa.DataType | None] = {}
    for name, type_ in parser.columns():
        if name in columns:
            raise SchemaError(f"{whose}: two columns of {text!r} are named {name!r}: rename one")
        columns[name] = type_
    if not columns:
        raise SchemaError(f"{whose}: no columns are declared, expected some such as {expected}")
    for name in columns:
        if is_ours(name):
            raise SchemaError(f"{whose}: column {name!r} has a name that nosync uses itself: rename it")
    return columns


def ddl_without(text: str, columns: Collection[str]) -> str:
    """Returns the text of the other columns of a text that `columns_of` has read."""
    parts, depth, begin = list[str](), 0, 0
    for match in _TOKEN.finditer(text):
        depth += {"<": 1, "(": 1, ">": -1, ")": -1}.get(match[0], 0)
        if match[0] == "," and not depth:
            parts.append(text[begin : match.start()])
            begin = match.end()
    parts.append(text[begin:])
    return ", ".join(part.strip() for part in parts if not {*columns_of(part, "a column")} & {*columns})


def type_of(text: str) -> pa.DataType | None:
    """Returns the type that Spark calls by a text, such as `array<bigint>`. None: only Spark knows it."""
    return _Parser(text, "a type").type("it")


class _Parser:
    """Reads the tokens of one text from left to right."""

    def __init__(self, text: str, whose: str) -> None:
        self._text, self._whose, self._at = text, whose, 0
        self._tokens = list(self._split(text))

    def _split(self, text: str) -> Iterator[str]:
        at = 0
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                raise self._error(f"{text[at]!r} cannot be part of it; a name with such a letter goes in `backquotes`")
            if match[1] is not None:
                yield match[1]
            at = match.end()

    def _error(self, what: str) -> SchemaError:
        return SchemaError(f"{self._whose}: {self._text!r} are no columns such as {_EXAMPLE}: {what}")

    @property
    def _next(self) -> str:
        """Returns the next token in lower case. It is empty at the end."""
        return self._tokens[self._at].lower() if self._at < len(self._tokens) else ""

    def _take(self) -> str:
        self._at += 1
        return self._tokens[self._at - 1]

    def _took(self, *words: str) -> bool:
        """Passes over these words if they come next, one after the other."""
        found = [token.lower() for token in self._tokens[self._at : self._at + len(words)]] == list(words)
        self._at += len(words) if found else 0
        return found

    def _expect(self, sign: str, after: str) -> None:
        if not self._took(sign):
            found = f"{self._tokens[self._at]!r}" if self._next else "the end"
            raise self._error(f"expected {sign!r} after {after}, found {found}")

    def columns(self) -> Iterator[tuple[str, pa.DataType | None]]:
        """Returns the columns of the whole text, which may be in `struct<...>`."""
        if len(self._tokens) > 1 and self._tokens[0].lower() == "struct" and self._tokens[1] == "<":
            self._at = 2
            yield from self._fields(">")
            self._expect(">", "the last column")
        elif self._tokens:
            yield from self._fields("")
        if self._next:
            raise self._error(f"expected a comma before {self._tokens[self._at]!r}")

    def _fields(self, end: str) -> Iterator[tuple[str, pa.DataType | None]]:
        if end and self._next == end:
            return
        while True:
            name = self._name()
            self._took(":")
            type_ = self.type(f"column {name!r}")
            self._took("not", "null")
            if self._took("comment"):
                if not self._next.startswith(("'", '"')):
                    raise self._error(f"the comment of column {name!r} is no text in quotes")
                self._take()
            yield name, type_
            if not self._took(","):
                return

    def _name(self) -> str:
        if not self._next or self._next in set("<>(),:") or self._next[0] in "'\"":
            raise self._error(f"expected the name of a column, found {self._next or 'the end'}")
        name = self._take()
        return name[1:-1].replace("``", "`") if name.startswith("`") else name

    def type(self, of: str) -> pa.DataType | None:
        """Returns the type that comes next. `of` has that type."""
        word = self._next
        if not word or not word.isidentifier():
            raise self._error(f"{of} has no type, such as {of.partition(' ')[2].strip(chr(39)) or 'name'} string")
        self._take()
        if word in _NESTED:
            return self._nested(word, of)
        if word == "interval":
            return self._interval()
        if word not in _DECIMAL and word not in _PLAIN:
            meant = _ELSEWHERE.get(word) or nearest(word, TYPE_NAMES)
            hint = "" if meant is None else f" (did you mean {meant!r}?)"
            raise self._error(f"{of} is of type {word!r}, which Spark does not have{hint}")
        numbers = self._numbers(of)
        if word in _DECIMAL:
            return self._decimal(numbers, of)
        if self._took("collate"):
            self._name()
            return None
        return None if numbers else _PLAIN[word]  # Spark says what a number means there

    def _numbers(self, of: str) -> list[str]:
        """Returns what is in brackets after a type, such as its precision."""
        found: list[str] = []
        if self._took("("):
            while self._next and self._next != ")":
                found.append(self._take())
            self._expect(")", f"the numbers of {of}")
            if not found:
                raise self._error(f"the brackets of {of} are empty")
        return found

    def _decimal(self, numbers: list[str], of: str) -> pa.DataType:
        digits = [int(number) for number in numbers if number.isdigit()]
        precision, scale = (*digits, 0)[:2] if digits else (10, 0)
        is_pair = "".join(numbers) == ",".join(map(str, digits)) and len(digits) <= 2
        if not is_pair or not 1 <= precision <= 38 or scale > precision:
            raise self._error(
                f"{of} is decimal({''.join(numbers)}): expected up to 38 digits, and how many of them are decimals, as "
                "in "
                "decimal(12, 2)"
            )
        return pa.decimal128(precision, scale)

    def _nested(self, word: str, of: str) -> pa.DataType | None:
        self._expect("<", word)
        makers: dict[str, Callable[[], pa.DataType | None]] = {
            "array": lambda: _whole(_array, [self.type(f"an element of {of}")]),
            "map": lambda: self._map(of),
            "struct": self._struct,
        }
        found = makers[word]()
        self._expect(">", f"{word}<...")
        return found

    def _map(self, of: str) -> pa.DataType | None:
        key = self.type(f"a map's key of {of}")
        self._expect(",", "the type of a map's keys")
        return _whole(pa.map_, [key, self.type(f"a map's value of {of}")])

    def _struct(self) -> pa.DataType | None:
        fields = dict(self._fields(">"))
        return _whole(lambda *types: pa.struct(list(zip(fields, types, strict=True))), list(fields.values()))

    def _interval(self) -> pa.DataType | None:
        first = self._take().lower() if self._next in _UNITS else ""
        last = self._take().lower() if self._took("to") and self._next in _UNITS else first
        return pa.duration("us") if last in _OF_TIME else None


def _whole(make: Callable[..., pa.DataType], parts: list[pa.DataType | None]) -> pa.DataType | None:
    """Returns a type that is made of others. None: one of them is not known."""
    return None if any(part is None for part in parts) else make(*parts)


def _array(element: pa.DataType) -> pa.DataType:
    """Returns the type of an array. Its field has the name that Spark gives it, which is a part of what is recorded."""
    return pa.list_(pa.field("element", element))
