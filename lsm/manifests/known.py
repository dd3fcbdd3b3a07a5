"""What one process knows of the timelines of a store: a value that is read at once, and learns as epochs come.

A branch's manifests are its own and, up to the fork, those of its parent: the same objects, so a branch costs nothing,
on disk or in memory.
"""

from __future__ import annotations

from pathlib import Path

from nosync.lsm.errors import CorruptionError
from nosync.lsm.manifests.archive import Archive, Run
from nosync.lsm.manifests.branches import Timeline, read_refs
from nosync.lsm.manifests.manifest import Histories, Manifest
from nosync.lsm.manifests.manifest_log import ManifestLog, read_manifest_log
from nosync.lsm.manifests.remembered import Remembered
from nosync.lsm.model.layer import TraceId
from nosync.lsm.model.timestamp import END_OF_TIME, Epoch, Time
from nosync.lsm.platform.env import Env


class Known:
    """Every timeline that is needed, with its manifests. `errors`: a CorruptionError for each damaged manifest."""

    def __init__(self, root: Path, env: Env, remembered: Remembered) -> None:
        """`remembered`: asked for before, or what comes meanwhile would be taken for lost."""
        self._root, self._env, self.remembered = root, env, remembered
        self.refs = read_refs(root, env)
        self.errors: list[CorruptionError] = []
        self.logs: dict[str, ManifestLog] = {}
        self.histories: dict[str, Histories] = {}
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
        self.begin(timeline)
        self.errors += read_manifest_log(self.logs[timeline.id], self._root, self._env)
        for piece in self.logs[timeline.id].own_pieces(-1 if timeline.at is None else timeline.at):
            self.learn(timeline.id, piece)

    def begin(self, timeline: Timeline) -> None:
        """Begins a timeline that has no epochs of its own yet."""
        *before, _ = self.refs.left(timeline.id)
        parent = self.logs[before[-1]] if before else None
        histories = Histories()
        if parent is not None and timeline.at is not None:
            histories = self.histories[parent.timeline].until(timeline.at, timeline.replaced)
        self.logs[timeline.id] = ManifestLog(timeline.id, self._root, self._env, parent, timeline.at)
        self.histories[timeline.id] = histories

    def add(self, manifest: Manifest) -> None:
        """Adds the next epoch of its timeline."""
        self.logs[manifest.timeline].add(manifest)
        self.learn(manifest.timeline, manifest)

    def not_in(self, before: Known) -> list[Manifest]:
        """Returns the manifests with files of their own whose epochs were not known before, by timeline."""
        own = {timeline: set(log.own()) for timeline, log in before.logs.items()}
        there = [(log, t) for log in self.logs.values() for t in log.singles()]
        return [log[t] for log, t in there if t not in own.get(log.timeline, ())]

    def branches_changed(self) -> None:
        """Branches, or the ends of their timelines, are other ones."""
        self._newest = self._stretches = None

    def log(self, branch: str) -> ManifestLog:
        """Returns the manifests of a branch."""
        return self.logs[self.refs.timeline_of(branch).id]

    def archives(self) -> list[Archive]:
        """Returns the archives of all timelines."""
        return [archive for log in self.logs.values() for archive in log.archives()]

    def learn(self, timeline: str, piece: Run | Manifest) -> None:
        """Learns what epochs say of their traces; those before are known."""
        self._newest = self._stretches = None
        self._first_origins = None
        listed = [*piece.traces()]
        self.histories[timeline].add(piece.begin, listed)
        for trace, origin in listed:
            self._origins.setdefault(trace, set()).add(origin)
            self._sealed_until[trace] = max(self._sealed_until.get(trace, Time(0)), piece.end)

    def newest(self) -> list[Epoch]:
        """Returns the last sealed epoch of each branch that has one."""
        if self._newest is None:
            lasts = [self.log(name).last for name in self.refs.names]
            self._newest = [last for last in lasts if last is not None]
        return self._newest

    def origins(self, trace: TraceId) -> list[Time]:
        """Returns where the stretches of a trace begin, in order."""
        return sorted(self._origins.get(trace, ()))

    def first_origin(self, trace: TraceId) -> Time | None:
        """Returns where the first trace begins in which values of a trace's keys may be: any of the stage, or where the
        caller places keys any of the shard.
        """
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
        """Returns the end of the newest epoch whose manifest lists the trace; zero where none does."""
        return self._sealed_until.get(trace, Time(0))

    def left_at(self, trace: TraceId, origin: Time, reached: Time) -> Time | None:
        """Returns, of the stretch of a trace that begins at `origin` and has reached `reached`, where the first of the
        branches that read it leaves it. Its history may not be compacted past that. None where none does.
        """
        if self._stretches is None:  # most branches have most of them in common, and every trace is asked for
            self._stretches = {}
            for id in self.refs.names.values():
                for stage, spans in self.histories[id].all().items():
                    for s in spans:
                        at = stage, s.fingerprint, s.shard_count
                        self._stretches.setdefault(at, set()).add((s.lower, s.upper))
        mine = self._stretches.get((trace.stage, trace.fingerprint, trace.shard.count), ())
        return min((upper for lower, upper in mine if lower <= origin < upper < reached), default=None)

    def forget(self, timelines: set[str]) -> None:
        """No branch needs these any more."""
        for timeline in timelines:
            self.logs.pop(timeline, None)
            self.histories.pop(timeline, None)

    def sealed_again_until(self, ends: dict[TraceId, Time]) -> None:
        """These traces lost epochs, and are listed up to these times."""
        self._sealed_until |= ends
