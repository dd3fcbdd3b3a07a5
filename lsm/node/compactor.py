"""Merging in the background: which merge is next, and carrying it out.

Invariants
- A merged layer is durable before its inputs leave the catalog, and they leave it in the edit that adds the merged one.
- One merge runs at a time, and while another process carries out a large one, small ones beside it: of other layers
  than those, and of the same trace only of later ones. Between any two steps all of that can be abandoned.
- Layers that were discarded, or are not needed any more, no merge that had begun before brings back: `paused`,
  `replace`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from nosync.lsm.compaction.candidates import candidates
from nosync.lsm.compaction.merge import Merge
from nosync.lsm.compaction.policy import Candidate, Chain, choose_merge, is_behind
from nosync.lsm.compaction.worker import OUT_OF_THE_WAY, MergeProcess
from nosync.lsm.errors import CorruptionError
from nosync.lsm.layers.reader import LayerReader
from nosync.lsm.layers.writer import Published
from nosync.lsm.manifests.input_policy import MayBeGone
from nosync.lsm.manifests.timelines import Timelines
from nosync.lsm.model.layer import Digest, LayerId, Record, TraceId
from nosync.lsm.model.timestamp import Time, epoch_of, pack
from nosync.lsm.node.durable_layers import DurableLayers
from nosync.lsm.node.garbage import Garbage
from nosync.lsm.node.layer_sync import LayerSyncQueue
from nosync.lsm.node.merge_queue import MergeQueue
from nosync.lsm.node.quarantine import Quarantine
from nosync.lsm.node.retention import Retention
from nosync.lsm.node.safe_point import SafePoint
from nosync.lsm.platform.env import Env
from nosync.lsm.settings import StoreSettings
from nosync.lsm.trace.directory import LayerDirectory
from nosync.lsm.trace.presence import live

BACKGROUND_PAUSE_SHARE = 1.5
"""Merges in the background rest so many times as long as they work; those of compact(), for which somebody waits, do
not.
"""
LOOK_S = 1.0
"""How often a background merge looks whether layers pile up behind it."""


class Compactor:
    """The merges of one node. Safe to call from several threads."""

    def __init__(
        self,
        directory: LayerDirectory,
        settings: StoreSettings,
        layers: DurableLayers,
        timelines: Timelines,
        retention: Retention,
        merges: MergeQueue,
        queue: LayerSyncQueue,
        garbage: Garbage,
        quarantine: Quarantine,
        safe_points: SafePoint,
    ) -> None:
        self._directory, self._env, self._settings, self._layers = directory, directory.env, settings, layers
        self._timelines, self._retention, self._merges, self._queue = timelines, retention, merges, queue
        self._garbage, self._quarantine, self._safe_points = garbage, quarantine, safe_points
        self._one_merge = threading.Lock()
        self._has_turn: int | None = None  # the thread that merges, or lets nobody merge
        self._pausing, self._abandoned = threading.Lock(), threading.Event()
        self._making: set[LayerId] = set()
        self._may_be_gone = MayBeGone(directory, timelines)
        self._later: set[TraceId] = set()  # what has to wait for the end of a large merge
        self._out_of_the_way, self._in_a_hurry = MergeProcess(OUT_OF_THE_WAY), MergeProcess()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Lets no merge run meanwhile. One that had begun is abandoned, and begins again with what is there then."""
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
            for trace in self._merges.all_of(stage) if whole else self._merges.due():
                try:
                    done = self._merge(trace, stop, whole=whole)
                except Exception as error:  # noqa: BLE001 - whatever it is, other traces are merged, and it is told of
                    self._merges.failed(trace, error)
                    errors.append(error)
                    continue
                self._merges.succeeded(trace)
                if done is not None:
                    return done
        if errors and whole:
            raise errors[0]
        return False

    def _merge(
        self, trace: TraceId, stop: Callable[[], bool], *, whole: bool, beside: Merge | None = None
    ) -> bool | None:
        """Returns whether a merge was done, or abandoned for a pause; not where `stop()` came. None: there is none to
        do.

        `beside`: a merge that another process carries out meanwhile.
        """
        self._merges.untouch(trace)
        chains = self.chains(trace)
        merge = next((m for c in chains if (m := self._next(c, whole=whole, beside=beside)) is not None), None)
        if merge is None:
            return None
        self._merges.touch([trace])  # there may be another one after it
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
            if self.replace(Record(done.id, done.digest, done.rows, done.size_bytes), inputs):
                self._garbage.discard(list(inputs), is_replaced=True)
        except CorruptionError:
            if beside is not None:  # whoever sets it aside may pause all merges, and the large one goes on
                self._later.add(trace)
                self._merges.untouch(trace)
                return None
            if not self._quarantine.recheck(inputs):
                raise  # on disk they are whole: what was mapped, or what was written, is not
            return None
        finally:
            self._making.discard(merge.id)
        return True

    def _carry_out(self, merge: Merge, stop: Callable[[], bool], *, waited_for: bool) -> Published | None:
        """Carries out a merge. Returns None where it was abandoned because `stop()` said so."""
        if self._is_large(merge.layers):
            return self._in_process(merge, stop, waited_for=waited_for)
        for _ in merge.steps():
            if stop():
                return None
        return merge.published

    def _in_process(self, merge: Merge, stop: Callable[[], bool], *, waited_for: bool) -> Published | None:
        """Merges out of the way of those who append, as long as that gets anywhere.

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
            self._merges.touch([trace, *later])

    def _merge_beside(self, large: Merge, stop: Callable[[], bool]) -> None:
        """Makes small merges, as new layers come. Else they would pile up for as long as the large one takes, and all
        who read would look into each of them.
        """
        for trace in self._merges.due():
            try:
                if self._merge(trace, stop, whole=False, beside=large) is False:
                    return
            except Exception as error:  # noqa: BLE001 - as in `merge_once`
                self._merges.failed(trace, error)

    def _is_large(self, layers: Sequence[LayerReader]) -> bool:
        """Returns whether another process merges them, which cannot share an environment with injected faults."""
        rows = sum(layer.info.rows for layer in layers)
        are_here = self._env.sees_stubs and not any(self._is_stub(layer.id) for layer in layers)
        return rows >= self._settings.merge_process_rows and (type(self._env) is Env or are_here)

    def _is_stub(self, id: LayerId) -> bool:
        return self._env.sees_stubs and self._env.stub(self._directory.path_of(id)) is not None

    def close(self) -> None:
        """Ends the processes that merged. Nothing merges any more."""
        with self._turn():
            self._out_of_the_way.close()
            self._in_a_hurry.close()

    def _is_behind(self, trace: TraceId) -> bool:
        try:
            return any(is_behind(_candidates(self._readers(c.after(self._is_stub)))) for c in self.chains(trace))
        except (FileNotFoundError, CorruptionError):
            return False  # whoever merges next finds out

    def _readers(self, chain: Chain) -> list[LayerReader]:
        return [self._directory.reader(id) for id in chain.ids]

    def _next(self, chain: Chain, *, whole: bool, beside: Merge | None) -> Merge | None:
        since = chain.since
        if not whole:  # nobody waits for it: what is not here is merged when it came
            chain = chain.after(self._is_stub)
        if not chain.ids:
            return None
        try:
            layers = self._readers(chain)
        except (FileNotFoundError, CorruptionError) as error:
            if beside is not None:
                self._later.add(chain.ids[0].trace)
            elif isinstance(error, CorruptionError):
                self._quarantine.recheck(chain.ids)
            else:
                self._quarantine.lose_vanished(chain.ids)
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
            self._directory.root,
            layers[first:end],
            since=since,
            bottom=first == 0 and chain.bottom,
            env=self._env,
            block_rows=self._settings.block_rows,
        )
        # One layer alone is worth rewriting only when `since` has moved past more of its history.
        only = layers[first] if end - first == 1 else None
        if only and (merge.id == only.id or (len(only.info.times) == 1 and not only.info.tombstones)):
            return None
        return merge

    def is_made(self, id: LayerId) -> bool:
        """Returns whether a merge writes this layer now: it counts when it replaces its inputs, and not as soon as its
        file is there.
        """
        return id in self._making

    # --- what there is to merge, and what was merged ------------------------------------------------------------------

    def chains(self, trace: TraceId) -> list[Chain]:
        """Returns the stretches of a trace that may be merged."""
        with self._layers.lock:
            durable = list(self._layers.of(trace))
        timelines, since = self._timelines, self._retention.since()

        def frontier(origin: Time, reached: Time) -> Time:
            left_at = timelines.left_at(trace, origin, reached)
            return since if left_at is None else min(since, pack(epoch_of(Time(left_at - 1))))

        return candidates(
            trace,
            durable,
            timelines.origins(trace),
            timelines.sealed_until(trace),
            frontier,
            first_origin=timelines.first_origin(trace),
            is_input=self._may_be_gone(trace.stage),
        )

    def replace(self, merged: Record, inputs: Mapping[LayerId, Digest]) -> bool:
        """Makes one version edit: the merged layer, whose file is durable, stands for its inputs from now on. False: it
        is gone, or what was merged was released, or discarded, meanwhile; then it goes as well.

        A scan that saw its file before this may take it for obsolete: a layer that is rewritten alone, because `since`
        moved on, covers what the merged one covers.
        """
        self._queue.sync_directories([merged])
        with self._layers.lock:
            self._garbage.keep([merged.id])
            if not self._directory.has_file(merged.id):
                return False
            there = self._layers.of(merged.id.trace)
            already = there.get(merged.id.description)  # a peer that merged the same may have sent it
            if already is None or already.digest != merged.digest:
                found = {id: there.get(id.description) for id in inputs}
                if any(record is None or record.digest != inputs[id] for id, record in found.items()):
                    self._garbage.discard([merged.id], grace=False)
                    return False
            self._layers.apply([merged], [id for id in inputs if id.description in there])
            self._queue.settled(merged.id)
        self._merges.changed([merged.id.trace])
        return True

    def drop_covered(self, traces: Iterable[TraceId] | None = None) -> None:
        """Drops what a merged layer stands for, where a crash, or an edit of the catalog that failed, came between its
        publishing and the edit that replaces its inputs. `traces`: None: all.
        """
        frontier = self._retention.since()
        for trace, there in self._layers.by_trace(traces).items():
            remaining = set(live(there, frontier))
            ids = [LayerId(trace, d) for d in there if d not in remaining]
            if ids:
                self._layers.apply((), ids)
                self._safe_points.something_changed()
                self._garbage.discard(ids, is_replaced=True)


def _candidates(layers: Sequence[LayerReader]) -> list[Candidate]:
    return [Candidate(layer.info.rows, layer.id.description, bool(layer.info.key)) for layer in layers]
