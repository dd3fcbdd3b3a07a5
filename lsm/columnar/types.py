"""What types are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa

_MOST_DIGITS, _MOST_DIGITS_WIDE = 38, 76
"""Of decimals of 128 bits, and of 256."""


def has_part(type_: pa.DataType, is_one: Callable[[pa.DataType], bool]) -> bool:
    """Returns whether a type, or one inside of it at any depth, is such a one."""
    return is_one(type_) or any(has_part(type_.field(i).type, is_one) for i in range(type_.num_fields))


def cast_exactly(values: Any, type_: pa.DataType) -> Any:
    """Returns an array, a chunked one or a scalar as another type. Raises pa.ArrowInvalid where a value has no place in it.

    Arrow does not notice every decimal that has none: with more digits behind the point, some wrap around 128 bits.
    """
    of = values.type
    if (
        pa.types.is_decimal128(of)
        and pa.types.is_decimal128(type_)
        and of.precision + type_.scale - of.scale > _MOST_DIGITS
    ):
        values = values.cast(pa.decimal256(_MOST_DIGITS_WIDE, type_.scale))
    return values.cast(type_)
