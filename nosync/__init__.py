"""nosync: a coordination-free state store for functional streaming computations on Apache Spark.

    import nosync
    with nosync.open("state/") as store:
        ...

See README.md for the two-command start and docs/ for how it works.
"""

from nosync.lsm.errors import NosyncError
from nosync.lsm.store import Store, open_store
from nosync.lsm.store import open_store as open  # noqa: A004 - nosync.open reads like the built-in on purpose

__all__ = ["NosyncError", "Store", "open", "open_store"]
