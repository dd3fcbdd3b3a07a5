"""The timelines of a store as one process knows them: manifests, histories and origins by branch.

Reading needs no lock on the directory, so a read-only store has the same view as the node; only the node adds to it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from nosync.lsm.errors import CorruptionError, InvalidInputError, NosyncError
from nosync.lsm.manifests.archive import Archive, group_to_archive, publish_archive, weight_of
from nosync.lsm.manifests.branches import MAIN, SAME_CODE, ChangedStages, Refs, Timeline, append, creation
from nosync.lsm.manifests.known import Known
from nosync.lsm.manifests.manifest import Manifest
from nosync.lsm.manifests.manifest_log import ManifestLog, list_timeline, read_manifest
from nosync.lsm.manifests.pruning import Pruning
from nosync.lsm.manifests.refresh import Changes
from nosync.lsm.manifests.remembered import Recall, Remembered, entries_lost
from nosync.lsm.model.history import History
from nosync.lsm.model.layer import TraceId, check_name
from nosync.lsm.model.timestamp import Epoch, Time
from nosync.lsm.platform.env import Env, Identity
from nosync.lsm.platform.layout import BRANCHES, MANIFESTS

log = logging.getLogger("nosync")


class Timelines:
    """Every timeline that is needed, with its manifests."""

    def __init__(self, root: Path, env: Env, recall: Recall = Remembered) -> None:
        """`recall`: says what is remembered of these timelines; it is asked whenever all is read."""
        self._root, self._env, self._recall = root, env, recall
        self._lock = threading.RLock()
        self._changes, self._pruning = Changes(root, env), Pruning(root, env)
        self._known = Known(root, env, recall())
        self._is_in_doubt = False
        self._left_single: set[tuple[str, Epoch]] = set()  # epochs that cannot be put together with others

    @property
    def refs(self) -> Refs:
        """Returns the branches."""
        return self._known.refs

    @property
    def remembered(self) -> Remembered:
        """Returns what is remembered of these timelines."""
        return self._known.remembered

    @property
    def errors(self) -> list[CorruptionError]:
        """Returns an error for each damaged manifest."""
        return self._known.errors

    # --- what others did ----------------------------------------------------------------------------------------------

    def reload(self) -> None:
        """Reads everything again."""
        with self._lock:
            self._known = Known(self._root, self._env, self._recall())
            self._changes.forget()

    def refresh(self) -> tuple[list[Manifest], list[Archive], bool]:
        """Reads what other processes added: new manifests, in order, and archives; and whether branches are other ones,
        or what was known is gone.
        """
        with self._lock:
            before, archives = self._known, self._known.archives()
            learned: list[Manifest] | None = []
            try:
                learned = self._changes.learn(before)
                if learned is None:
                    self.reload()
            except FileNotFoundError:  # put into an archive meanwhile: it is there with the next look
                pass
            if learned is None:
                learned = self._known.not_in(before)
            return learned, [a for a in self._known.archives() if a not in archives], self._known is not before

    def follow(self, came: Iterable[PurePosixPath]) -> list[Manifest] | None:
        """Reads the epochs that come next on their timelines, of which these manifests are some. None where these files
        are anything else: `refresh` looks at all there is, which takes the longer the more epochs there are.
        """
        with self._lock:
            learned = self._changes.next_ones(self._known, came)
            for manifest in learned or ():
                self._known.add(manifest)
            return learned

    def notice_changes(self, timeline: str | None = None) -> None:
        """Does what `refresh` does where another process, or node, changed the branches, or discarded what it had of a
        timeline (default: of any): nearly always that is a look at two names.
        """
        with self._lock:
            looked_at = [log for id, log in self._known.logs.items() if timeline in (None, id)]
            if self._env.exists(self._next_entry) or any(self._changes.is_replaced(log) for log in looked_at):
                self.refresh()

    @property
    def _next_entry(self) -> Path:
        return self._root / BRANCHES / f"{self.refs.entries + 1}.json"

    # --- looking ------------------------------------------------------------------------------------------------------

    def timeline(self, branch: str = MAIN) -> Timeline:
        with self._lock:
            return self.refs.timeline_of(branch)

    def manifests(self, branch: str = MAIN) -> ManifestLog:
        """Returns the manifests by epoch, in order; those of the parent up to the fork are included."""
        with self._lock:
            return self._known.log(branch)

    def of_timeline(self, timeline: str) -> ManifestLog:
        """Returns the manifests of a timeline by its id, or what is left of one that no branch is named for."""
        with self._lock:
            return self._known.logs.get(timeline) or ManifestLog(timeline, self._root, self._env)

    def manifest(self, t: int, branch: str = MAIN) -> Manifest | None:
        with self._lock:
            return self._known.log(branch).get(Epoch(t))

    def histories(self, branch: str = MAIN) -> dict[str, History]:
        """Returns, by stage, which fingerprint and number of shards wrote each stretch of the branch's sealed epochs."""
        with self._lock:
            return self._known.histories[self.refs.timeline_of(branch).id].all()

    def history(self, stage: str, branch: str = MAIN) -> History:
        """Returns that of one stage; it is empty where the branch does not have it."""
        with self._lock:
            return self._known.histories[self.refs.timeline_of(branch).id].of(stage)

    def last_sealed(self, branch: str = MAIN) -> Epoch | None:
        with self._lock:
            return self._known.log(branch).last

    def expected(self, branch: str = MAIN) -> Epoch | None:
        """Returns the next epoch to be sealed; None where any may come first."""
        last = self.last_sealed(branch)
        return None if last is None else Epoch(last + 1)

    def newest(self) -> list[Epoch]:
        """Returns the last sealed epoch of each branch that has one."""
        with self._lock:
            return self._known.newest()

    def origins(self, trace: TraceId) -> list[Time]:
        """Returns where the stretches of a trace begin, in order."""
        with self._lock:
            return self._known.origins(trace)

    def first_origin(self, trace: TraceId) -> Time | None:
        """Returns where the first trace begins in which values of a trace's keys may be."""
        with self._lock:
            return self._known.first_origin(trace)

    def sealed_until(self, trace: TraceId) -> Time:
        """Returns the end of the newest epoch whose manifest lists the trace; zero where none does."""
        with self._lock:
            return self._known.sealed_until(trace)

    def left_at(self, trace: TraceId, origin: Time, reached: Time) -> Time | None:
        """Returns where the first of the branches that read a stretch of a trace leaves it. See `Known`."""
        with self._lock:
            return self._known.left_at(trace, origin, reached)

    def archives(self) -> list[Archive]:
        """Returns the archives of all timelines."""
        with self._lock:
            return self._known.archives()

    # --- changing (the node only) -------------------------------------------------------------------------------------

    def add(self, manifest: Manifest, identity: Identity | None = None) -> None:
        """Adds a manifest that was published, and which file it is, as far as that is known: then it need not be read."""
        with self._lock:
            if identity is not None:
                self._changes.note(manifest, identity)
            self._known.add(manifest)

    def _append(self, entry: Mapping[str, Any]) -> None:
        """Appends an entry to the log of branches. Raises CorruptionError where one before it is lost."""
        self.check_branches()
        if lost := [*entries_lost(self.refs, self.remembered)]:
            raise CorruptionError(
                f"{self._root / BRANCHES}: {lost[0]}.json is missing, so the branches cannot be changed: put it back, "
                f"or say `nosync verify --repair {self._root}`"
            )
        try:
            self._known.refs = append(self._root, self.refs, entry, self._env)
        except NosyncError:
            self._is_in_doubt = True
            with suppress(NosyncError):  # whoever seals asks again
                self.check_branches()
            raise
        self._known.branches_changed()

    def check_branches(self) -> None:
        """Reads the branches again where an entry that failed may be in the log all the same: then it counts.

        Nobody may go on before that is known. Raises StorageError where it cannot be read.
        """
        with self._lock:
            if self._is_in_doubt:
                self.reload()
                self._is_in_doubt = False

    def create(self, name: str, parent: str, at: int, stages: ChangedStages = SAME_CODE) -> Timeline:
        """Makes a branch of `parent` at a sealed epoch. Durable when this returns."""
        with self._lock:
            timeline = self.refs.timeline_of(parent)
            if at not in self._known.logs[timeline.id]:
                raise InvalidInputError(
                    f"cannot branch {parent} at {at}: it is not a sealed epoch; the newest is {self.last_sealed(parent)}"
                )
            entry = creation(self.refs, name, timeline.id, at, stages)
            self._append(entry)
            made = self.refs.timelines[entry["line"]]
            self._known.begin(made)
            return made

    def rewind(self, at: int, keep_as: str | None, name: str | None = None) -> None:
        """`main` is from now on a new timeline that begins at an epoch of the one it was, which is kept under
        `keep_as`, or dropped. `name`: of the new one (default `rewind-<n>`).

        One entry of the log, so that a crash leaves all of it or nothing.
        """
        with self._lock:
            timeline = self.refs.timeline_of(MAIN)
            if at not in self._known.logs[timeline.id]:
                raise InvalidInputError(f"cannot rewind to {at}: it is not a sealed epoch")
            if keep_as is not None:
                check_name(keep_as, "branch name")
                if keep_as in self.refs.names:
                    raise InvalidInputError(
                        f"branch {keep_as!r} exists already: keep the old timeline under another name"
                    )
            name = name or f"rewind-{self.refs.entries + 1}"
            entry = {"do": "rewind", "name": name, "line": name, "parent": timeline.id, "at": at, "keep_as": keep_as}
            self._append(entry)
            self._known.begin(self.refs.timelines[name])

    def promote(self, name: str, keep_as: str | None) -> None:
        """`main` is from now on the timeline of `name`; the timeline it was is kept under `keep_as`, or dropped."""
        with self._lock:
            self.refs.timeline_of(name)
            if name == MAIN:
                raise InvalidInputError("main is the main timeline already")
            if keep_as is not None:
                check_name(keep_as, "branch name")
            if keep_as is not None and keep_as in self.refs.names and keep_as != name:
                raise InvalidInputError(f"branch {keep_as!r} exists already: keep the old timeline under another name")
            entry = {"do": "promote", "name": name, "keep_as": keep_as}
            self._append(entry)

    def delete(self, name: str) -> None:
        """Forgets the name. What its timeline has of its own goes with `prune`, unless another branch begins in it."""
        with self._lock:
            self.refs.timeline_of(name)
            if name == MAIN:
                raise InvalidInputError("main cannot be deleted; promote another branch, then delete the old timeline")
            self._append({"do": "delete", "name": name})

    def has_unneeded(self) -> bool:
        """Returns whether manifests are there that no branch needs: what `prune` removes."""
        with self._lock:
            return self._pruning.has_unneeded(self._known)

    def prune(self) -> dict[TraceId, Time]:
        """Removes the manifests that no branch needs. Returns the traces that lost some and get no more epochs, each
        with the time up to which it is still listed.
        """
        with self._lock:
            return self._pruning.prune(self._known)

    def archive(self, branch: str, until: int, size: int) -> Archive | None:
        """Puts the oldest whole group of `size` manifests, up to an epoch, into one file, which is durable when this
        returns. The manifests stay where they are. None: there is no such group.

        Raises CorruptionError where there is an archive that says otherwise.
        """
        with self._lock:
            sealed = self._known.log(branch)
            singles = [t for t in sealed.singles() if (sealed.timeline, t) not in self._left_single]
            group = group_to_archive(singles, until, size, lambda t: weight_of(sealed[t]))
            manifests = [sealed[Epoch(t)] for t in group or ()]
        archive = publish_archive(self._root, manifests, self._env) if manifests else None
        if archive is None:
            self._left_single |= {(manifest.timeline, manifest.t) for manifest in manifests}
            return None
        with self._lock:
            sealed.add_archive(archive)
        return archive

    def beside_archives(self) -> tuple[list[PurePosixPath], list[CorruptionError]]:
        """Returns the manifests that have files of their own though an archive stands for them; and an error for each
        of them that is damaged, or says otherwise than the archive.
        """
        with self._lock:
            timelines = [sealed for sealed in self._known.logs.values() if sealed.archives()]
        found: list[PurePosixPath] = []
        errors: list[CorruptionError] = []
        for sealed in timelines:
            _, epochs = list_timeline(self._root, sealed.timeline, self._env)
            for t in sorted(t for t in epochs if sealed.archive_at(t) is not None):
                path = PurePosixPath(MANIFESTS, sealed.timeline, f"{t}.json")
                try:
                    stands = sealed[t]
                except CorruptionError as error:  # of the archive: what lies beside it is all there is
                    log.error("%s stays: %s", path, error)
                    continue
                try:
                    if read_manifest(self._root, sealed.timeline, t, self._env) != stands:
                        raise CorruptionError(
                            f"{self._root / path}: says otherwise than the archive that stands for it"
                        )
                    found.append(path)
                except CorruptionError as error:
                    errors.append(error.of_file(self._root / path))
        return found, errors
