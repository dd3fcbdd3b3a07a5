"""Aggregate functions for `Dataflow.aggregate`, as users declare them.

How each is computed is in `aggregate_plan`. Nulls are as in SQL: `count("x")`, sum, min, max and mean pass over nulls,
and are null (count: 0) where there is nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

from nosync.lsm.errors import FlowError

MAX_LIST = 100_000


@dataclass(frozen=True)
class Aggregate:
    """One aggregate function over one column (None: over rows). Made by `count`, `sum`, `min`, `max`, ..."""

    function: str
    column: str | None = None
    by: str | None = None
    """The column that orders the rows, of first and last."""
    limit: int | None = None
    """The most values that top_k and collect return."""

    def __post_init__(self) -> None:
        for what, name in (("column", self.column), ("by", self.by)):
            if name is not None and not isinstance(name, str):
                raise FlowError(f"{self.function}: {what} is {name!r}, expected the name of a column, such as 'x'")

    @property
    def state(self) -> str:
        """Returns what its state is of, the column aside; empty for a column of whole rows."""
        function = {"stddev": "variance", "field": ""}.get(self.function, self.function)
        by = "" if self.by is None else f" by {self.by}"
        return f"{function}{by}" + ("" if self.limit is None else f", at most {self.limit}")

    def __str__(self) -> str:
        return f"{self.function}({self.column or ''})"


def count(column: str | None = None) -> Aggregate:
    """Number of rows, or of non-null values of `column`. int64."""
    return Aggregate("count", column)


def sum(column: str) -> Aggregate:
    """Sum of a numeric column: int64 for integers, double for floats, decimal(38, s) for decimals."""
    return Aggregate("sum", column)


def min(column: str) -> Aggregate:
    """Smallest value of a column of any ordered type."""
    return Aggregate("min", column)


def max(column: str) -> Aggregate:
    """Largest value of a column of any ordered type."""
    return Aggregate("max", column)


def mean(column: str) -> Aggregate:
    """Mean of a numeric column. double."""
    return Aggregate("mean", column)


def count_distinct(column: str) -> Aggregate:
    """Exact number of different values of a column of any ordered type. int64."""
    return Aggregate("count_distinct", column)


def variance(column: str) -> Aggregate:
    """Sample variance of a numeric column; null for fewer than two values. double."""
    return Aggregate("variance", column)


def stddev(column: str) -> Aggregate:
    """Sample standard deviation of a numeric column; null for fewer than two values. double."""
    return Aggregate("stddev", column)


def first(column: str, *, by: str) -> Aggregate:
    """The value of `column` in the row with the smallest `by` (of several: the smallest value, null if there is no
    other).

    Rows whose `by` is null are passed over.
    """
    return Aggregate("first", column, by=by)


def last(column: str, *, by: str) -> Aggregate:
    """The value of `column` in the row with the largest `by` (of several: the largest value, null if there is no
    other).

    Rows whose `by` is null are passed over.
    """
    return Aggregate("last", column, by=by)


def top_k(column: str, k: int) -> Aggregate:
    """The k largest values of a column, largest first, as a list."""
    return Aggregate("top_k", column, limit=_check_limit("top_k", k))


def collect(column: str, *, limit: int) -> Aggregate:
    """The values of a column in ascending order as a list, the smallest `limit` of them."""
    return Aggregate("collect", column, limit=_check_limit("collect", limit))


def _check_limit(function: str, limit: int) -> int:
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MAX_LIST:
        raise FlowError(f"{function}: {limit!r} is not a number of values from 1 to {MAX_LIST}")
    return limit
