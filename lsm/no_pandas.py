"""Processes that run only our own code do without Pandas.

Arrow looks whether what it makes an array of is a Series, and imports Pandas for that where it is installed: a third of a
second, and memory that nothing else uses. Spark's workers and drivers run code of users, which may want it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder


class _NoPandas(MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: object = None) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError("this process does without pandas", name=fullname)


def leave_out_pandas() -> None:
    """From now on `import pandas` fails in this process, as if it were not installed."""
    sys.meta_path.insert(0, _NoPandas())
