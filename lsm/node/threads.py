"""The threads of a node: one makes durable what was published and looks after the directory, one merges, one makes
files ahead, one looks after the files of kept checkpoints where there are peers.

None ever ends by an error: it is logged, kept in `problems` under the name of what failed, and tried again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass

from nosync.lsm.errors import NosyncError, described
from nosync.lsm.platform.env import Env
from nosync.lsm.settings import StoreSettings

log = logging.getLogger("nosync")

_RETRY_MERGES_S = 60.0

Step = Callable[[], object]


@dataclass(frozen=True)
class Steps:
    """Is what the threads do."""

    looking: Sequence[Step]
    """Taken every `scan_interval_s`."""
    making_durable: Sequence[Step]
    """Taken whenever something was published."""
    merge_once: Callable[[], bool]
    """Taken until there is nothing to merge."""
    merges_idle_at_most_s: Callable[[float], float]
    """Says how long there is nothing to merge, as far as is known."""
    make_ahead: Step
    """Taken whenever something was published or made durable, for what is published next."""
    idle_at_most_s: Callable[[float], float]
    """Says how long nothing needs to be done, given how long nothing is due."""
    opaque: Step | None
    """Taken whenever a file of a checkpoint appeared, and every `scan_interval_s`; None where nobody is told of them."""


class NodeThreads:
    """The threads of one node. What was published before they begin is found when they do."""

    def __init__(self, env: Env, settings: StoreSettings, problems: MutableMapping[str, str]) -> None:
        self._env, self._settings, self._problems = env, settings, problems
        self._wake, self._wake_merger, self._closing = threading.Event(), threading.Event(), threading.Event()
        self._published, self._opaque_came = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []
        self._others: list[Step] = []

    def end_too(self, stop: Step) -> None:
        """Has a thread of somebody else's, which works for the node, end before its own."""
        self._others.append(stop)

    def start(self, steps: Steps) -> None:
        """Begins; where settings say `background=False` nothing runs, and callers take the steps."""
        loops: dict[str, Callable[[Steps], None]] = {
            "durability": self._durability_loop,
            "merge": self._merge_loop,
            "ahead": self._ahead_loop,
        }
        if steps.opaque is not None:
            loops["opaque"] = self._opaque_loop
        self._threads = [
            threading.Thread(target=self._guard, args=(loop, steps), name=f"nosync-{name}", daemon=True)
            for name, loop in loops.items()
            if self._settings.background and (name != "merge" or self._settings.merge)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends the threads and waits for them."""
        for stop in self._others:
            stop()
        self._closing.set()
        self._wake.set()
        self._wake_merger.set()
        self._published.set()
        self._opaque_came.set()
        for thread in self._threads:
            thread.join()

    def is_closing(self) -> bool:
        """Returns whether the threads are to end."""
        return self._closing.is_set()

    def wake(self) -> None:
        """Something was published."""
        self._wake.set()
        self._published.set()

    def wake_opaque(self) -> None:
        """A file of a kept checkpoint appeared."""
        self._opaque_came.set()

    def wake_merger(self) -> None:
        """There may be something to merge."""
        self._wake_merger.set()

    def _guard(self, loop: Callable[[Steps], None], steps: Steps) -> None:
        while not self._closing.is_set():
            try:
                loop(steps)
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

    def _durability_loop(self, steps: Steps) -> None:
        next_look = self._env.monotonic_s()
        while not self._closing.is_set():
            is_well = True
            if self._env.monotonic_s() >= next_look:
                is_well = self._attempt(steps.looking)
                next_look = self._env.monotonic_s() + self._settings.scan_interval_s
            is_well = self._attempt(steps.making_durable) and is_well
            self._published.set()  # these steps publish, too, and take files that were ready
            if not is_well:
                next_look = min(next_look, self._env.monotonic_s() + self._settings.retry_s)
            self._wake.wait(max(0.0, steps.idle_at_most_s(next_look - self._env.monotonic_s())))
            self._wake.clear()

    def _merge_loop(self, steps: Steps) -> None:
        while not self._closing.is_set():
            self._wake_merger.clear()
            if not steps.merge_once():
                self._problems.pop(threading.current_thread().name, None)
                self._wake_merger.wait(steps.merges_idle_at_most_s(_RETRY_MERGES_S))

    def _ahead_loop(self, steps: Steps) -> None:
        is_well = True
        while not self._closing.is_set():
            self._published.wait(None if is_well else self._settings.retry_s)
            self._published.clear()
            if not self._closing.is_set():
                is_well = self._attempt([steps.make_ahead])

    def _opaque_loop(self, steps: Steps) -> None:
        assert steps.opaque is not None, "else this thread is not begun"
        while not self._closing.is_set():
            self._opaque_came.clear()
            is_well = self._attempt([steps.opaque])
            self._opaque_came.wait(self._settings.scan_interval_s if is_well else self._settings.retry_s)
