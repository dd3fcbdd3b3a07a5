"""What is known of a stage's columns when it is declared, before there is a Spark session, so that a wrong name is told
there.

Sources, keys and aggregates say what their columns are; a function of users, or an expression of Spark, may not: what
follows such a stage is checked when the job is made (nosync.flow.binder).
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from nosync.flow.ddl import Columns, columns_of, type_of
from nosync.flow.foreign_words import FUNCTIONS_ELSEWHERE
from nosync.kernels import aggregates as functions
from nosync.kernels.aggregate_plan import Plan
from nosync.kernels.aggregates import Aggregate
from nosync.kernels.join_types import ANTI, INNER, SEMI
from nosync.kernels.windows import END, START, Window, is_time
from nosync.lsm.columnar.columns import nullable
from nosync.lsm.columnar.hashing import check_key_type
from nosync.lsm.errors import FlowError, SchemaError
from nosync.lsm.platform.nearest import did_you_mean, nearest

_NAMED = re.compile(r"(?P<text>.*\S)\s+AS\s+(?P<name>`[^`]+`|\w+)\s*\Z", re.IGNORECASE | re.DOTALL)
_BARE = re.compile(r"\s*([^\W\d]\w*|`[^`]+`)\s*\Z")
_NO_COLUMNS = re.compile(r"(?:true|false|null|current_\w+|localtimestamp|user|session_user|now)\Z", re.IGNORECASE)
"""Words that are an expression by themselves."""
_PLAIN_TOKEN = re.compile(r"`[^`]+`|[^\W\d]\w*|\d+(?:\.\d+)?[A-Za-z]*|[<>=!(),+*/%-]")
_PLAIN = re.compile(rf"(?>\s+|{_PLAIN_TOKEN.pattern})*+")  # nothing is given back: words would be cut in all ways
_WORDS_OF_CONDITIONS = frozenset({"and", "or", "not", "in", "is", "null", "true", "false", "between", "like"})
_NOT_PLAIN = frozenset(
    {
        "case", "when", "then", "else", "end", "distinct", "from", "interval", "date", "timestamp", "rlike", "regexp", "ilike",
        "escape", "div", "any", "some", "all", "exists", "select", "cast", "as",
    }
)  # fmt: skip
"""Words, some of them in front of a literal, that make an expression more than plain."""
_TEXT = re.compile(r"(?<!\w)'[^'\\]*'")
"""A text in quotes, but for literals of other kinds, such as x'1f'."""
_MADE_BY = re.compile(r"(?:Column<')?\s*(\w+)\s*\(")
_FUNCTIONS = (
    "count", "sum", "min", "max", "mean", "count_distinct", "variance", "stddev", "first", "last", "top_k", "collect",
)  # fmt: skip
_SHOWN = {
    "count": "nosync.count()", "first": "nosync.first('x', by='at')", "last": "nosync.last('x', by='at')",
    "top_k": "nosync.top_k('x', 3)", "collect": "nosync.collect('x', limit=100)",
}  # fmt: skip


@dataclass(frozen=True)
class Known:
    """Holds what is known of a stage. `columns` is None where only the job can say which there are."""

    columns: Columns | None
    changing: bool = False

    def type(self, name: str) -> pa.DataType | None:
        return None if self.columns is None else self.columns.get(name)

    def described(self) -> str:
        return ", ".join(name if type_ is None else f"{name} {type_}" for name, type_ in (self.columns or {}).items())


def check_column(stage: str, what: str, name: str, given: str, known: Known) -> None:
    """Raises SchemaError where the input `given` is known not to have a column. `what`: what asks for it."""
    if known.columns is not None and name not in known.columns:
        raise SchemaError(
            f"stage {stage}: {what} {name!r} is not in its input {given} ({known.described()})"
            f"{did_you_mean(name, known.columns)}"
        )


def check_keys(stage: str, key: Sequence[str], given: str, known: Known) -> None:
    for name in key:
        check_column(stage, "key column", name, given, known)
        type_ = known.type(name)
        if type_ is not None:
            try:
                check_key_type(name, type_)
            except SchemaError as error:
                raise SchemaError(f"stage {stage}: {error}") from None


def shown_function(name: object) -> str | None:
    """Returns how an aggregate of that name, here or elsewhere, is written. None: nothing is like it."""
    if not isinstance(name, str):
        return None
    known = FUNCTIONS_ELSEWHERE.get(name.lower()) or nearest(name, _FUNCTIONS)
    return None if known is None else _SHOWN.get(known, f"nosync.{known}('x')")


def check_aggregates(stage: str, key: Sequence[str], aggregates: Mapping[str, object]) -> None:
    """Raises FlowError where something is no aggregate, or cannot be called so."""
    if not aggregates:
        raise FlowError(f"stage {stage}: give at least one aggregate, such as n=nosync.count()")
    for output, aggregate in aggregates.items():
        if output in key or output.startswith("_"):
            raise FlowError(f"stage {stage}: {output!r} cannot name an aggregate: it is a key column or begins with _")
        if isinstance(aggregate, Aggregate):
            continue
        made_by = _MADE_BY.match(aggregate if isinstance(aggregate, str) else str(aggregate))
        name = getattr(aggregate, "__name__", aggregate if isinstance(aggregate, str) and not made_by else None)
        use = shown_function(made_by[1] if made_by and name is None else name) or "nosync.count() or nosync.sum('x')"
        shown = f"the function {name}" if callable(aggregate) else repr(aggregate)
        is_ours = callable(aggregate) and aggregate is getattr(functions, str(name), None)
        why = "is not called" if is_ours else "is not an aggregate of nosync"
        raise FlowError(f"stage {stage}: {output}= is {shown}, which {why}: use {output}={use}")


def of_aggregates(stage: str, aggregates: Mapping[str, Aggregate], given: str, known: Known) -> Columns:
    """Returns the columns that aggregates make."""
    made: dict[str, pa.DataType | None] = {}
    for output, aggregate in aggregates.items():
        asked = [name for name in (aggregate.column, aggregate.by) if name is not None]
        for name in asked:
            check_column(stage, f"{aggregate}: column", name, given, known)
        types = {name: known.type(name) for name in asked}
        made[output] = None
        if None not in types.values():
            plan = Plan(stage, (), {output: aggregate}, pa.schema(list(types.items())), retracts=known.changing)
            made[output] = plan.schema.field(output).type
    return made


def of_source(stage: str, schema: object) -> Known:
    return Known(columns_of(schema, f"source {stage}"))


def of_map(stage: str, schema: str | None, known: Known) -> Known:
    return Known(None if schema is None else columns_of(schema, f"stage {stage}: schema="), known.changing)


def of_where(stage: str, condition: object, given: str, known: Known) -> Known:
    """Returns the columns of the input. Raises SchemaError where a plain condition names another column."""
    check_expressions(stage, (condition,), "filter")
    for word in _words_alone(condition) if isinstance(condition, str) and known.columns is not None else ():
        _check_word(stage, word, given, known, {})
    return known


def check_expressions(stage: str, expressions: Sequence[object], instead: str) -> None:
    """Raises FlowError where an expression of Spark's is a function of Python. `instead`: what takes such."""
    for expression in expressions:
        if inspect.isroutine(expression) or isinstance(expression, functools.partial):
            name = getattr(expression, "__name__", "a function")
            raise FlowError(
                f"stage {stage}: {name} is a function of Python, expected SQL text such as 'total > 100', or a Column: "
                f"{instead}({stage!r}, {name}) takes a function of a pyarrow.Table"
            )


