"""The checkpoints that a daemon watches: one that cannot be watched is told and tried again, and holds up nothing else."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from nosync.checkpoints.api import Watch, watch
from nosync.lsm.errors import NosyncError

log = logging.getLogger("nosync")

LOOK_EVERY_S = 1.0
AGAIN_AFTER_LOOKS = 10


class Watches:
    """Watches checkpoints in threads, until `close`."""

    def __init__(self, data: Path, paths: Mapping[str, str], problems: MutableMapping[str, str]) -> None:
        """`paths`: of the checkpoints, by name. `problems`: where the node tells what is wrong, by what it is about."""
        self._data, self._paths, self._problems = data, paths, problems
        self._watched: dict[str, Watch] = {}
        self._stopped = threading.Event()
        self._begin_missing()
        self._thread = threading.Thread(target=self._run, name="nosync-checkpoints", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Takes in what is there yet, and ends. What cannot be taken in is logged: the others are."""
        self._stopped.set()
        self._thread.join()
        for name, one in self._watched.items():
            try:
                one.close()
            except NosyncError as error:
                log.error("checkpoint %s: %s", name, error)

    def _run(self) -> None:
        looks = 0
        while not self._stopped.wait(LOOK_EVERY_S):
            looks += 1
            if looks % AGAIN_AFTER_LOOKS == 0:
                self._begin_missing()
            for name, one in self._watched.items():
                self._tell(name, one.problem)

    def _begin_missing(self) -> None:
        for name, path in self._paths.items():
            if name in self._watched:
                continue
            try:
                self._watched[name] = watch(path, self._data, name=name)
                self._tell(name, None)
            except Exception as error:  # the others are watched whatever is wrong with one
                if self._tell(name, f"it is not watched, which is tried again: {error}"):
                    is_ours = not isinstance(error, NosyncError)
                    log.error("checkpoint %s is not watched, which is tried again: %s", name, error, exc_info=is_ours)

    def _tell(self, name: str, problem: str | None) -> bool:
        """Returns whether it is another problem than before."""
        before = self._problems.get(f"checkpoint {name}")
        if problem is None:
            self._problems.pop(f"checkpoint {name}", None)
        else:
            self._problems[f"checkpoint {name}"] = problem
        return problem != before
