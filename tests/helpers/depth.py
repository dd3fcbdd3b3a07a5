"""How many examples the property tests try. `make test` tries a part of them; `make properties` all, and more.

NOSYNC_DEPTH is a factor. Each run takes other examples, so what a short one does not try another one does.
"""

from __future__ import annotations

import os

DEPTH = float(os.environ.get("NOSYNC_DEPTH", "0.15"))
FEWEST = 5


def examples(all_of_them: int) -> int:
    """Returns how many examples to try, where a whole run tries `all_of_them`."""
    return max(FEWEST, round(all_of_them * DEPTH))
