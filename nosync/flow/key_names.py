"""Keys as they are given to operators."""

from __future__ import annotations

from collections.abc import Sequence

from nosync.lsm.errors import FlowError


def check_key_names(stage: str, key: Sequence[str]) -> tuple[str, ...]:
    """Returns the key as a tuple. Raises FlowError for what is no list of different names."""
    if isinstance(key, str):
        raise FlowError(f"stage {stage}: key is {key!r}, expected a list of column names: [{key!r}]")
    if not key or not all(isinstance(name, str) for name in key) or len(set(key)) != len(key):
        raise FlowError(f"stage {stage}: key is {list(key)}, expected one or more different column names")
    return tuple(key)
