"""Real file systems that are soon full."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(mount: Path, mebibytes: int, also_by: str) -> Iterator[Path]:
    """Mounts a file system of so many MiB, and takes it away again. Skips the test where only root may: `also_by` says what
    shows the same without.
    """
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(mount)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip(f"only root may mount a file system; {also_by}")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)
