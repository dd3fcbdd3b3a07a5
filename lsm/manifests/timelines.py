"""The timelines of a store as one process knows them: manifests, histories and origins by branch.

Reading needs no lock on the directory, so a read-only store has the same view as the node; only the node adds to it. A
branch's manifests are its own and, up to the fork, those of its parent: the same objects, so a branch costs nothing, on
disk or in memory.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from nosync.lsm.errors import CorruptionError, InvalidInputError, StorageError
from nosync.lsm.manifests.archive import Archive, Run, epochs_of, group_to_archive, parse_name, publish_archive
from nosync.lsm.manifests.branches import BRANCHES, MAIN, Timeline, append, creation, read_refs
from nosync.lsm.manifests.manifest import Histories, Manifest, publish_manifest
from nosync.lsm.manifests.manifest_log import ManifestLog, list_timeline, read_manifest, read_manifest_log
from nosync.lsm.manifests.remembered import Recall, Remembered, entries_lost
from nosync.lsm.model.history import History
from nosync.lsm.model.layer import TraceId, check_name
from nosync.lsm.model.timestamp import END_OF_TIME, Epoch, Time
from nosync.lsm.platform.env import Env, Identity, storage_errors
from nosync.lsm.platform.json_file import sync_published
from nosync.lsm.trace.directory import MANIFESTS


class _NewestFile(NamedTuple):
    """The file of a timeline's newest epoch, as it was when its contents were known."""

    t: Epoch
    path: Path
    identity: Identity


