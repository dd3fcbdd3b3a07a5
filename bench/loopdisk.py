"""A disk of its own, in a file, for benchmarks of what depends on the file system."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SIZE_BYTES = 4 << 30


@contextmanager
def journaled_disk() -> Iterator[Path | None]:
    """The directory where an ext4 with a journal is mounted, as most disks are; None where only root may mount one."""
    if os.geteuid():
        yield None
        return
    with tempfile.TemporaryDirectory(dir=".") as directory:
        image, mount = Path(directory) / "image", Path(directory) / "mount"
        mount.mkdir()
        with image.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, SIZE_BYTES)
        _done("mkfs.ext4", "-q", "-F", "-O", "has_journal", str(image))
        _done("mount", "-o", "loop", str(image), str(mount))
        try:
            yield mount
        finally:
            _done("umount", "--lazy", str(mount))  # what failed may still have files open


def _done(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
