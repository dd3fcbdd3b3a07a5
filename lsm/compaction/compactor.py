"""Merging in the background: which merge is next, carrying it out, and deleting what it replaced.

Invariants
- A merged layer is durable before its inputs leave the catalog, and they leave it in the edit that adds the merged one.
- An input's file is deleted a grace period later, for processes that have listed but not yet opened it.
- What the catalog lists is never deleted, and what a merged layer replaced is deleted only while that one is still
  there: where it was lost, the files that it replaced are taken back.
- One merge runs at a time, and while another process carries out a large one, small ones beside it: of other layers
  than those, and of the same trace only of later ones. Between any two steps all of that can be abandoned.
- Layers that were given up, or are not needed any more, no merge that had begun before brings back: `paused`,
  `Owner.replace`.
- A trace is looked at again only when something of it changed since: `touch`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from nosync.lsm.compaction.merge import Merge
from nosync.lsm.compaction.policy import Candidate, Chain, choose_merge, is_behind
from nosync.lsm.compaction.worker import OUT_OF_THE_WAY, MergeProcess
from nosync.lsm.errors import CorruptionError, NosyncError, StorageError, described
from nosync.lsm.layers.reader import LayerReader
from nosync.lsm.layers.writer import Published
from nosync.lsm.model.layer import Digest, LayerId, Record, TraceId
from nosync.lsm.platform.env import Env, storage_errors
from nosync.lsm.settings import StoreSettings
from nosync.lsm.trace.directory import LayerDirectory

log = logging.getLogger("nosync")

BACKGROUND_PAUSE_SHARE = 1.5
"""NodeThreads merges rest so many times as long as they work; compact(), which somebody waits for, does not."""
RETRY_S = 30.0
"""After which a trace whose merge failed is tried again."""
LOOK_S = 1.0
"""How often a background merge looks whether layers pile up behind it."""


class Owner(Protocol):
    """What merging needs of its node."""

    directory: LayerDirectory
    settings: StoreSettings

    def durable_ids(self) -> set[LayerId]:
        """Every layer in the catalog."""

    def durable_traces(self) -> list[TraceId]:
        """The traces of these layers."""

    def sealed_chains(self, trace: TraceId) -> list[Chain]:
        """The stretches of a trace whose layers may be merged: durable, sealed, contiguous."""

    def replace(self, merged: Record, inputs: Mapping[LayerId, Digest]) -> bool:
        """Makes the merged layer stand for its inputs, atomically. False: it is gone, or they are not what was merged."""

    def recheck(self, ids: Sequence[LayerId]) -> list[NosyncError]:
        """Verifies layers and quarantines the bad ones."""

    def scan(self) -> None:
        """Notices files that vanished."""

    def not_replaced(self, ids: Sequence[LayerId]) -> list[LayerId]:
        """Those for which no other durable layer stands, or whose file is gone."""

    def taken_back(self, ids: Iterable[LayerId]) -> None:
        """These are no garbage after all: they are made durable again, where their files are still there."""


@dataclass(frozen=True)
class _Garbage:
    due_s: float
    is_replaced: bool
    """A merged layer stands for it. Else nothing needs it any more."""


class Compactor:
    """The merges of one node. Safe to call from several threads."""

    def __init__(self, owner: Owner, problems: dict[str, str]) -> None:
        """`problems`: gets an entry for each trace whose merge failed, which is tried again after a while."""
        self._owner, self._problems = owner, problems
        self._not_before_s: dict[TraceId, float] = {}
        self._env = owner.directory.env
        self._one_merge = threading.Lock()
        self._has_turn: int | None = None  # the thread that merges, or lets nobody merge
        self._pausing, self._abandoned = threading.Lock(), threading.Event()
        self._making: set[LayerId] = set()
        self._later: set[TraceId] = set()  # what has to wait for the end of a large merge
        self._out_of_the_way, self._in_a_hurry = MergeProcess(OUT_OF_THE_WAY), MergeProcess()
        self._lock = threading.Lock()
        self._garbage: dict[LayerId, _Garbage] = {}
        self._touched: set[TraceId] = set()
        self._queue: list[TraceId] = []  # of those the ones still to be looked at, the next one last

    def touch(self, traces: Iterable[TraceId] | None = None) -> None:
        """Something about these traces changed (None: about all of them), so that there may be a merge to do."""
        found = self._owner.durable_traces() if traces is None else traces
        with self._lock:
            self._touched.update(found)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """No merge runs meanwhile. One that had begun is abandoned, and begins again with what is there then."""
        if self._has_turn == threading.get_ident():  # between two merges of this thread's, or in another pause
            yield
            return
        with self._pausing:
            self._abandoned.set()
            try:
                with self._turn():
                    self._abandoned.clear()
                    yield
            finally:
                self._abandoned.clear()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        with self._one_merge:
            self._has_turn = threading.get_ident()
            try:
                yield
            finally:
                self._has_turn = None

    def merge_once(self, stop: Callable[[], bool], *, whole: bool = False, stage: str | None = None) -> bool:
        """Does the next merge that the policy asks for, or with `whole` merges a trace into one layer.

        False: there is none to do, or `stop()` said so between two steps. A trace whose merge fails keeps no other one
        from being merged. With `whole`, when nothing else is left to do, raises what kept one from being merged.
        """
        errors: list[Exception] = []
        with self._pausing:
            pass  # whoever pauses comes first
        with self._turn():
            for trace in self._all_of(stage) if whole else self._next_touched():
                try:
                    done = self._merge(trace, stop, whole=whole)
                except Exception as error:  # noqa: BLE001 - whatever it is, other traces are merged, and it is told of
                    self._failed(trace, error)
                    errors.append(error)
                    continue
                self._not_before_s.pop(trace, None)
                self._problems.pop(_problem_of(trace), None)
                if done is not None:
                    return done
        if errors and whole:
            raise errors[0]
        return False

    def _all_of(self, stage: str | None) -> list[TraceId]:
        return sorted(trace for trace in self._owner.durable_traces() if stage in (None, trace.stage))

    def _next_touched(self) -> Iterator[TraceId]:
        """Traces to look at, in order as far as they were known when the first one was: there may be thousands."""
        while True:
            now_s = self._env.monotonic_s()
            with self._lock:
                if not self._queue:
                    ready = [trace for trace in self._touched if self._not_before_s.get(trace, now_s) <= now_s]
                    self._queue = sorted(ready, reverse=True)
                if not self._queue:
                    return
                trace = self._queue.pop()
                is_next = trace in self._touched and self._not_before_s.get(trace, now_s) <= now_s
            if is_next:
                yield trace

    def _failed(self, trace: TraceId, error: Exception) -> None:
        self._not_before_s[trace] = self._env.monotonic_s() + RETRY_S
        self.touch([trace])
        if self._problems.get(_problem_of(trace)) != described(error):
            log.error("%s: %s", _problem_of(trace), described(error), exc_info=not isinstance(error, NosyncError))
        self._problems[_problem_of(trace)] = described(error)

    def _merge(
        self, trace: TraceId, stop: Callable[[], bool], *, whole: bool, beside: Merge | None = None
    ) -> bool | None:
        """Whether a merge was done, or abandoned for a pause; not where `stop()` came. None: there is none to do.

        `beside`: a merge that another process carries out meanwhile.
        """
        with self._lock:
            self._touched.discard(trace)
        chains = self._owner.sealed_chains(trace)
        merge = next((m for c in chains if (m := self._next(c, whole=whole, beside=beside)) is not None), None)
        if merge is None:
            return None
        self.touch([trace])  # there may be another one after it
        inputs = {layer.id: layer.digest for layer in merge.layers}
        self._making.add(merge.id)
        is_stopped = False

        def stop_or_pause() -> bool:
            nonlocal is_stopped
            is_stopped = stop()
            return is_stopped or self._abandoned.is_set()

        try:
            done = self._carry_out(merge, stop_or_pause, waited_for=whole)
            if done is None:
                return not is_stopped
            if self._owner.replace(Record(done.id, done.digest, done.rows, done.size_bytes), inputs):
                self.discard(list(inputs), is_replaced=True)
        except CorruptionError:
            if beside is not None:  # whoever sets it aside may pause all merges, and the large one goes on
                self._later.add(trace)
                with self._lock:
                    self._touched.discard(trace)
                return None
            if not self._owner.recheck(list(inputs)):
                raise  # on disk they are whole: what was mapped, or what was written, is not
            return None
        finally:
            self._making.discard(merge.id)
        return True

    def _carry_out(self, merge: Merge, stop: Callable[[], bool], *, waited_for: bool) -> Published | None:
        """None: it was abandoned because `stop()` said so."""
        if self._is_large(merge.layers):
            return self._in_process(merge, stop, waited_for=waited_for)
        for _ in merge.steps():
            if stop():
                return None
        return merge.published

    def _in_process(self, merge: Merge, stop: Callable[[], bool], *, waited_for: bool) -> Published | None:
        """Out of the way of those who append, as long as that gets anywhere.

        On a machine that is busy all the time it does not, while layers pile up and every read has to look into all of
        them: then the merge begins again like any other work.
        """
        trace, look_s = merge.layers[0].id.trace, 0.0

        def stop_meanwhile() -> bool:
            self._merge_beside(merge, stop)
            return stop()

        def stop_or_hurry() -> bool:
            nonlocal look_s
            is_stopped = stop_meanwhile()
            if is_stopped or self._env.monotonic_s() < look_s:
                return is_stopped
            look_s = self._env.monotonic_s() + LOOK_S
            return self._is_behind(trace)

        try:
            if not waited_for and not stop_or_hurry():
                done = self._out_of_the_way.run(merge, stop_or_hurry, pause_share=BACKGROUND_PAUSE_SHARE)
                if done is not None:
                    return done
            return None if stop() else self._in_a_hurry.run(merge, stop if waited_for else stop_meanwhile)
        finally:
            later, self._later = self._later, set()
            self.touch([trace, *later])

    def _merge_beside(self, large: Merge, stop: Callable[[], bool]) -> None:
        """Small merges, as new layers come: else they piled up for as long as the large one takes, and all who read
        looked into each of them.
        """
        for trace in self._next_touched():
            try:
                if self._merge(trace, stop, whole=False, beside=large) is False:
                    return
            except Exception as error:  # noqa: BLE001 - as in `merge_once`
                self._failed(trace, error)

    def _is_large(self, layers: Sequence[LayerReader]) -> bool:
        """Whether another process merges them, which cannot share an environment with injected faults."""
        rows = sum(layer.info.rows for layer in layers)
        return rows >= self._owner.settings.merge_process_rows and type(self._env) is Env

    def close(self) -> None:
        """Ends the processes that merged. Nothing merges any more."""
        with self._turn():
            self._out_of_the_way.close()
            self._in_a_hurry.close()

    def _is_behind(self, trace: TraceId) -> bool:
        try:
            return any(is_behind(_candidates(self._layers(chain))) for chain in self._owner.sealed_chains(trace))
        except (FileNotFoundError, CorruptionError):
            return False  # whoever merges next finds out

    def _layers(self, chain: Chain) -> list[LayerReader]:
        return [self._owner.directory.reader(id) for id in chain.ids]

    def _next(self, chain: Chain, *, whole: bool, beside: Merge | None) -> Merge | None:
        directory, settings = self._owner.directory, self._owner.settings
        since = chain.since
        if not chain.ids:
            return None
        try:
            layers = self._layers(chain)
        except (FileNotFoundError, CorruptionError) as error:
            if beside is not None:
                self._later.add(chain.ids[0].trace)
            elif isinstance(error, CorruptionError):
                self._owner.recheck(chain.ids)
            else:
                self._owner.scan()
            return None
        taken = 0
        if beside is not None and beside.id.trace == chain.ids[0].trace:
            # That process reads them, and what they become has yet to stand for them.
            taken = sum(id.description.lower < beside.id.description.upper for id in chain.ids)
        # The newest layer is left alone: tasks are about to open it.
        chosen = (0, len(layers)) if whole else choose_merge(_candidates(layers[:-1]), since, taken=taken)
        if chosen is None:
            return None
        first, end = chosen
        if beside is not None and self._is_large(layers[first:end]):
            self._later.add(chain.ids[0].trace)
            return None
        merge = Merge(
            directory.root,
            layers[first:end],
            since=since,
            bottom=first == 0 and chain.bottom,
            env=self._env,
            block_rows=settings.block_rows,
        )
        # One layer alone is worth rewriting only when `since` has moved past more of its history.
        only = layers[first] if end - first == 1 else None
        if only and (merge.id == only.id or (len(only.info.times) == 1 and not only.info.tombstones)):
            return None
        return merge

    # --- what was replaced --------------------------------------------------------------------------------------

    def is_garbage(self, id: LayerId) -> bool:
        """Whether its file is there only for readers that are about to open it."""
        return id in self._garbage

    def is_made(self, id: LayerId) -> bool:
        """Whether a merge writes this layer now: it counts when it replaces its inputs, and not as soon as its file is
        there.
        """
        return id in self._making

    def discard(self, ids: Sequence[LayerId], *, is_replaced: bool = False, grace: bool = True) -> None:
        """Removes their files with `collect_garbage`, a grace period later or the next time.

        `is_replaced`: a durable merged layer stands for them. Their files go only if it still does by then.
        """
        due_s = self._env.monotonic_s() + (self._owner.settings.grace_s if grace else 0.0)
        with self._lock:
            for id in ids:
                known = self._garbage.get(id)
                due = due_s if known is None else min(due_s, known.due_s)
                self._garbage[id] = _Garbage(due, is_replaced and (known is None or known.is_replaced))

    def take_back(self, lost: LayerId) -> list[LayerId]:
        """A merged layer is lost: what it replaced is no garbage any more. Returns those whose files may still be
        there.
        """
        with self._lock:
            back = [
                id
                for id, garbage in self._garbage.items()
                if garbage.is_replaced and id.trace == lost.trace and lost.description.covers(id.description)
            ]
            for id in back:
                del self._garbage[id]
        return back

    def keep(self, ids: Sequence[LayerId]) -> None:
        """These are not to be removed after all."""
        with self._lock:
            for id in ids:
                self._garbage.pop(id, None)

    def collect_garbage(self, *, all: bool = False) -> None:
        """Deletes files whose grace period is over. Whoever still maps one keeps its bytes."""
        recorded = self._owner.durable_ids()
        with self._lock:
            now = self._env.monotonic_s()
            due = {id: garbage for id, garbage in self._garbage.items() if all or garbage.due_s <= now}
        # Not only what is recorded: somebody may have deleted the merged file a moment ago.
        back = set(self._owner.not_replaced([id for id, garbage in due.items() if garbage.is_replaced]))
        if back:
            log.warning("%d replaced layers are taken back, for what stood for them is lost", len(back))
            self.keep(sorted(back))
            self._owner.taken_back(sorted(back))
        kept: list[StorageError] = []
        for id in due.keys() - back:
            path = self._owner.directory.path_of(id)
            try:
                with self._lock:  # `keep` either comes before, or finds the file gone
                    if id in self._garbage and id not in recorded:
                        with storage_errors("remove", path):
                            self._env.unlink(path)
                    self._garbage.pop(id, None)
            except StorageError as error:  # the others go all the same
                kept.append(error)
                continue
            self._owner.directory.forget(id)
        if kept:
            raise StorageError(f"{len(kept)} files that were replaced cannot be removed: {kept[0]}")


def _problem_of(trace: TraceId) -> str:
    return f"merge of {trace}"


def _candidates(layers: Sequence[LayerReader]) -> list[Candidate]:
    return [Candidate(layer.info.rows, layer.id.description, bool(layer.info.key)) for layer in layers]
