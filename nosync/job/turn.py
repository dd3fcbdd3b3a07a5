"""One call of a job at a time, whose errors name the views that a stage is a part of."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import TracebackType

from nosync.flow.views import View
from nosync.lsm.errors import StageError


class Turn:
    """A lock that one thread may take several times. It is given only while what works for the job can work.

    A stage that a view is made of has a name that its author never saw, so a StageError that leaves says whose it is.
    """

    def __init__(self, views: Callable[[], Mapping[str, View]], check: Callable[[], None]) -> None:
        """`check`: raises FlowError where nothing can work."""
        self._lock, self._views, self.check = threading.RLock(), views, check

    def __enter__(self) -> None:
        self.check()
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()
        if not isinstance(error, StageError):
            return
        names = [
            view.name for view in self._views().values() if error.stage in view.stages and error.stage != view.name
        ]
        whose = f"view {', '.join(names)}: "
        if names and not str(error).startswith(whose):  # else an inner call said it
            raise StageError(f"{whose}{error}", stage=error.stage, shard=error.shard, t=error.t) from error
