"""Values that are equal but for the last bits of doubles, which depend on the order in which these were added up."""

from __future__ import annotations

import math
from typing import Any

_CLOSE = 1e-9


def are_close(one: Any, other: Any) -> bool:
    """Returns whether two values, as `to_pylist` gives them, agree in some nine digits of their doubles and in all else."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=_CLOSE) or (math.isnan(one) and math.isnan(other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(are_close(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(are_close, one, other))
    return bool(one == other)
