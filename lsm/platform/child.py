"""Child processes that run code of this package, and talk with their parent by standard input and output."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from nosync.lsm.platform.process import numpy_environment


def start_child(program: str) -> subprocess.Popen[bytes]:
    """Starts a Python process that runs a program, which imports what it needs.

    It imports this package from where it lies, whatever its parent did to its own path, and nothing of its parent's
    main program.
    """
    importable = str(Path(__file__).parents[3])
    path = os.pathsep.join(filter(None, [importable, os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-P", "-c", program],  # -P: code of the current directory is not ours
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **numpy_environment(), "PYTHONPATH": path},
    )
