"""Fencing: the newest instance of a job on a timeline is the only one that may publish.

Each instance takes the next number, with a token of its own; the greatest number counts, and of two equal ones, which
two nodes gave at the same moment, the greater token. Nobody asks anybody: an instance that was replaced, say one that
hung while its cluster manager started another, is refused as soon as the file of the other is where it tries to publish
or to seal. What it had published before counts: layers are functions of their inputs, so they are the ones the new
instance would write.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import NamedTuple

from nosync.lsm.errors import FencedError
from nosync.lsm.model.timestamp import is_number
from nosync.lsm.platform.env import Env, storage_errors
from nosync.lsm.platform.json_file import publish_small
from nosync.lsm.platform.layout import JOBS

_KEPT = 2


class Instance(NamedTuple):
    """One start of a job; the greater one is in force."""

    number: int
    token: str

    def __str__(self) -> str:
        return f"{self.number}-{self.token}"


def _of_name(name: str) -> Instance | None:
    number, _, token = name.removesuffix(".json").partition("-")
    return Instance(int(number), token) if is_number(number) and token else None


def newest_instance(root: Path, timeline: str, env: Env) -> Instance | None:
    """Returns the newest instance of a job on a timeline; None where there was none."""
    with storage_errors("list", root / JOBS / timeline):
        names = env.list_dir(root / JOBS / timeline)
    return max((found for name in names if (found := _of_name(name)) is not None), default=None)


def take_over(root: Path, timeline: str, env: Env) -> Instance:
    """Registers a new instance, which fences all earlier ones."""
    newest = newest_instance(root, timeline, env)
    instance = Instance(newest.number + 1 if newest else 1, env.token())
    publish_small(root, root / JOBS / timeline / f"{instance}.json", {"line": timeline, "instance": str(instance)}, env)
    return instance


def check_fence(root: Path, timeline: str, instance: Instance | None, env: Env) -> None:
    """Raises FencedError where a newer instance is known here. None, work without a job, is never fenced."""
    newest = newest_instance(root, timeline, env) if instance else None
    if instance is not None and newest is not None and newest > instance:
        raise FencedError(
            f"this job is instance {instance.number} on {root}, and instance {newest.number} has taken over: it publishes "
            "nothing more. Stop this one"
        )


def old_instances(paths: list[PurePosixPath]) -> list[PurePosixPath]:
    """Returns, of the files of all registers, the instances that newer ones have long replaced."""
    by_timeline: dict[PurePosixPath, list[tuple[Instance, PurePosixPath]]] = {}
    for path in paths:
        if path.parts[0] == JOBS and (found := _of_name(path.name)) is not None:
            by_timeline.setdefault(path.parent, []).append((found, path))
    return [path for of_timeline in by_timeline.values() for _, path in sorted(of_timeline)[:-_KEPT]]