def _words_alone(text: str) -> list[str]:
    """Returns the words of an expression that can only be columns. There are none where more than comparisons and
    arithmetic is in it: a function, say, may have words of its own.
    """
    text = _TEXT.sub(" 0 ", text)
    if _PLAIN.fullmatch(text) is None or "--" in text or "/*" in text:
        return []
    tokens = _PLAIN_TOKEN.findall(text)
    words = [token for token in tokens if token[0] == "`" or token[0].isalpha()]
    calls = any(b == "(" and _is_name(a) for a, b in itertools.pairwise(tokens))
    if calls or any(word.lower() in _NOT_PLAIN for word in words):
        return []
    return [word.strip("`") for word in words if _is_name(word)]


def _is_name(token: str) -> bool:
    return token[0] == "`" or (token[0].isalpha() and token.lower() not in _WORDS_OF_CONDITIONS)


def of_select(stage: str, expressions: Sequence[object], given: str, known: Known) -> Known:
    """Returns columns under names that the texts show; not known where one does not."""
    check_expressions(stage, expressions, "map")
    made: dict[str, pa.DataType | None] = {}
    is_clear = True
    for expression in expressions:
        if not isinstance(expression, str) or "--" in expression or "/*" in expression:
            is_clear = False
            continue
        if expression.strip() == "*":
            is_clear = is_clear and known.columns is not None
            found = dict(known.columns or {})
        else:
            named = _NAMED.match(expression)
            text = named["text"] if named else expression
            bare = _BARE.match(text)
            name = named["name"] if named else bare[1] if bare else None
            if bare is not None:
                _check_word(stage, bare[1].strip("`"), given, known, made if is_clear else None)
            if name is None:
                is_clear = False
                continue
            found = {name.strip("`"): known.type(bare[1].strip("`")) if bare else None}
        twice = next((name for name in found if name in made), None)
        if twice is not None:
            raise SchemaError(f"stage {stage}: two of its columns have the same name, {twice!r}: rename one with AS")
        made |= found
    return Known(made if is_clear else None, known.changing)


