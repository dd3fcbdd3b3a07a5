"""Fencing: the newest instance of a job on a line is the only one that may publish.

Each instance takes the next number by linking a file, which succeeds once. An instance that was replaced, say one that
hung while its cluster manager started another, is refused as soon as it tries to publish or to seal. What it had
published before counts: layers are functions of their inputs, so they are the ones the new instance would write.
"""

from __future__ import annotations

from pathlib import Path

from nosync.lsm.env import Env, storage_errors
from nosync.lsm.errors import FencedError
from nosync.lsm.writer import temporary_path

JOBS = "jobs"


def newest_job(root: Path, line: str, env: Env) -> int:
    """The number of the newest instance on a line; 0 where there was none."""
    with storage_errors("list", root / JOBS / line):
        return max((int(name) for name in env.list_dir(root / JOBS / line) if name.isdigit()), default=0)


def take_over(root: Path, line: str, env: Env) -> int:
    """Registers a new instance, which fences all earlier ones. Returns its number."""
    while True:
        number = newest_job(root, line, env) + 1
        temporary, final = temporary_path(root, env), root / JOBS / line / str(number)
        with storage_errors("write", final):
            try:
                with env.create(temporary) as file:
                    file.write(b"")
                env.make_dirs(final.parent)
                env.link(temporary, final)
            except FileExistsError:
                continue  # another instance took this number at the same moment
            finally:
                env.unlink(temporary)
        for older in range(max(1, number - 2), number - 1):  # the newest number is all that is needed
            env.unlink(root / JOBS / line / str(older))
        return number


def check_fence(root: Path, line: str, number: int, env: Env) -> None:
    """Raises FencedError where a newer instance exists. Number 0, of work without a job, is never fenced."""
    newest = newest_job(root, line, env) if number else 0
    if newest > number:
        raise FencedError(
            f"this job is instance {number} on {root}, and instance {newest} has taken over: it publishes nothing more. "
            "Stop this one"
        )
