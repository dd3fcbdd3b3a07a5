"""When epochs were sealed by the wall clock: a fact beside each manifest, which does not change what an epoch is.

Invariants
- A manifest says nothing of a clock: equal epochs have equal manifests, whoever seals them, and whenever.
- An epoch's time is published before its manifest, so whoever sees the epoch on the node that sealed it sees the time.
- Files are only added, and those of one epoch are combined by taking the smallest time, so nodes that have the same
  files agree, in whatever order these came. An epoch that two nodes sealed, or that was sealed again after a crash, has
  several.
- A file of many old epochs stands for theirs. It is durable before those go, and any node may make it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from blake3 import blake3

from nosync.lsm.errors import CorruptionError
from nosync.lsm.manifests.branches import Refs
from nosync.lsm.model.layer import check_name
from nosync.lsm.model.timestamp import Epoch, is_number, pack
from nosync.lsm.platform.env import Env, storage_errors
from nosync.lsm.platform.json_file import publish_text, read_if_there, seal_json, sync_published, unseal_json
from nosync.lsm.platform.layout import TIMES
from nosync.lsm.platform.parsing import parsed

log = logging.getLogger("nosync")

_TOKEN_DIGITS = 16
_SUFFIX = ".json"
_MOST_US = 1 << 62
EventSpan = tuple[int, int]
"""The oldest and the newest event time of an epoch's rows."""


@dataclass(frozen=True)
class SealTime:
    """Says when an epoch was sealed, and what stretch of event time is in it. All are microseconds since 1970, UTC."""

    sealed_us: int
    oldest_us: int | None = None
    newest_us: int | None = None
    """The event times of its rows, where a window of the flow says which column has them; None: nobody knows."""

    def combined(self, other: SealTime) -> SealTime:
        """Returns the one that counts where an epoch has two: the earlier."""
        return min(self, other, key=lambda one: (one.sealed_us, one.oldest_us or 0, one.newest_us or 0))


class _Named(NamedTuple):
    """What the name of a file says: which epochs it is of."""

    first: Epoch
    last: Epoch


