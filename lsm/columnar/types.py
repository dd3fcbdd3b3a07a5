"""What types are made of."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa


def has_part(type_: pa.DataType, is_one: Callable[[pa.DataType], bool]) -> bool:
    """Returns whether a type, or one inside of it at any depth, is such a one."""
    return is_one(type_) or any(has_part(type_.field(i).type, is_one) for i in range(type_.num_fields))
