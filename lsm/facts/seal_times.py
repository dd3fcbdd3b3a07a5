"""When epochs were sealed by the wall clock: a fact beside each manifest, which does not change what an epoch is.

Invariants
- A manifest says nothing of a clock: equal epochs have equal manifests, whoever seals them, and whenever.
- Whoever seals does not wait for a time to be written: the node's thread writes those that came since, several in one
  file. The process that sealed knows them at once. A crash may take the newest ones, of which the clock of the manifests'
  files is left.
- Files are only added, and those of one epoch are combined by taking the smallest time, so nodes that have the same
  files agree, in whatever order these came. An epoch that two nodes sealed, or that was sealed again after a crash, has
  several.
- A file of many old epochs stands for theirs. It is durable before those go, and any node may make it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from blake3 import blake3

from nosync.lsm.errors import CorruptionError
from nosync.lsm.manifests.branches import Refs
from nosync.lsm.model.as_of import is_in_calendar
from nosync.lsm.model.layer import check_name
from nosync.lsm.model.timestamp import Epoch, is_number, pack
from nosync.lsm.platform.env import Env, storage_errors
from nosync.lsm.platform.json_file import publish_text, read_if_there, seal_json, sync_published, unseal_json
from nosync.lsm.platform.layout import TIMES
from nosync.lsm.platform.parsing import parsed
from nosync.lsm.settings import ARCHIVE_EPOCHS

log = logging.getLogger("nosync")

_TOKEN_DIGITS = 16
_SUFFIX = ".json"
_MOST_US = 1 << 62
_LOOKED_INTO = 10
"""Of so many of the newest files a start looks whether they are whole: those before were made durable long ago."""
_SEVERAL = "s"
"""What the token begins with of a file that was written for several epochs at once, and stands for no other one."""
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
    is_roll_up: bool
    """Whether it stands for the other files of these epochs."""


class SealTimes:
    """The times of one data directory. What a file says never changes, so each is read once."""

    def __init__(self, root: Path, env: Env, group: int = ARCHIVE_EPOCHS) -> None:
        """`group`: how many old epochs are put together by `roll_up`."""
        self._root, self._env, self._group = root, env, group
        self._read: dict[PurePosixPath, Mapping[Epoch, SealTime]] = {}
        self._lock = threading.Lock()
        self._unwritten: dict[tuple[str, Epoch], SealTime] = {}

    def written_us(self, path: PurePosixPath) -> int | None:
        """Returns when a small file of the directory was written; None where it is not there."""
        try:
            return self._env.identity(self._root / path).written_ns // 1000
        except OSError:
            return None

    # --- recording ----------------------------------------------------------------------------------------------------

    def note(self, timeline: str, t: int, span: EventSpan | None = None, at_us: int | None = None) -> None:
        """An epoch is sealed now (or was `at_us`); `write` publishes that. `span`: its event time."""
        oldest, newest = span or (None, None)
        time = SealTime(self._env.utc_us() if at_us is None else at_us, oldest, newest)
        with self._lock:
            self._unwritten[timeline, Epoch(t)] = time

    def write(self) -> list[PurePosixPath]:
        """Publishes what was noted, epochs that follow each other in one file. Returns the files, which are not durable
        yet. Raises StorageError; then it can be called again.
        """
        with self._lock:
            noted = dict(self._unwritten)
        made: list[PurePosixPath] = []
        for run in self._runs(noted):
            (timeline, first), (_, last) = run[0], run[-1]
            token = self._env.token()
            name = f"{first}-{token}" if first == last else f"{first}-{last}-{_SEVERAL}{token}"
            path = _directory(timeline) / f"{name}{_SUFFIX}"
            text = seal_json(_fields(timeline, {t: noted[line, t] for line, t in run}))
            publish_text(self._root, self._root / path, text, self._env)
            made.append(path)
            with self._lock:
                for at in run:
                    self._unwritten.pop(at, None)
        return made

    def _runs(self, noted: Iterable[tuple[str, Epoch]]) -> list[list[tuple[str, Epoch]]]:
        """Parts epochs into those that follow each other on their timeline, in one group."""
        runs: list[list[tuple[str, Epoch]]] = []
        for timeline, t in sorted(noted):
            before = runs[-1][-1] if runs else None
            if before == (timeline, t - 1) and t % self._group:
                runs[-1].append((timeline, t))
            else:
                runs.append([(timeline, t)])
        return runs

    def record(self, timeline: str, t: int, span: EventSpan | None = None) -> PurePosixPath:
        """Publishes that an epoch is sealed now, and returns the file, which is not durable yet."""
        self.note(timeline, t, span)
        return self.write()[-1]

    # --- looking ------------------------------------------------------------------------------------------------------

    def of_timeline(self, timeline: str) -> dict[Epoch, SealTime]:
        """Returns the times of a timeline's own epochs, in order. Raises CorruptionError for a damaged file."""
        with self._lock:
            found = {t: time for (line, t), time in self._unwritten.items() if line == timeline}
        for path in self._listed(timeline):
            for t, time in self._times_in(path).items():
                found[t] = time if t not in found else found[t].combined(time)
        return dict(sorted(found.items()))

    def damaged(self, timeline: str) -> list[CorruptionError]:
        """Returns an error for each damaged one of the newest files of a timeline: a power cut leaves those torn."""
        listed = self._listed(timeline)
        errors: list[CorruptionError] = []
        for path in sorted(listed, key=lambda path: listed[path].last)[-_LOOKED_INTO:]:
            try:
                self._times_in(path)
            except CorruptionError as error:
                errors.append(error.of_file(self._root / path))
        return errors

    def without(self, timeline: str, epochs: Sequence[Epoch]) -> list[Epoch]:
        """Returns those of some epochs, in order, of which no file is, as names say. Those from before the first that has
        one are left out: they are of a version that recorded none.
        """
        spans = sorted((named.first, named.last) for named in self._listed(timeline).values())
        found: list[Epoch] = []
        at, reached = 0, None
        for t in epochs:
            while at < len(spans) and spans[at][0] <= t:
                reached = spans[at][1] if reached is None else max(reached, spans[at][1])
                at += 1
            if reached is not None and reached < t:
                found.append(t)
        return found

    def of_epoch(self, timeline: str, t: int) -> SealTime | None:
        """Returns the time of one epoch of a timeline, reading no more than that takes."""
        with self._lock:
            found = self._unwritten.get((timeline, Epoch(t)))
        for path in self._listed(timeline, t):
            time = self._times_in(path).get(Epoch(t))
            if time is not None:
                found = time if found is None else found.combined(time)
        return found

    # --- many old epochs in one file ----------------------------------------------------------------------------------

    def roll_up(self, timeline: str, size: int, until: int) -> list[PurePosixPath]:
        """Puts the times of each whole, aligned group of `size` epochs up to an epoch into one file, and returns these
        files, which are durable. What they stand for is `replaced_times`, and stays for now.
        """
        listed = self._listed(timeline)
        self._remove_empty(path for path, named in listed.items() if named.is_roll_up)
        # One of several epochs, from when groups were larger, may reach beyond its group: it stays as it is.
        whole = [n for n in listed.values() if not n.is_roll_up and n.first // size == n.last // size]
        there = {named.first // size * size for named in whole}
        made = [base for base in sorted(there) if base + size - 1 <= until]
        found = [self._rolled_up(timeline, listed, Epoch(base), Epoch(base + size - 1)) for base in made]
        return [path for path in found if path is not None]

    def _remove_empty(self, roll_ups: Iterable[PurePosixPath]) -> None:
        """Removes files that say nothing, which earlier versions could make: no other node takes them."""
        for path in roll_ups:
            with contextlib.suppress(CorruptionError):
                if not self._times_in(path):
                    self._env.unlink(self._root / path)
                    self._read.pop(path, None)

    def _rolled_up(
        self, timeline: str, listed: Mapping[PurePosixPath, _Named], first: Epoch, last: Epoch
    ) -> PurePosixPath | None:
        """Returns the file of a group. None: none of its files can be read."""
        found: dict[Epoch, SealTime] = {}
        for path in [path for path, named in listed.items() if first <= named.first and named.last <= last]:
            try:
                times = self._times_in(path)
            except CorruptionError as error:
                log.warning("the time of an epoch is lost: %s", error)
                continue
            for t, time in times.items():
                found[t] = time if t not in found else found[t].combined(time)
        if not found:
            return None
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
        if t is not None:  # names of one epoch have one dash, and need not be taken apart one by one
            names = [name for name in names if name.startswith(f"{t}-") or name.count("-") > 1]
        listed = {directory / name: named for name in sorted(names) if (named := _named(name)) is not None}
        if t is None:
            for path in [one for one in list(self._read) if one.parent == directory and one not in listed]:
                self._read.pop(path, None)  # another stands for it by now
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
        sealed_us = _us(sealed)
        if not is_in_calendar(sealed_us):
            raise ValueError(f"{sealed_us} us since 1970 is in no calendar")
        found[Epoch(t)] = SealTime(sealed_us, *(None if us is None else _us(us) for us in (oldest, newest)))
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
        roll_ups = [named for named in listed.values() if named.is_roll_up]
        until = kept.get(timeline, Epoch(-1)) if timeline in refs.timelines else None
        gone += [
            path
            for path, named in listed.items()
            if (until is not None and named.first > until) or (not named.is_roll_up and _is_within(named, roll_ups))
        ]
    return gone


def _is_within(one: _Named, roll_ups: Collection[_Named]) -> bool:
    return any(named.first <= one.first and one.last <= named.last for named in roll_ups)


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
    first, last, is_one = int(numbers[0]), int(numbers[-1]), len(numbers) == 1
    is_roll_up = not (is_one or token.startswith(_SEVERAL))
    return _Named(Epoch(first), Epoch(last), is_roll_up) if is_one or first < last else None


def _us(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > _MOST_US:
        raise ValueError(f"{value!r} is no time in microseconds")
    return value
