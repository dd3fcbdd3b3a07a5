"""Means of decimals, as Spark rounds them: once, to four digits behind the point more than the decimals have."""

from __future__ import annotations

from decimal import Decimal

from nosync.spark.plans.catalyst import Node, refused

_MORE_DIGITS, _MOST_DIGITS = 10, 38
"""How many digits a sum of decimals has more than these, and at most."""
_MORE_OF_A_MEAN, _LEAST_SCALE, _MOST_OF_A_MEAN = 4, 6, 24
"""How many digits a mean has more behind the point; how many a division has at least; of how many a mean can be in any case."""
_DIGITS_OF_A_COUNT, _COUNT_DIGITS = 9, 15
"""With so many digits more than a mean has, a quotient of a billion rows is rounded as the mean is; of how many rows one can be
that has fewer.
"""


def check_mean(call: Node, type_: Node) -> None:
    """Raises what refuses a call of `avg`, unless `mean_of_decimals` of this type can say it."""
    precision, scale = _of_sum(type_)
    more, of_mean = _more_digits(type_), _scale_of_mean(type_)
    fits = precision + _MORE_OF_A_MEAN < _MOST_DIGITS and _COUNT_DIGITS + of_mean < _MOST_DIGITS
    if more < 0 or (_is_rounded_twice(type_) and not fits):
        raise refused(
            call, f"Spark divides with more digits than its SQL has: CAST the argument to {_MOST_OF_A_MEAN} digits, say "
            f"decimal({_MOST_OF_A_MEAN}, {min(scale, _MOST_OF_A_MEAN // 2)})"
        )  # fmt: skip


def mean_of_decimals(total: str, n: str, type_: Node) -> str:
    """Returns the mean of decimals of a type, from the columns of their sum and of their number, as SQL text. A cast to the
    mean's type does not round it again.
    """
    precision, scale = _of_sum(type_)
    # A sum of 38 digits would leave few for what comes of the division: it has as many as Spark gives it.
    total = f"CAST({total} AS decimal({precision}, {scale}))"
    if not _is_rounded_twice(type_):
        return f"{total} / nullif(CAST({n} AS decimal(20, 0)), 0)"
    # What is left of a division without digits behind those of the mean is exact, and says which way to go.
    unit = f"{Decimal(1).scaleb(-_scale_of_mean(type_)):f}BD"
    count = f"nullif(CAST({n} AS decimal({_COUNT_DIGITS}, 0)), 0)"
    rest = f"({total} % ({count} * {unit}))"
    is_up = f"2BD * abs({rest}) >= {count} * {unit}"
    return f"({total} - {rest}) / {count} + IF({is_up}, IF({total} < 0, -{unit}, {unit}), 0BD)"


def _of_sum(type_: Node) -> tuple[int, int]:
    return min(type_.precision() + _MORE_DIGITS, _MOST_DIGITS), type_.scale()


def _scale_of_mean(type_: Node) -> int:
    return int(min(type_.scale() + _MORE_OF_A_MEAN, _MOST_DIGITS))


def _more_digits(type_: Node) -> int:
    """Returns how many digits SQL's division leaves behind the point, beside what Spark's own mean has."""
    precision, scale = _of_sum(type_)
    return max(_MOST_DIGITS - (precision - scale), _LEAST_SCALE) - _scale_of_mean(type_)


def _is_rounded_twice(type_: Node) -> bool:
    """Returns whether the quotient has a few digits more than the mean, and so its cast would round what was rounded."""
    return 0 < _more_digits(type_) < _DIGITS_OF_A_COUNT
