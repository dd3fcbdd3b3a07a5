"""The traces in which there may be something to merge: a trace is looked at again only when something of it changed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, MutableMapping

from nosync.lsm.errors import NosyncError, described
from nosync.lsm.model.layer import TraceId
from nosync.lsm.node.durable_layers import DurableLayers
from nosync.lsm.platform.env import Env

log = logging.getLogger("nosync")

RETRY_S = 30.0
"""After which, at the latest, a trace whose merge failed is tried again. At first it is tried again sooner: its cause is
often over by then, as where a directory was away for a moment.
"""
_SOONEST_S = 0.01


class MergeQueue:
    """The queue of one node.

    `problems`: gets an entry for each trace whose merge failed. It is tried again after `retry_s`, and each time after
    twice as long as the time before, up to `RETRY_S`. `wake`: wakes who merges.
    """

    def __init__(
        self,
        layers: DurableLayers,
        env: Env,
        retry_s: float,
        problems: MutableMapping[str, str],
        wake: Callable[[], None],
    ) -> None:
        self._layers, self._env, self._problems, self._wake = layers, env, problems, wake
        self._first_retry_s = max(_SOONEST_S, retry_s)
        self._lock = threading.Lock()
        self._touched: set[TraceId] = set()
        self._queue: list[TraceId] = []  # of those the ones still to be looked at, the next one last
        self._not_before_s: dict[TraceId, float] = {}
        self._failures: dict[TraceId, int] = {}

    def changed(self, traces: Iterable[TraceId] | None = None) -> None:
        """These traces changed; None: what is sealed, or how long history is kept, did, which is about all of them."""
        self.touch(traces)
        self._wake()

    def touch(self, traces: Iterable[TraceId] | None = None) -> None:
        """Notes what `changed` notes; whoever merges looks when it looks anyway."""
        found = self._layers.traces() if traces is None else traces
        with self._lock:
            self._touched.update(found)

    def untouch(self, trace: TraceId) -> None:
        """Somebody looks at a trace now, or has to wait with it."""
        with self._lock:
            self._touched.discard(trace)

    def all_of(self, stage: str | None) -> list[TraceId]:
        """Returns every trace, changed or not; of one stage, or of all."""
        return sorted(trace for trace in self._layers.traces() if stage in (None, trace.stage))

    def due(self) -> Iterator[TraceId]:
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

    def idle_at_most_s(self, at_most_s: float) -> float:
        """Returns for how long there is nothing to look at, given for how long there is nothing else to do."""
        now_s = self._env.monotonic_s()
        with self._lock:
            due_s = [self._not_before_s.get(trace, now_s) - now_s for trace in self._touched]
        return max(self._first_retry_s, min([at_most_s, *due_s]))

    def failed(self, trace: TraceId, error: Exception) -> None:
        """A merge of this trace failed, and is tried again after a while."""
        again = self._failures.get(trace, 0)
        self._failures[trace] = again + 1
        after_s = min(RETRY_S, self._first_retry_s * 2 ** min(again, 20))
        self._not_before_s[trace] = self._env.monotonic_s() + after_s
        self.touch([trace])
        if self._problems.get(_problem_of(trace)) != described(error):
            log.error("%s: %s", _problem_of(trace), described(error), exc_info=not isinstance(error, NosyncError))
        self._problems[_problem_of(trace)] = described(error)

    def succeeded(self, trace: TraceId) -> None:
        """A merge of this trace was done, or there was none to do."""
        self._not_before_s.pop(trace, None)
        self._failures.pop(trace, None)
        self._problems.pop(_problem_of(trace), None)


def _problem_of(trace: TraceId) -> str:
    return f"merge of {trace}"