class Timelines:
    """Every timeline that is needed, with its manifests. `errors`: a CorruptionError for each damaged manifest."""

    def __init__(self, root: Path, env: Env, recall: Recall = Remembered) -> None:
        """`recall`: says what is remembered of these timelines; it is asked whenever all is read."""
        self._root, self._env, self._recall = root, env, recall
        self._lock = threading.RLock()
        self.remembered = recall()  # before the files are listed, or what comes meanwhile would be taken for lost
        self.refs = read_refs(root, env)
        self.errors: list[CorruptionError] = []
        self._sealed: dict[str, ManifestLog] = {}
        self._newest_files: dict[str, _NewestFile] = {}
        self._next_entry = root / BRANCHES / f"{self.refs.entries + 1}.json"
        self._histories: dict[str, Histories] = {}
        self._origins: dict[TraceId, set[Time]] = {}
        self._sealed_until: dict[TraceId, Time] = {}
        self._first_origins: dict[tuple[object, ...], Time] | None = None
        self._newest: list[Epoch] | None = None
        self._stretches: dict[tuple[str, str, int], set[tuple[Time, Time]]] | None = None
        kept = self.refs.kept_until()
        for timeline in self.refs.timelines.values():
            if timeline.id in kept:
                self._load(timeline)

    def _load(self, timeline: Timeline) -> None:
        self._begin(timeline)
        self.errors += read_manifest_log(self._sealed[timeline.id], self._root, self._env)
        for piece in self._sealed[timeline.id].own_pieces(-1 if timeline.at is None else timeline.at):
            self._learn(timeline.id, piece)

    def _begin(self, timeline: Timeline) -> None:
        *before, _ = self.refs.left(timeline.id)
        parent = self._sealed[before[-1]] if before else None
        histories = Histories()
        if parent is not None and timeline.at is not None:
            histories = self._histories[parent.timeline].until(timeline.at)
        self._sealed[timeline.id] = ManifestLog(timeline.id, self._root, self._env, parent, timeline.at)
        self._histories[timeline.id] = histories

    def _learn(self, timeline: str, piece: Run | Manifest) -> None:
        """What epochs say of their traces; those before are known."""
        self._newest = self._stretches = None
        self._first_origins = None
        listed = [*piece.traces()]
        self._histories[timeline].add(piece.begin, listed)
        for trace, origin in listed:
            self._origins.setdefault(trace, set()).add(origin)
            self._sealed_until[trace] = max(self._sealed_until.get(trace, Time(0)), piece.end)

    def refresh(self) -> tuple[list[Manifest], list[Archive], bool]:
        """Reads what other processes added: new manifests, in order, and archives; and whether branches are other ones,
        or what was known is gone.
        """
        with self._lock:
            refs = read_refs(self._root, self._env)
            listed = {timeline: list_timeline(self._root, timeline, self._env) for timeline in self._sealed}
            known = {timeline: sealed.archives() for timeline, sealed in self._sealed.items()}
            changed = (refs.timelines, refs.names) != (self.refs.timelines, self.refs.names) or any(
                self._is_another(self._sealed[timeline], *found) or self._is_replaced(self._sealed[timeline])
                for timeline, found in listed.items()
            )
            try:
                if changed:
                    epochs = {timeline: set(sealed.own()) for timeline, sealed in self._sealed.items()}
                    self.reload()
                    there = [(sealed, t) for sealed in self._sealed.values() for t in sealed.singles()]
                    learned = [sealed[t] for sealed, t in there if t not in epochs.get(sealed.timeline, ())]
                else:
                    learned = [
                        m for timeline, found in listed.items() for m in self._new_of(self._sealed[timeline], *found)
                    ]
            except FileNotFoundError:  # put into an archive meanwhile: it is there with the next look
                learned = []
            archives = [
                a
                for timeline, sealed in self._sealed.items()
                for a in sealed.archives()
                if a not in known.get(timeline, ())
            ]
            return learned, archives, changed

    def follow(self, came: Iterable[PurePosixPath]) -> list[Manifest] | None:
        """Reads the epochs that come next on their timelines, of which these manifests are some. None where these files
        are anything else: `refresh` looks at all there is, which takes the longer the more epochs there are.
        """
        with self._lock:
            by_timeline: dict[str, set[Epoch]] = {}
            for path in came:
                span = epochs_of(path.name) if path.parts[0] == MANIFESTS else None
                if span is None or span[0] != span[1]:
                    return None
                by_timeline.setdefault(path.parts[1], set()).add(span[0])
            learned: list[Manifest] = []
            for timeline, epochs in by_timeline.items():
                try:
                    next_ones = self._next_of(timeline, epochs)
                except (CorruptionError, FileNotFoundError):
                    next_ones = None
                if next_ones is None:
                    return None
                learned += next_ones
            for manifest in learned:
                self._sealed[manifest.timeline].add(manifest)
                self._learn(manifest.timeline, manifest)
            return learned

    def _next_of(self, timeline: str, came: set[Epoch]) -> list[Manifest] | None:
        """The epochs that follow what is known of a timeline; None where one of those that came does not, or is another
        one now.
        """
        sealed, found = self._sealed.get(timeline), list[Manifest]()
        if sealed is None or sealed.last is None:
            return None
        t = Epoch(sealed.last + 1)
        if any(
            read_manifest(self._root, timeline, known, self._env) != sealed.get(known) for known in came if known < t
        ):
            return None
        # They come in any order, and one that came before its time was left for now.
        while t in came or self._env.exists(self._root / MANIFESTS / timeline / f"{t}.json"):
            found.append(read_manifest(self._root, timeline, t, self._env))
            t = Epoch(t + 1)
        return found if max(came) < t else None

    def notice_changes(self, timeline: str | None = None) -> None:
        """As `refresh` where another process, or node, changed the branches, or gave up what it had of a timeline
        (default: of any): nearly always that is a look at two names.
        """
        with self._lock:
            looked_at = [sealed for id, sealed in self._sealed.items() if timeline in (None, id)]
            if self._env.exists(self._next_entry) or any(self._is_replaced(sealed) for sealed in looked_at):
                self.refresh()

    def reload(self) -> None:
        """Reads everything again."""
        with self._lock:
            fresh = Timelines(self._root, self._env, self._recall)
            self.__dict__.update({k: v for k, v in fresh.__dict__.items() if k != "_lock"})

    @staticmethod
    def _is_another(sealed: ManifestLog, archives: set[str], epochs: set[Epoch]) -> bool:
        """Whether an epoch was added before those that are known, as another node's files come in any order; or one
        went.
        """
        last = sealed.last
        if last is None:
            return bool(archives)  # what is before them is read with them
        if not archives.issuperset(archive.name for archive in sealed.archives()):
            return True
        spans = [span for name in archives if (span := parse_name(name)) is not None]
        own = sealed.last_own
        if own is not None and own not in epochs and not any(first <= own <= end for first, end in spans):
            return True
        new = [span for span in spans if sealed.archive_at(span[0]) is None]
        return any(t < last and t not in sealed for t in epochs) or any(
            t < last and t not in sealed for first, end in new for t in range(first, end + 1)
        )

    def _is_replaced(self, sealed: ManifestLog) -> bool:
        """Whether the newest epoch is not there any more as it is known, because the node gave it up: with an earlier
        one go all that follow.
        """
        newest = sealed.last_own
        if newest is None or sealed.archive_at(newest) is not None:
            return False
        known = self._newest_files.get(sealed.timeline)
        path = known.path if known is not None and known.t == newest else self._root / sealed[newest].path
        try:
            now = _NewestFile(newest, path, self._env.identity(path))
            if known == now:
                return False
            if read_manifest(self._root, sealed.timeline, newest, self._env) != sealed[newest]:
                return True
        except FileNotFoundError:
            return True
        except (CorruptionError, StorageError, OSError):  # verify() says so; what is known is as good as it was
            return False
        self._newest_files[sealed.timeline] = now
        return False

    def _new_of(self, sealed: ManifestLog, archives: set[str], epochs: set[Epoch]) -> list[Manifest]:
        """The manifests of a timeline that were added since, as far as they follow each other."""
        learned: list[Manifest] = []
        known = {archive.name for archive in sealed.archives()}
        spans = [(span[0], name) for name in archives - known if (span := parse_name(name)) is not None]
        try:
            for first, name in sorted([*spans, *((t, "") for t in epochs if t not in sealed)]):
                last = sealed.last
                if last is not None and first > last + 1:
                    break  # what is between is still on its way
                if name:
                    archive = Archive.read(self._root, sealed.timeline, name, self._env)
                    sealed.add_archive(archive)
                    for run in archive.runs:
                        if last is None or run.last > last:
                            self._learn(sealed.timeline, run)
                elif first not in sealed:
                    manifest = read_manifest(self._root, sealed.timeline, first, self._env)
                    sealed.add(manifest)
                    self._learn(sealed.timeline, manifest)
                    learned.append(manifest)
        except CorruptionError as error:
            self.errors.append(error)
        return learned

    # --- looking ----------------------------------------------------------------------------------------------------

    def timeline(self, branch: str = MAIN) -> Timeline:
        with self._lock:
            return self.refs.timeline_of(branch)

    def manifests(self, branch: str = MAIN) -> ManifestLog:
        """By epoch, in order; those of the parent up to the fork included."""
        with self._lock:
            return self._sealed[self.refs.timeline_of(branch).id]

    def of_timeline(self, timeline: str) -> ManifestLog:
        """As `manifests`, of a timeline by its id; what is left of one that no branch is named for."""
        with self._lock:
            return self._sealed.get(timeline) or ManifestLog(timeline, self._root, self._env)

    def manifest(self, t: int, branch: str = MAIN) -> Manifest | None:
        with self._lock:
            return self._sealed[self.refs.timeline_of(branch).id].get(Epoch(t))

    def histories(self, branch: str = MAIN) -> dict[str, History]:
        """By stage, which fingerprint and number of shards wrote each stretch of the branch's sealed epochs."""
        with self._lock:
            return self._histories[self.refs.timeline_of(branch).id].all()

    def last_sealed(self, branch: str = MAIN) -> Epoch | None:
        with self._lock:
            return self._sealed[self.refs.timeline_of(branch).id].last

    def expected(self, branch: str = MAIN) -> Epoch | None:
        """The next epoch to be sealed; None where any may come first."""
        last = self.last_sealed(branch)
        return None if last is None else Epoch(last + 1)

    def newest(self) -> list[Epoch]:
        """The last sealed epoch of each branch that has one."""
        with self._lock:
            if self._newest is None:
                lasts = [self.last_sealed(name) for name in self.refs.names]
                self._newest = [last for last in lasts if last is not None]
            return self._newest

    def origins(self, trace: TraceId) -> list[Time]:
        """Where the stretches of a trace begin, in order."""
        with self._lock:
            return sorted(self._origins.get(trace, ()))

    def first_origin(self, trace: TraceId) -> Time | None:
        """Where the first trace begins in which values of a trace's keys may be: any of the stage, or where the caller
        places keys any of the shard.
        """
        with self._lock:
            if self._first_origins is None:  # of all traces at once: there may be as many as stages have shards
                self._first_origins = {}
                for other, origins in self._origins.items():
                    # By stage; by stage, of those whose keys are placed by their hash; and by shard.
                    for at in ((other.stage,), (other.stage, bool(other.shard.count) or other.shard)):
                        self._first_origins[at] = min(*origins, self._first_origins.get(at, END_OF_TIME))
            of_stage: list[tuple[object, ...]] = [(trace.stage,)]
            wanted = of_stage if trace.shard.count else [(trace.stage, True), (trace.stage, trace.shard)]
            return min((self._first_origins[at] for at in wanted if at in self._first_origins), default=None)

    def sealed_until(self, trace: TraceId) -> Time:
        """The end of the newest epoch whose manifest lists the trace; zero where none does."""
        with self._lock:
            return self._sealed_until.get(trace, Time(0))

    def left_at(self, trace: TraceId, origin: Time, reached: Time) -> Time | None:
        """Of the stretch of a trace that begins at `origin` and has reached `reached`: where the first of the branches
        that read it leaves it. Its history may not be compacted past that. None where none does.
        """
        with self._lock:
            if self._stretches is None:  # most branches have most of them in common, and every trace is asked for
                self._stretches = {}
                for id in self.refs.names.values():
                    for stage, spans in self._histories[id].all().items():
                        for s in spans:
                            at = stage, s.fingerprint, s.shard_count
                            self._stretches.setdefault(at, set()).add((s.lower, s.upper))
            mine = self._stretches.get((trace.stage, trace.fingerprint, trace.shard.count), ())
            return min((upper for lower, upper in mine if lower <= origin < upper < reached), default=None)

    # --- changing (the node only) -----------------------------------------------------------------------------------

    def add(self, manifest: Manifest, identity: Identity | None = None) -> None:
        """A manifest that was published, and which file it is, as far as that is known: it need not be read to see."""
        with self._lock:
            if identity is not None:
                self._newest_files[manifest.timeline] = _NewestFile(manifest.t, self._root / manifest.path, identity)
            self._sealed[manifest.timeline].add(manifest)
            self._learn(manifest.timeline, manifest)

    def _append(self, entry: Mapping[str, Any]) -> None:
        """An entry of the log of branches. Raises CorruptionError where one before it is lost."""
        if lost := [*entries_lost(self.refs, self.remembered)]:
            raise CorruptionError(
                f"{self._root / BRANCHES}: {lost[0]}.json is missing, so the branches cannot be changed: put it back, "
                f"or say `nosync verify --repair {self._root}`"
            )
        self.refs = append(self._root, self.refs, entry, self._env)
        self._next_entry = self._root / BRANCHES / f"{self.refs.entries + 1}.json"
        self._newest = self._stretches = None

    def create(self, name: str, parent: str, at: int, changed: Iterable[str], anew: Iterable[str] = ()) -> Timeline:
        """A branch of `parent` at a sealed epoch. Durable when this returns."""
        with self._lock:
            timeline = self.refs.timeline_of(parent)
            if at not in self._sealed[timeline.id]:
                raise InvalidInputError(
                    f"cannot branch {parent} at {at}: it is not a sealed epoch; the newest is {self.last_sealed(parent)}"
                )
            entry = creation(self.refs, name, timeline.id, at, changed, anew)
            self._append(entry)
            made = self.refs.timelines[entry["line"]]
            self._begin(made)
            return made

    def rewind(self, at: int, keep_as: str | None) -> None:
        """`main` is from now on a new timeline that begins at an epoch of the one it was, which is kept under
        `keep_as`, or dropped.

        One entry of the log, so that a crash leaves all of it or nothing.
        """
        with self._lock:
            timeline = self.refs.timeline_of(MAIN)
            if at not in self._sealed[timeline.id]:
                raise InvalidInputError(f"cannot rewind to {at}: it is not a sealed epoch")
            if keep_as is not None:
                check_name(keep_as, "branch name")
                if keep_as in self.refs.names:
                    raise InvalidInputError(
                        f"branch {keep_as!r} exists already: keep the old timeline under another name"
                    )
            name = f"rewind-{self.refs.entries + 1}"
            entry = {"do": "rewind", "name": name, "line": name, "parent": timeline.id, "at": at, "keep_as": keep_as}
            self._append(entry)
            self._begin(self.refs.timelines[name])

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
        """Whether manifests are there that no branch needs: what `prune` removes."""
        with self._lock:
            return any(
                self._last_listed(timeline) > (-1 if end is None else end) for timeline, end in self._ended().items()
            )

    def _ended(self) -> dict[str, Epoch | None]:
        """The timelines that have manifests here and get no more: up to which epoch they are needed, None where none
        are.
        """
        kept, there = self.refs.kept_until(), {*self._env.list_dir(self._root / MANIFESTS)}
        return {
            timeline: kept.get(timeline)
            for timeline in self.refs.timelines
            if timeline in there and (timeline not in kept or kept[timeline] is not None)
        }

    def _last_listed(self, timeline: str) -> int:
        """The last epoch of a timeline that files say anything of; -1 where there are none."""
        names, epochs = list_timeline(self._root, timeline, self._env)
        return max([*epochs, *(span[1] for name in names if (span := parse_name(name)) is not None)], default=-1)

    def prune(self) -> dict[TraceId, Time]:
        """Removes the manifests that no branch needs. Returns the traces that lost some and get no more epochs, each
        with the time up to which it is still listed.
        """
        with self._lock:
            lost: set[TraceId] = set()
            for timeline, until in self._ended().items():
                lost |= self._cut(timeline, until)
            for timeline in self.refs.timelines.keys() - self.refs.kept_until().keys():
                self._sealed.pop(timeline, None)
                self._histories.pop(timeline, None)
            still: dict[TraceId, Time] = dict.fromkeys(lost, Time(0))
            for sealed in self._sealed.values() if lost else ():
                for piece in sealed.own_pieces():
                    for trace, _ in piece.traces():
                        if trace in still:
                            still[trace] = max(still[trace], piece.end)
            self._sealed_until |= still
            self._newest = self._stretches = None
            growing = self._growing()
            return {trace: until for trace, until in still.items() if trace not in growing}

    def _growing(self) -> set[TraceId]:
        """The traces that branches have epochs in of their own, so that there may be more of them than manifests say
        here: an epoch that is running has published its layers before it is sealed, and those of another node come in
        any order.
        """
        return {
            trace
            for timeline in self.refs.names.values()
            for piece in self._sealed[timeline].own_pieces()
            for trace, _ in piece.traces()
        }

    def _cut(self, timeline: str, until: Epoch | None) -> set[TraceId]:
        """Removes what a timeline has after an epoch (None: all of it), and returns the traces that lost some."""
        directory = self._root / MANIFESTS / check_name(timeline, "timeline name")
        if until is not None and self._last_listed(timeline) <= until:
            return set()
        own = ManifestLog(timeline, self._root, self._env)
        read_manifest_log(own, self._root, self._env)
        end = Epoch(-1) if until is None else until
        gone = list(own.pieces(end))
        archives = [archive for archive in own.archives() if archive.last > end]
        with storage_errors("remove", directory):
            for archive in archives:
                self._write_singly(own[t] for t in archive.epochs if t <= end)
            singles = [t for t in own.singles() if t > end]
            for name in [*(f"{t}.json" for t in singles), *(archive.name for archive in archives)]:
                self._env.unlink(directory / name)
            if until is None and directory.exists():
                shutil.rmtree(directory)
        if timeline in self._sealed:
            known = self._sealed[timeline]
            kept = [own[t] for archive in archives for t in archive.epochs if t <= end]
            for manifest in kept:
                known.add(manifest)
            known.remove(singles, archives)
        return {trace for piece in gone for trace, _ in piece.traces()}

    def _write_singly(self, manifests: Iterable[Manifest]) -> None:
        """What is left of an archive, as durable as it was."""
        for manifest in manifests:
            publish_manifest(self._root, manifest, self._env)
            sync_published(self._root, self._root / manifest.path, self._env)

    def archive(self, branch: str, until: int, size: int) -> Archive | None:
        """Puts the oldest whole group of `size` manifests, up to an epoch, into one file, which is durable when this
        returns. The manifests stay where they are. None: there is no such group.

        Raises CorruptionError where there is an archive that says otherwise.
        """
        with self._lock:
            sealed = self._sealed[self.refs.timeline_of(branch).id]
            group = group_to_archive(sealed.singles(), until, size, lambda t: len(sealed[t].entries))
            manifests = [sealed[Epoch(t)] for t in group or ()]
        archive = publish_archive(self._root, manifests, self._env) if manifests else None
        if archive is None:
            return None
        with self._lock:
            sealed.add_archive(archive)
        return archive

    def archives(self) -> list[Archive]:
        """Of all lines."""
        with self._lock:
            return [archive for sealed in self._sealed.values() for archive in sealed.archives()]

    def beside_archives(self) -> tuple[list[PurePosixPath], list[CorruptionError]]:
        """The manifests that have files of their own though an archive stands for them; and an error for each of them
        that is damaged, or says otherwise than the archive.
        """
        with self._lock:
            timelines = [sealed for sealed in self._sealed.values() if sealed.archives()]
        found: list[PurePosixPath] = []
        errors: list[CorruptionError] = []
        for sealed in timelines:
            _, epochs = list_timeline(self._root, sealed.timeline, self._env)
            for t in sorted(t for t in epochs if sealed.archive_at(t) is not None):
                path = PurePosixPath(MANIFESTS, sealed.timeline, f"{t}.json")
                try:
                    if read_manifest(self._root, sealed.timeline, t, self._env) != sealed[t]:
                        raise CorruptionError(
                            f"{self._root / path}: says otherwise than the archive that stands for it"
                        )
                    found.append(path)
                except CorruptionError as error:
                    errors.append(error.of_file(self._root / path))
        return found, errors