def _check_word(stage: str, word: str, given: str, known: Known, made: Columns | None) -> None:
    """Checks that a word that stands alone is a column: the input has it, or the select itself.

    `made` has the columns of the select. It is None where those are not known.
    """
    if known.columns is None or made is None or _NO_COLUMNS.match(word):
        return
    if word.lower() not in {name.lower() for name in (*known.columns, *made)}:
        check_column(stage, "column", word, given, known)


def of_union(stage: str, inputs: Mapping[str, Known]) -> Known:
    (first, one), *others = inputs.items()
    for name, other in others:
        if one.columns is not None and other.columns is not None:
            _check_same(
                f"stage {stage}: its inputs have different columns: {first} has ({one.described()}), {name} has "
                f"({other.described()}); bring them together with map or select",
                one.columns,
                other.columns,
            )
    columns = next((known.columns for known in inputs.values() if known.columns is not None), None)
    return Known(columns, any(known.changing for known in inputs.values()))


def _check_same(message: str, one: Columns, other: Columns) -> None:
    if sorted(one) != sorted(other) or not all(_alike(type_, other[name]) for name, type_ in one.items()):
        raise SchemaError(message)


def _alike(one: pa.DataType | None, other: pa.DataType | None) -> bool:
    """Returns whether two types are the same, as far as is known. A setting says whether Spark's timestamps have a
    zone.
    """
    if one is None or other is None or (pa.types.is_timestamp(one) and pa.types.is_timestamp(other)):
        return True
    return bool(nullable(one) == nullable(other))


def of_join(stage: str, on: Sequence[str], how: str, inputs: Sequence[tuple[str, Known]]) -> Known:
    (left_name, left), (right_name, right) = inputs
    for name in on:
        for given, known in inputs:
            check_keys(stage, [name], given, known)
        if not _alike(left.type(name), right.type(name)):
            raise SchemaError(
                f"stage {stage}: join column {name!r} is {left.type(name)} in {left_name} and {right.type(name)} in "
                f"{right_name}: cast one"
            )
    changing = left.changing or right.changing or how not in (INNER, SEMI)
    if how in (SEMI, ANTI):
        return Known(left.columns, changing)
    if left.columns is None or right.columns is None:
        return Known(None, changing)
    clash = next((name for name in left.columns if name in right.columns and name not in on), None)
    if clash is not None:
        raise SchemaError(
            f"stage {stage}: {left_name} and {right_name} both have a column {clash!r}; rename one with select or map"
        )
    return Known({**left.columns, **right.columns}, changing)


