"""A store's directory out of a bucket: whole, as of its newest remotely safe epoch or an earlier one.

Invariants
- The directory becomes a store with its last file, the marker. Before that every file was compared with its digest and
  synced, and nothing that a sealed epoch lists is missing.
- One that is interrupted goes on: what is there and has its digest is not fetched again.
- It goes on, after its newest epoch, on a timeline of its own. So nothing that it writes has the name of what a writer
  left in the bucket that was copying when it was lost, or that still runs.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa

from nosync.lsm.errors import CompactedError, CorruptionError, InvalidInputError, NosyncError, RemoteError
from nosync.lsm.facts.or_set import add_element, elements, read_element
from nosync.lsm.facts.pins import pin_of
from nosync.lsm.manifests.branches import MAIN
from nosync.lsm.manifests.completeness import lost
from nosync.lsm.manifests.input_policy import policies
from nosync.lsm.manifests.lost_ends import log_problem
from nosync.lsm.manifests.released_inputs import Released, write_released
from nosync.lsm.manifests.timelines import Timelines
from nosync.lsm.model.timestamp import Epoch, epoch_of, pack
from nosync.lsm.platform.env import Env, storage_errors
from nosync.lsm.platform.json_file import read_small, replace_small
from nosync.lsm.platform.layout import (
    BRANCHES,
    CHECKPOINTS,
    LAYERS,
    MANIFESTS,
    MARKER,
    PINS,
    REGISTERS,
    RESTORING,
    SINKS,
    STUBS,
    STUBS_FROM,
    TEMPORARY_DIRECTORY,
)
from nosync.lsm.platform.opaque import files_below
from nosync.lsm.platform.store_marker import make_subdirectories, write_marker
from nosync.lsm.trace.directory import LayerDirectory
from nosync.replication.protocol.file_names import FileName
from nosync.replication.protocol.inventory import covers
from nosync.replication.remote.bucket import Bucket, MissingObjectError
from nosync.replication.remote.fetch import Fetcher, fetch_all
from nosync.replication.remote.files import digest_of
from nosync.replication.remote.keeping import Keeper
from nosync.replication.remote.listed import ListedLayers
from nosync.replication.remote.pack import Placed
from nosync.replication.remote.patient import PatientBucket
from nosync.replication.remote.presence import lose_gone
from nosync.replication.remote.reach import merged_past
from nosync.replication.remote.stub_env import StubEnv
from nosync.replication.remote.stubs import write_from, write_stub
from nosync.replication.remote.view import RemoteView, read_view, seen_manifests

RESTORED = "restored"
"""The timeline on which a restored store goes on is called so, with a token of its own."""
log = logging.getLogger("nosync.remote")

_REPLANS = 3


@dataclass(frozen=True)
class RestoreReport:
    """Says what was restored."""

    store_id: str
    epoch: int | None
    """The newest epoch of main."""
    branches: dict[str, int | None]
    files: int
    bytes: int
    """Of all files."""
    fetched_bytes: int
    requests: int
    problems: tuple[str, ...] = ()
    """Damaged objects in the bucket: what was put after them is not restored. Stages that cannot be read."""
    lazy_layers: int = 0
    """Layers that stay in the bucket until they are read, or fetched in the background."""
    lazy_bytes: int = 0
    """Of them, the bytes."""


Progress = Callable[[int, int], None]


def restore(
    bucket: Bucket,
    target: Path,
    *,
    as_of: int | None = None,
    branch: str | None = None,
    lazy: bool = False,
    progress: Progress = lambda done, of: None,
    env: Env | None = None,
) -> RestoreReport:
    """Makes `target` the store that a bucket has copies of. It must not exist, be empty, or be what an interrupted
    restore of the same left.

    `as_of`: main ends with this epoch. `branch`: main is that branch. `lazy`: layers stay in the bucket; they are fetched
    when they are read, and in the background for as long as the store is open. `progress(done, of)`: bytes. Durable when
    this returns. Raises InvalidInputError, RemoteError, CorruptionError naming a damaged object, StorageError.
    """
    env = env or Env()
    bucket = PatientBucket(bucket, env)
    for attempt in range(_REPLANS):
        view = read_view(bucket, partial(lose_gone, bucket) if attempt else None)  # another node may have what is gone
        one = _Restore(bucket, view, target, env, progress)
        is_new = one.begin({"url": bucket.url, "store": view.marker.store_id, "as_of": as_of, "branch": branch})
        try:
            return one.run(as_of, branch, lazy=lazy)
        except (InvalidInputError, CompactedError):  # what is asked for is not there, so the directory stays as it was
            if is_new:
                one.leave()
            raise
        except MissingObjectError:  # it took longer than what nothing needs any more is kept for: there is newer
            if attempt + 1 == _REPLANS:
                raise
    raise AssertionError("the last attempt returns or raises")


class _Restore:
    def __init__(self, bucket: Bucket, view: RemoteView, target: Path, env: Env, progress: Progress) -> None:
        self._bucket, self._view, self._target, self._env, self._progress = bucket, view, target, env, progress
        self._fetcher = Fetcher(bucket)
        self._written: list[Path] = []
        self._keeper = Keeper(target, bucket.url, env, self._written.append)

    def begin(self, plan: dict[str, Any]) -> bool:
        """Takes the directory for this. Returns whether it was empty. Raises InvalidInputError where it is something else."""
        target, env = self._target, self._env
        if target.is_file() or (target / MARKER).exists():
            raise InvalidInputError(
                f"{target} is {'a file' if target.is_file() else 'a store'} already: give a new directory"
            )
        there = env.list_dir(target)
        if RESTORING in there:
            try:
                before = read_small(target / RESTORING, env)
            except CorruptionError:
                before = {}
            if before != plan:
                raise InvalidInputError(
                    f"{target} has an interrupted restore of {before}, and this is one of {plan}: give another directory, or "
                    "empty this one"
                )
        elif there:
            raise InvalidInputError(f"{target} is there, and not empty: give a new directory")
        with storage_errors("make", target):
            env.make_dirs(target)
            make_subdirectories(target, env)
            for name in env.list_dir(target / TEMPORARY_DIRECTORY):
                env.unlink(target / TEMPORARY_DIRECTORY / name)
        replace_small(target, target / RESTORING, plan, env)
        return not there

    def leave(self) -> None:
        """Makes the directory empty again."""
        target = self._target
        _remove_tree(target, self._env)
        with storage_errors("remove", target):
            for directory, _, _ in os.walk(target, topdown=False):
                if Path(directory) != target:
                    os.rmdir(directory)

    def run(self, as_of: int | None, branch: str | None, *, lazy: bool) -> RestoreReport:
        """Fetches what the directory lacks, and makes it a store."""
        self._fetch_small()
        timelines = self._cut_timelines(as_of, branch)
        layers = self._layers(timelines)
        others = [self._view.files[name] for name in self._view.files if name.is_opaque]
        self._remove_other_layers({placed.version.name for placed in layers})
        self._remove_other_checkpoints({str(placed.version.name) for placed in others})
        stubs = [placed for placed in layers if lazy and not self._is_here(placed)]
        self._fetch([*(layers if not lazy else ()), *others])
        self._write_stubs(stubs)
        problems = [*self._view.problems, *self._check_whole(timelines)]
        self._write_released(timelines)
        self._sync()
        write_marker(self._target, self._view.marker, self._env, has_stubs=bool(stubs))
        with storage_errors("remove", self._target / RESTORING):
            self._env.unlink(self._target / RESTORING)
            self._env.sync_dir(self._target)
        names = {name: timelines.last_sealed(name) for name in sorted(timelines.refs.names)}
        total = sum(placed.version.size_bytes for placed in [*layers, *others])
        return RestoreReport(
            self._view.marker.store_id, names[MAIN], dict(names), len(self._written), total,
            self._fetcher.bytes, self._fetcher.requests, tuple(problems), len(stubs),
            sum(placed.version.size_bytes for placed in stubs),
        )  # fmt: skip

    # --- small files --------------------------------------------------------------------------------------------------

    def _fetch_small(self) -> None:
        """Fetches manifests, registers and the log of branches anew: what an interrupted restore changed in them goes."""
        for directory in (MANIFESTS, BRANCHES, *REGISTERS, STUBS):
            _remove_tree(self._target / directory, self._env)
        with storage_errors("remove", self._target / STUBS_FROM):
            self._env.unlink(self._target / STUBS_FROM)
        make_subdirectories(self._target, self._env)
        view = self._view
        small = [name for name in view.files if name.layer is None and not name.is_opaque]
        fetch_all(self._fetcher, [view.files[name] for name in small if view.is_seen(name)], self._keeper.keep)
        fetch_all(self._fetcher, [view.files[name] for name in small if view.is_cut(name)], self._keep_singly)

    def _keep_singly(self, placed: Placed, data: pa.Buffer) -> None:
        """Writes the epochs of an archive that are seen as single manifests."""
        for manifest in seen_manifests(self._view, placed, data.to_pybytes()):
            self._keeper.publish(manifest.path, manifest.to_json())

    def _cut_timelines(self, as_of: int | None, branch: str | None) -> Timelines:
        """Returns the timelines of the directory, with main as it is wanted."""
        timelines, common = self._read_timelines(), None
        if branch is not None and branch != MAIN:
            timelines.timeline(branch)
            common = timelines.refs.shared_until(timelines.refs.names[MAIN], timelines.refs.names[branch])
            timelines.promote(branch, None)
        if as_of is not None:
            self._check_as_of(as_of, timelines)
        end = timelines.last_sealed() if as_of is None else Epoch(as_of)
        if end is not None:
            left = timelines.timeline(MAIN).id
            timelines.rewind(end, None, f"{RESTORED}-{self._env.token()}")
            self._note_given(left, Epoch(end + 1))
        timelines.prune()
        self._remove_other_pins(timelines, common)
        return self._read_timelines()

    def _note_given(self, timeline: str, t: Epoch) -> None:
        """Notes an epoch as given to all sinks: they may have been given it, and the note of that be lost with the epoch. So
        they take it back, whenever a job has them again.
        """
        for stage in self._env.list_dir(self._target / SINKS):
            directory = PurePosixPath(SINKS, stage, timeline)
            add_element(self._target, directory, str(t), {"line": timeline, "t": t}, self._env)

    def _remove_other_pins(self, timelines: Timelines, common: int | None) -> None:
        """Removes the pins of epochs that are not there, or, after `common`, that are those of a branch now."""
        last = timelines.last_sealed()
        for element in elements(self._target, PurePosixPath(PINS), self._env):
            pin = pin_of(read_element(self._target, element, self._env))
            is_other = common is not None and pin.t > common
            if is_other:
                log.warning("pin %s is dropped: epoch %d of main, which it held, is another one now", pin.name, pin.t)
            if last is None or pin.t > last or is_other:
                with storage_errors("remove", self._target / element.path):
                    self._env.unlink(self._target / element.path)

    def _read_timelines(self) -> Timelines:
        timelines = Timelines(self._target, self._env)
        problem = str(timelines.errors[0]) if timelines.errors else log_problem(timelines, self._target, self._env)
        if problem is not None:
            raise CorruptionError(f"{self._bucket.url}: {problem}")
        return timelines

    def _check_as_of(self, as_of: int, timelines: Timelines) -> None:
        pack(as_of)
        log = timelines.manifests()
        since = max(
            (name.layer.description.since for name in self._view.files if name.layer is not None), default=pack(0)
        )
        oldest = max(epoch_of(since), log.first or 0)
        if as_of in log and as_of >= oldest:
            return
        possible = "there is no epoch yet" if log.last is None else f"{self._bucket.url} has {oldest} to {log.last}"
        kind: type[NosyncError] = CompactedError if as_of in log else InvalidInputError
        raise kind(f"cannot restore as of {as_of}: {possible}")

    # --- layers -------------------------------------------------------------------------------------------------------

    def _layers(self, timelines: Timelines) -> list[Placed]:
        """Returns the layers that are needed, each as the manifests list it. What a node put that did not seal the epoch is
        left out where other layers cover it. Raises CorruptionError where none do.
        """
        listed = ListedLayers(timelines)
        listed.choose(self._view)
        needed = {
            name: self._view.files[name]
            for name in self._view.files
            if name.layer is not None and self._is_needed(name, timelines)
        }
        found = {name: placed for name, placed in needed.items() if not listed.is_another(placed)}
        for name in needed.keys() - found.keys():
            assert name.layer is not None, "it is a layer"
            others = [one.layer.description for one in found if one.layer and one.place == name.place]
            if not covers(others, name.layer.description):
                raise CorruptionError(
                    f"{self._bucket.url}: {name.layer} is not what epoch {epoch_of(name.layer.description.lower)} lists, but "
                    "what a node wrote that did not seal it; restore as of an earlier epoch"
                )
        return list(found.values())

    def _is_needed(self, name: FileName, timelines: Timelines) -> bool:
        """Returns whether a layer is of a sealed epoch. What is not sealed is another attempt's."""
        layer = name.layer
        return layer is not None and layer.description.lower < timelines.sealed_until(layer.trace)

    def _remove_other_checkpoints(self, needed: set[str]) -> None:
        """Removes what an interrupted restore fetched of kept checkpoints that the bucket has no more, or other ones of."""
        for path in list(files_below(self._target, PurePosixPath(CHECKPOINTS), self._env)):
            if str(path) not in needed:
                with storage_errors("remove", self._target / path):
                    self._env.unlink(self._target / path)

    def _remove_other_layers(self, needed: set[FileName]) -> None:
        """Removes what an interrupted restore left and nobody needs any more."""
        for id in LayerDirectory(self._target, self._view.marker.key_groups, self._env).layer_ids():
            if FileName.of_layer(id) not in needed:
                self._env.unlink(self._target / LAYERS / id.path)

    def _fetch(self, wanted: list[Placed]) -> None:
        total = sum(placed.version.size_bytes for placed in wanted)
        missing = [placed for placed in wanted if not self._is_here(placed)]
        done = total - sum(placed.version.size_bytes for placed in missing)
        self._progress(done, total)

        def progress(size_bytes: int) -> None:
            nonlocal done
            done += size_bytes
            self._progress(done, total)

        fetch_all(self._fetcher, missing, self._keeper.keep, progress, self._keeper.keep_large)

    def _write_stubs(self, stubs: list[Placed]) -> None:
        if stubs:
            self._written += [write_stub(self._target, placed, self._env) for placed in stubs]
            write_from(self._target, self._bucket.url, self._env)

    def _is_here(self, placed: Placed) -> bool:
        path = self._target / placed.version.name
        try:
            if digest_of(placed.version.name, self._env.map(path), str(path)) == placed.version.digest:
                self._written.append(path)
                return True
        except (OSError, CorruptionError):
            pass
        with suppress(FileNotFoundError):
            self._env.unlink(path)
        return False

    # --- the end ------------------------------------------------------------------------------------------------------

    def _check_whole(self, timelines: Timelines) -> Iterator[str]:
        """Yields what cannot be read of what is there. Raises RemoteError where something is missing."""
        env = StubEnv(self._target, self._bucket, self._env)
        directory = LayerDirectory(self._target, self._view.marker.key_groups, env)
        for branch in timelines.refs.names:
            last = timelines.last_sealed(branch)
            # Of inputs that may be released the bucket has what was there: what was not, no state has to be computed from.
            released = Released(Epoch(-1 if last is None else last), {})
            for one in lost(timelines, directory, released, branch):
                raise RemoteError(f"{self._bucket.url} is not whole: {one.entry.id} of epoch {one.t} is missing")
            if last is not None:  # earlier versions dropped what served the epoch that they said
                for trace in merged_past(timelines, branch, last, directory.descriptions):
                    yield (
                        f"{self._bucket.url}: {trace} cannot be read as of epoch {last} of branch {branch}, which is the last "
                        "one that is whole: it was merged further"
                    )

    def _write_released(self, timelines: Timelines) -> None:
        """Says that inputs up to the newest epochs may be gone, where their sources' policies say so."""
        lasts = {name: timelines.last_sealed(name) for name in timelines.refs.names}
        lines = {
            timelines.timeline(name).id: last
            for name, last in lasts.items()
            if last is not None and policies(timelines.manifest(last, name))
        }
        write_released(self._target, lines, timelines.timeline(MAIN).id, self._env)

    def _sync(self) -> None:
        with storage_errors("sync", self._target):
            for path in self._written:
                if self._env.exists(path):  # manifests after the end of a timeline went again
                    self._env.sync_file(path)
            for directory, _, _ in os.walk(self._target):
                self._env.sync_dir(Path(directory))


def _remove_tree(path: Path, env: Env) -> None:
    with storage_errors("remove", path):
        for directory, _, names in os.walk(path):
            for name in names:
                env.unlink(Path(directory, name))
