"""Which known name somebody meant who wrote another one."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_ALIKE = 0.6
"""How much of two names must be equal, from 0 to 1, for one to be a slip of the other."""


_MADE = re.compile(r"-[0-9a-f]{10}(__\w+)?$")
"""How stages are named that a view is made of."""


def named_stages(stages: Iterable[str]) -> str:
    """Returns what an error says of which stages there are: those with a name that somebody gave."""
    return ", ".join(stage for stage in stages if _MADE.search(stage) is None) or "none"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Returns the known name that is most like this one; None where none is like it. Upper and lower case count as
    equal.
    """
    by_lower = {other.lower(): other for other in known}
    found = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=_ALIKE)
    return by_lower[found[0]] if found else None


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Returns what an error about an unknown name adds to its text: nothing where no known name is like it."""
    found = nearest(name, known) if isinstance(name, str) else None
    return "" if found is None else f" (did you mean {found!r}?)"
