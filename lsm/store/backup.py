"""A copy of a store that may be in use: whole, and as it was at some epoch.

Invariants
- Whoever reads the copy sees no epoch without its layers, no timeline without the entry that made it, and no file half.
- The copy becomes a store with its last file, the marker. Before that all that it lists was found, and every byte
  checked.
- Nothing of the original is changed, locked or waited for. What changes meanwhile is copied again, in passes that grow
  shorter.

Small files come in an order: registers, manifests, then the log of branches, so that no pin is of an epoch, and no
timeline of an entry, that is not there; layers come last, because a manifest is published after those that it lists.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath

from nosync.lsm.errors import CorruptionError, InvalidInputError, NosyncError
from nosync.lsm.facts.or_set import register_files
from nosync.lsm.facts.pins import Pins
from nosync.lsm.manifests.branches import MAIN
from nosync.lsm.manifests.completeness import lost
from nosync.lsm.manifests.lost_ends import inferred, log_problem, lost_manifests
from nosync.lsm.manifests.released_inputs import Released, write_released
from nosync.lsm.manifests.remembered import catalog_metas
from nosync.lsm.manifests.timelines import Timelines
from nosync.lsm.model.layer import Description, LayerId
from nosync.lsm.model.timestamp import Time
from nosync.lsm.platform.env import Env, storage_error, storage_errors
from nosync.lsm.platform.layout import BRANCHES, CHECKPOINTS, DISCARDED, LAYERS, MANIFESTS, MARKER
from nosync.lsm.platform.opaque import checkpoint_of, files_below
from nosync.lsm.platform.store_marker import make_subdirectories, read_marker, write_marker
from nosync.lsm.store.verify import VerifyReport, verify_directory
from nosync.lsm.trace.directory import LayerDirectory

_MOST_PASSES = 20
_STANDING_STILL = 2
"""Passes that may end with the same thing missing: then it is missing in the original."""


def backup(
    root: Path, target: Path, env: Env | None = None, progress: Callable[[int], None] | None = None
) -> VerifyReport:
    """Copies the store in `root` to `target`, which must not exist or be empty. Durable when this returns. Where it ends with
    an error, nothing is left there.

    `progress(files)` is called after each file. Raises InvalidInputError where `target` has something in it,
    CorruptionError where the original is not whole, StorageError.
    """
    env = env or Env()
    marker = read_marker(root, env)
    if target.resolve().is_relative_to(root.resolve()):
        raise InvalidInputError(f"{target} lies in the store that is to be copied: give another directory")
    if target.is_file() or (there := env.list_dir(target)):
        is_part = not target.is_file() and LAYERS in there and MARKER not in there
        advice = "it is a copy that was killed: remove it" if is_part else "give a new directory for the copy"
        raise InvalidInputError(f"{target} is there, and not empty: {advice}")
    was_there = target.exists()
    copy = _Copy(LayerDirectory(root, marker.key_groups, env), LayerDirectory(target, marker.key_groups, env), progress)
    try:
        report = _copy_whole(root, copy, env)
        write_marker(target, marker, env)
    except BaseException:
        _empty(target, keeps_it=was_there)
        raise
    return report


def _copy_whole(root: Path, copy: _Copy, env: Env) -> VerifyReport:
    """Makes a copy of which only the marker is missing."""
    target = copy.target.root
    make_subdirectories(target, env)
    missing: list[str] = []
    for _ in range(_MOST_PASSES):
        copy.run_pass()
        missing.append(copy.missing() or "")
        if not missing[-1]:
            break
        if len(missing) > _STANDING_STILL and len(set(missing[-_STANDING_STILL - 1 :])) == 1:
            break
    if missing[-1]:
        raise CorruptionError(
            f"{root} cannot be copied whole: {missing[-1]}. `nosync verify {root}` says what is wrong there"
        )
    copy.write_released()
    copy.sync()
    report = verify_directory(copy.target, metas=catalog_metas(root))  # but for the marker
    errors = tuple(error for error in report.errors if MARKER not in error)
    if errors:
        raise CorruptionError(f"{target}: the copy is not whole: {'; '.join(errors[:3])}")
    return VerifyReport(report.layers, report.manifests, report.bytes, (), report.checkpoint_files)


def _empty(target: Path, *, keeps_it: bool) -> None:
    """Removes what is in a directory, as far as that can be done, and the directory unless it was there before."""
    for path in target.iterdir() if target.is_dir() else ():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
    if not keeps_it:
        with contextlib.suppress(OSError):
            target.rmdir()


class _Copy:
    def __init__(self, source: LayerDirectory, target: LayerDirectory, progress: Callable[[int], None] | None) -> None:
        self._source, self.target, self._progress = source, target, progress
        self._env = source.env
        self._copied: dict[PurePosixPath, int] = {}  # when its original was written
        self._vanished: PurePosixPath | None = None

    def run_pass(self) -> None:
        """Copies what is there now and was not before, or is another file."""
        self._vanished = None
        for path in [*self._small_files(), *self._log(), *self._checkpoints()]:
            self._copy(path)
        timelines = Timelines(self.target.root, self._env)
        for trace in self._source.traces():
            until = timelines.sealed_until(trace)
            # What is not sealed is another attempt's.
            there = [d for d in self._source.descriptions(trace) if d.lower < until and not d.is_of_rounds]
            for d in _up_to(there, until):
                self._copy(PurePosixPath(LAYERS, LayerId(trace, d).path))

    def _small_files(self) -> Iterator[PurePosixPath]:
        root = self._source.root
        yield from (PurePosixPath(name) for name in (DISCARDED, "members.json") if (root / name).exists())
        yield from register_files(root, self._env)
        for timeline in sorted(self._env.list_dir(root / MANIFESTS)):
            names = sorted(self._env.list_dir(root / MANIFESTS / timeline))
            yield from (PurePosixPath(MANIFESTS, timeline, name) for name in names if name.endswith(".json"))

    def _log(self) -> Iterator[PurePosixPath]:
        for name in sorted(self._env.list_dir(self._source.root / BRANCHES)):
            yield PurePosixPath(BRANCHES, name)

    def _checkpoints(self) -> list[PurePosixPath]:
        """Returns the files of kept checkpoints. What each is good for follows from which are there, so any order does."""
        found = files_below(self._source.root, PurePosixPath(CHECKPOINTS), self._env)
        return [path for path in found if checkpoint_of(str(path)) is not None]

    def _copy(self, path: PurePosixPath) -> None:
        source, target = self._source.root / path, self.target.root / path
        try:
            written_ns = self._env.identity(source).written_ns
            if self._copied.get(path) == written_ns:
                return
            self._env.make_dirs(target.parent)
            if path in self._copied:  # by an earlier pass
                self._env.unlink(target)
            with self._env.create(target) as file:
                self._env.copy(source, file)
        except FileNotFoundError:
            if source.exists():
                raise
            self._env.unlink(target)
            self._copied.pop(path, None)
            self._vanished = path  # merged, archived or dropped meanwhile: the next pass finds what stands for it
            return
        except OSError as error:
            raise storage_error("copy", source, error) from error
        self._copied[path] = written_ns
        if self._progress is not None:
            self._progress(len(self._copied))

    def missing(self) -> str | None:
        """Returns what the copy lacks to be whole; None where it lacks nothing."""
        root = self.target.root
        if self._vanished is not None:
            return f"{self._vanished} was listed, and vanished"
        try:
            timelines = Timelines(root, self._env)
        except NosyncError as error:
            return str(error)
        if timelines.errors:
            return str(timelines.errors[0])
        if self._env.exists(self._source.root / BRANCHES / f"{timelines.refs.entries + 1}.json"):
            return "branches change"
        problem = log_problem(timelines, root, self._env)
        if problem is not None:
            return problem
        released = Released.of(self._source.root, self._env, timelines, None)
        for name in timelines.refs.names:
            for text in lost_manifests(timelines, name, None).values():
                return text
            for one in lost(timelines, self.target, released, name):
                return f"{one.entry.id} is missing"
        pins = [pin.t for pin in Pins(root, self._env).by_name().values()]
        later = inferred(timelines, self.target.layer_ids(), pins, {})
        return next((f"timeline {name} goes on to epoch {kept.last}" for name, kept in later.items()), None)

    def write_released(self) -> None:
        """Writes up to where inputs were released. The file is not copied: the original may have gone on since its
        manifests were.
        """
        timelines = Timelines(self.target.root, self._env)
        main, last = timelines.timeline(MAIN).id, timelines.last_sealed()
        went = Released.of(self._source.root, self._env, timelines, None).went
        ends = {line: timelines.of_timeline(line).last for line in went}
        lines = {line: min(until, end) for line, until in went.items() if (end := ends[line]) is not None}
        write_released(self.target.root, lines if last is not None else {}, main, self._env)

    def sync(self) -> None:
        with storage_errors("sync", self.target.root):
            for path in self._copied:
                self._env.sync_file(self.target.root / path)
            for directory, _, _ in os.walk(self.target.root):
                self._env.sync_dir(Path(directory))


def _up_to(layers: Sequence[Description], until: Time) -> Sequence[Description]:
    """Returns the layers of a trace without those that reach past a time, where the others cover it up to there: a store that
    is in use merges what was sealed since its manifests were copied, and what was merged stays for a while.
    """
    before = sorted((d for d in layers if d.upper <= until), key=lambda d: d.lower)
    reached = min((d.lower for d in layers), default=until)
    for d in before:
        if d.lower > reached:
            break
        reached = max(reached, d.upper)
    return before if reached >= until else layers
