"""What is in a directory of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from nosync.checkpoints.keep import files_below
from nosync.lsm.platform.env import Env


def contents(root: Path) -> dict[str, bytes]:
    return {path: (root / path).read_bytes() for path in files_below(root, Env())}
