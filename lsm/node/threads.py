"""The threads of a node: one makes durable what was published and looks after the directory, one merges, one makes
files ahead.

None ever ends by an error: it is logged, kept in `problems` under the name of what failed, and tried again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, MutableMapping, Sequence

from nosync.lsm.errors import NosyncError, described
from nosync.lsm.platform.env import Env
from nosync.lsm.settings import StoreSettings

log = logging.getLogger("nosync")

_RETRY_MERGES_S = 60.0

Step = Callable[[], object]


class NodeThreads:
    """`looking`: what is done every `scan_interval_s`; `making_durable`: whenever something was published;
    `merge_once`: until there is nothing to merge; `make_ahead`: whenever something was published, for what is published
    next; `idle_at_most_s`: how long nothing needs to be done, given how long nothing is due.
    """

    def __init__(
        self,
        env: Env,
        settings: StoreSettings,
        problems: MutableMapping[str, str],
        *,
        looking: Sequence[Step],
        making_durable: Sequence[Step],
        merge_once: Callable[[], bool],
        make_ahead: Step,
        idle_at_most_s: Callable[[float], float],
    ) -> None:
        self._env, self._settings, self._problems = env, settings, problems
        self._looking, self._making_durable = looking, making_durable
        self._merge_once, self._make_ahead, self._idle_at_most_s = merge_once, make_ahead, idle_at_most_s
        self._wake, self._wake_merger, self._closing = threading.Event(), threading.Event(), threading.Event()
        self._published = threading.Event()
        self._threads = [
            threading.Thread(target=self._guard, args=(work,), name=f"nosync-{name}", daemon=True)
            for name, work in (
                ("durability", self._durability_loop),
                ("merge", self._merge_loop),
                ("ahead", self._ahead_loop),
            )
            if settings.background and (name != "merge" or settings.merge)
        ]

    def start(self) -> None:
        """Begins; where settings say `background=False` nothing runs, and callers take the steps."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends the threads and waits for them."""
        self._closing.set()
        self._wake.set()
        self._wake_merger.set()
        self._published.set()
        for thread in self._threads:
            thread.join()

    def is_closing(self) -> bool:
        return self._closing.is_set()

    def wake(self) -> None:
        """Something was published."""
        self._wake.set()
        self._published.set()

    def wake_merger(self) -> None:
        """There may be something to merge."""
        self._wake_merger.set()

    def _guard(self, work: Callable[[], None]) -> None:
        while not self._closing.is_set():
            try:
                work()
            except Exception as error:  # without this thread nothing more would become durable
                problem = described(error)
                log.error(
                    "%s: %s", threading.current_thread().name, problem, exc_info=not isinstance(error, NosyncError)
                )
                self._problems[threading.current_thread().name] = problem
                self._closing.wait(self._settings.retry_s)

    def _attempt(self, steps: Sequence[Step]) -> bool:
        """Takes each of these steps, whatever becomes of the others: what cannot be removed keeps nothing from being
        durable.
        """
        failed = False
        for step in steps:
            at = f"{threading.current_thread().name}: {step.__name__.strip('_').replace('_', ' ')}"
            try:
                step()
            except Exception as error:
                failed = True
                problem = described(error)
                if self._problems.get(at) != problem:
                    log.error("%s: %s", at, problem, exc_info=not isinstance(error, NosyncError))
                self._problems[at] = problem
            else:
                self._problems.pop(at, None)
        return not failed

    def _durability_loop(self) -> None:
        next_look = self._env.monotonic_s()
        while not self._closing.is_set():
            is_well = True
            if self._env.monotonic_s() >= next_look:
                is_well = self._attempt(self._looking)
                next_look = self._env.monotonic_s() + self._settings.scan_interval_s
            is_well = self._attempt(self._making_durable) and is_well
            if not is_well:
                next_look = min(next_look, self._env.monotonic_s() + self._settings.retry_s)
            self._wake.wait(max(0.0, self._idle_at_most_s(next_look - self._env.monotonic_s())))
            self._wake.clear()

    def _merge_loop(self) -> None:
        while not self._closing.is_set():
            self._wake_merger.clear()
            if not self._merge_once():
                self._problems.pop(threading.current_thread().name, None)
                self._wake_merger.wait(_RETRY_MERGES_S)

    def _ahead_loop(self) -> None:
        is_well = True
        while not self._closing.is_set():
            self._published.wait(None if is_well else self._settings.retry_s)
            self._published.clear()
            if not self._closing.is_set():
                is_well = self._attempt([self._make_ahead])
