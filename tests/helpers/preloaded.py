"""All that a daemon needs, imported in the process that forks daemons (see `forking`), and as a daemon imports it: without
Pandas.
"""

from __future__ import annotations

import importlib
from contextlib import suppress

from nosync.lsm.platform.process import leave_out_pandas

leave_out_pandas()
for _name in ("nosync.cli", "nosync.replication.daemon.process", "nosync.replication.remote.level", "uvicorn"):
    with suppress(ImportError):  # of an extra
        importlib.import_module(_name)