class SealTimes:
    """The times of one data directory. What a file says never changes, so each is read once."""

    def __init__(self, root: Path, env: Env) -> None:
        self._root, self._env = root, env
        self._read: dict[PurePosixPath, Mapping[Epoch, SealTime]] = {}

    def record(self, timeline: str, t: int, span: EventSpan | None = None) -> PurePosixPath:
        """Publishes that an epoch is sealed now, and returns the file, which is not durable yet. `span`: its event
        time.
        """
        oldest, newest = span or (None, None)
        time = SealTime(self._env.utc_us(), oldest, newest)
        path = _directory(timeline) / f"{t}-{self._env.token()}{_SUFFIX}"
        publish_text(self._root, self._root / path, seal_json(_fields(timeline, {Epoch(t): time})), self._env)
        return path

    def of_timeline(self, timeline: str) -> dict[Epoch, SealTime]:
        """Returns the times of a timeline's own epochs, in order. Raises CorruptionError for a damaged file."""
        found: dict[Epoch, SealTime] = {}
        for path in self._listed(timeline):
            for t, time in self._times_in(path).items():
                found[t] = time if t not in found else found[t].combined(time)
        return dict(sorted(found.items()))

    def of_epoch(self, timeline: str, t: int) -> SealTime | None:
        """Returns the time of one epoch of a timeline, reading no more than that takes."""
        found: SealTime | None = None
        for path in self._listed(timeline, t):
            time = self._times_in(path).get(Epoch(t))
            if time is not None:
                found = time if found is None else found.combined(time)
        return found

    def roll_up(self, timeline: str, size: int, until: int) -> list[PurePosixPath]:
        """Puts the times of each whole, aligned group of `size` epochs up to an epoch into one file, and returns these
        files, which are durable. What they stand for is `replaced_times`, and stays for now.
        """
        listed = self._listed(timeline)
        singles = {named.first // size * size for named in listed.values() if named.last == named.first}
        made = [base for base in sorted(singles) if base + size - 1 <= until]
        return [self._rolled_up(timeline, listed, Epoch(base), Epoch(base + size - 1)) for base in made]

    def _rolled_up(
        self, timeline: str, listed: Mapping[PurePosixPath, _Named], first: Epoch, last: Epoch
    ) -> PurePosixPath:
        found: dict[Epoch, SealTime] = {}
        for path in [path for path, named in listed.items() if first <= named.first and named.last <= last]:
            try:
                times = self._times_in(path)
            except CorruptionError as error:
                log.warning("the time of an epoch is lost: %s", error)
                continue
            for t, time in times.items():
                found[t] = time if t not in found else found[t].combined(time)
        text = seal_json(_fields(timeline, found))
        token = blake3(text).hexdigest()[:_TOKEN_DIGITS]  # equal times are one file, whichever node puts them together
        path = _directory(timeline) / f"{first}-{last}-{token}{_SUFFIX}"
        publish_text(self._root, self._root / path, text, self._env)
        sync_published(self._root, self._root / path, self._env)
        return path

    def _listed(self, timeline: str, t: int | None = None) -> dict[PurePosixPath, _Named]:
        """Returns the files of a timeline. `t`: only those that may say something of that epoch."""
        directory = _directory(timeline)
        with storage_errors("list", self._root / directory):
            names = self._env.list_dir(self._root / directory)
        if t is not None:  # names of one epoch have one dash, and are not taken apart one by one
            names = [name for name in names if name.startswith(f"{t}-") or name.count("-") > 1]
        listed = {directory / name: named for name in sorted(names) if (named := _named(name)) is not None}
        return {path: n for path, n in listed.items() if t is None or n.first <= t <= n.last}

    def _times_in(self, path: PurePosixPath) -> Mapping[Epoch, SealTime]:
        known = self._read.get(path)
        if known is None:
            try:
                fields, _ = unseal_json(read_if_there(self._root / path, self._env), str(self._root / path))
            except FileNotFoundError:
                return {}  # a file of many epochs stands for it since, which the next look finds
            with parsed("times of epochs", str(self._root / path)):
                known = self._read[path] = times_of(fields, path)
        return known


def times_of(fields: Mapping[str, Any], path: PurePosixPath) -> dict[Epoch, SealTime]:
    """Returns what a file says. Raises KeyError, TypeError or ValueError where its name, or its contents, are none."""
    named = _named(path.name)
    if named is None or check_name(fields["line"], "timeline name") != path.parent.name:
        raise ValueError("it is not of the epochs and the timeline that its name says")
    found: dict[Epoch, SealTime] = {}
    for t, sealed, oldest, newest in fields["epochs"]:
        pack(t)
        if not named.first <= t <= named.last:
            raise ValueError(f"epoch {t} is none of those that its name says")
        found[Epoch(t)] = SealTime(_us(sealed), *(None if us is None else _us(us) for us in (oldest, newest)))
    return found


def check_times(fields: Mapping[str, Any], path: PurePosixPath) -> None:
    """Raises CorruptionError for what no store writes there."""
    with parsed("times of epochs", str(path)):
        if not times_of(fields, path):
            raise CorruptionError(f"{path}: says no time")


def replaced_times(paths: Iterable[PurePosixPath], refs: Refs) -> list[PurePosixPath]:
    """Returns, of the files of all registers, the times that a file of many epochs stands for, and those of epochs that
    no branch needs any more.
    """
    by_timeline: dict[str, dict[PurePosixPath, _Named]] = {}
    for path in paths:
        named = _named(path.name) if path.parts[0] == TIMES else None
        if named is not None:
            by_timeline.setdefault(path.parent.name, {})[path] = named
    kept = refs.kept_until()
    gone: list[PurePosixPath] = []
    for timeline, listed in by_timeline.items():
        wide = [named for named in listed.values() if named.last > named.first]
        until = kept.get(timeline, Epoch(-1)) if timeline in refs.timelines else None
        gone += [
            path
            for path, named in listed.items()
            if (until is not None and named.first > until) or (named.first == named.last and _is_within(named, wide))
        ]
    return gone


def _is_within(one: _Named, wide: Collection[_Named]) -> bool:
    return any(named.first <= one.first and one.last <= named.last for named in wide)


def _directory(timeline: str) -> PurePosixPath:
    return PurePosixPath(TIMES, timeline)


def _fields(timeline: str, times: Mapping[Epoch, SealTime]) -> dict[str, Any]:
    epochs = [[t, time.sealed_us, time.oldest_us, time.newest_us] for t, time in sorted(times.items())]
    return {"line": timeline, "epochs": epochs}


def _named(name: str) -> _Named | None:
    """Returns what a name says; None for one that is no file of times."""
    *numbers, token = name.removesuffix(_SUFFIX).split("-")
    if not (name.endswith(_SUFFIX) and token and 1 <= len(numbers) <= 2 and all(map(is_number, numbers))):
        return None
    first, last = int(numbers[0]), int(numbers[-1])
    return _Named(Epoch(first), Epoch(last)) if len(numbers) == 1 or first < last else None


def _us(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > _MOST_US:
        raise ValueError(f"{value!r} is no time in microseconds")
    return value