def of_static_join(stage: str, on: Sequence[str], table: Any, given: str, known: Known) -> Known:
    columns: Columns = {field.name: type_of(field.dataType.simpleString()) for field in table.schema}
    for name in on:
        check_column(stage, "join column", name, given, known)
        check_column(stage, "join column", name, "the table", Known(columns))
    if known.columns is None:
        return known
    clash = next((name for name in columns if name in known.columns and name not in on), None)
    if clash is not None:
        raise SchemaError(f"stage {stage}: the table and its input both have a column {clash!r}: rename one")
    return Known({**known.columns, **{n: t for n, t in columns.items() if n not in on}}, known.changing)


def of_aggregate(
    stage: str, key: Sequence[str], aggregates: Mapping[str, Aggregate], given: str, known: Known
) -> Known:
    check_aggregates(stage, key, aggregates)
    check_keys(stage, key, given, known)
    made = of_aggregates(stage, aggregates, given, known)
    return Known({**{name: known.type(name) for name in key}, **made}, changing=True)


def of_dedupe(stage: str, key: Sequence[str], given: str, known: Known) -> Known:
    check_keys(stage, key or list(known.columns or ()), given, known)
    return known


def of_update(stage: str, key: Sequence[str], state: object, given: str, known: Known) -> Known:
    check_keys(stage, key, given, known)
    columns = columns_of(state, f"stage {stage}: state=", "'total bigint'")
    for name in columns:
        if name in key:
            raise SchemaError(f"stage {stage}: state column {name!r} is a key column, which the state has anyway")
    return Known({**{name: known.type(name) for name in key}, **columns}, changing=True)


def of_per_key(stage: str, key: Sequence[str], schema: str | None, given: str, known: Known) -> Known:
    """Returns the key and the columns that are declared; not known where `schema` is left out."""
    check_keys(stage, key, given, known)
    if schema is None:
        return Known(None, changing=True)
    columns = columns_of(schema, f"stage {stage}: schema=")
    for name in columns:
        if name in key:
            raise SchemaError(
                f"stage {stage}: column {name!r} of its schema= is a key column, which its rows have anyway"
            )
    return Known({**{name: known.type(name) for name in key}, **columns}, changing=True)


def expanded(window: Window, known: Known) -> Known:
    """Returns the rows of a window's input with the window that each is in."""
    bounds: Columns = {START: pa.timestamp("us", "UTC"), END: pa.timestamp("us", "UTC")}
    return Known(None if known.columns is None else {**known.columns, **bounds}, known.changing)


def check_times(stage: str, time: str, given: str, known: Known) -> None:
    """Raises SchemaError or FlowError unless an input only grows, and has a column of event time."""
    check_time_column(stage, time, given, known)
    if known.changing:
        raise FlowError(
            f"stage {stage}: its input {given} changes, and here rows may only be added: what was given once is never "
            'taken back. Give it windows with emit="final", or rows from before they are aggregated'
        )


def check_time_column(stage: str, time: str, given: str, known: Known) -> None:
    """Raises SchemaError where the input has no column of event time under the name that was given."""
    check_column(stage, "time column", time, given, known)
    type_ = known.type(time)
    if type_ is not None and not is_time(type_):
        raise SchemaError(
            f"stage {stage}: time column {time!r} is {type_}, expected a timestamp or date: declare it so, or make one "
            f'with select, as in "to_timestamp({time}) AS {time}"'
        )


def of_window(
    stage: str, window: Window, key: Sequence[str], aggregates: Mapping[str, Aggregate], given: str, known: Known
) -> Known:
    check_time_column(stage, window.time, given, known)
    if window.session and not key:
        raise FlowError(f"stage {stage}: a session window needs a key")
    if window.session and known.changing:
        raise FlowError(f"stage {stage}: a session window needs an input that only grows, and {given} changes")
    for name in (START, END):
        if name in (known.columns or ()):
            raise SchemaError(f"stage {stage}: its input has a column {name!r}, which the window adds: rename it")
    check_aggregates(stage, (*key, START, END), aggregates)
    check_keys(stage, key, given, known)
    made = of_aggregates(stage, aggregates, given, expanded(window, known))
    bounds: Columns = {START: pa.timestamp("us", "UTC"), END: pa.timestamp("us", "UTC")}
    return Known({**{name: known.type(name) for name in key}, **bounds, **made}, changing=True)
