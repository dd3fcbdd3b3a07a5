"""A user's function as it was when its job was made.

A stage's fingerprint says what its function does, and is taken when a job is made. What tasks run must be that
function, also where a global that it uses gets another value later, as in the next cell of a notebook: else rows would
be recorded under the fingerprint of a function that did not make them. So it is pickled once, at the same time, and not
anew for each epoch.
"""

from __future__ import annotations

import pickle  # noqa: TID251 - of code, which goes to tasks as Spark sends it; never of state
from typing import Any


def unpickled(data: bytes) -> Any:
    """Returns what was pickled in this session: what Spark sends to workers of a function."""
    return pickle.loads(data)


class PickledFunction:
    """Called as the function that it is made of. `hashed`: what a fingerprint sees of that."""

    def __init__(self, pickled: bytes, hashed: bytes = b"", *, is_per_key: bool = False) -> None:
        self._pickled, self.hashed, self.is_per_key = pickled, hashed, is_per_key
        self._function: Any = None

    def __call__(self, *arguments: Any) -> Any:
        if self._function is None:
            self._function = pickle.loads(self._pickled)
        return self._function(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return PickledFunction, (self._pickled,)  # tasks take no fingerprints
