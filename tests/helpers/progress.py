"""Progress of the long loops, which have targets of their own in the Makefile (run with `pytest -s`)."""

from __future__ import annotations

import time
from collections.abc import Iterator

_SHORT = 20
_EVERY_S = 5.0


def shown(cycles: int, what: str) -> Iterator[int]:
    """Yields 0 to `cycles` - 1. Every five seconds it prints how many are done, and how long the rest may take.

    A short loop, as in `make test`, prints nothing.
    """
    began_s = said_s = time.monotonic()
    for done in range(cycles):
        now_s = time.monotonic()
        if cycles > _SHORT and now_s - said_s >= _EVERY_S:
            said_s = now_s
            rest_s = (now_s - began_s) / max(done, 1) * (cycles - done)
            print(f"{done:,} of {cycles:,} {what}, about {rest_s / 60:.0f} min left", flush=True)
        yield done
