"""An object store in memory that misbehaves as real ones do: it does not answer, or answers late, and lists what was.

What it keeps is what `nosync.replication.remote.bucket` requires: puts are atomic, and a `get` sees the last one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from nosync.lsm.errors import CorruptionError, RemoteError
from nosync.replication.remote.bucket import MissingObjectError, ObjectInfo, UnavailableError

MOST_LAG_S = 30.0
"""So long a listing is behind at most, which is far less than the grace after which objects are deleted."""
Fault = Literal["", "before", "after"]
"""What becomes of a call: it succeeds, it fails without an effect, or it has its effect and is not answered."""


def no_fault(call: str, name: str) -> Fault:
    """Every call succeeds."""
    return ""


@dataclass
class Objects:
    """What is in one bucket, for all who use it."""

    by_name: dict[str, bytes] = field(default_factory=dict)
    now_s: Callable[[], float] = lambda: 0.0
    past: deque[tuple[float, frozenset[str]]] = field(default_factory=lambda: deque([(0.0, frozenset())], maxlen=64))
    """When each of the last changes was, and which names there were before it."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    calls: dict[str, int] = field(default_factory=dict)
    """How often each method was called."""
    put_bytes: int = 0

    def changing(self) -> None:
        """The names are about to change."""
        self.past.append((self.now_s(), frozenset(self.by_name)))

    def listed(self, changes_behind: int) -> frozenset[str]:
        """Returns the names as they were before so many changes, none of which was longer than `MOST_LAG_S` ago."""
        with self.lock:
            since_s = self.now_s() - MOST_LAG_S
            recent = [names for when_s, names in self.past if when_s >= since_s]
            behind = min(changes_behind, len(recent))
            return recent[-behind] if behind else frozenset(self.by_name)


class SimulatedBucket:
    """See Bucket. `fault` says of each call what becomes of it; `list_lag` how many changes listings are behind."""

    def __init__(
        self,
        objects: Objects | None = None,
        fault: Callable[[str, str], Fault] = no_fault,
        *,
        list_lag: Callable[[], int] = lambda: 0,
        ignores_conditions: bool = False,
        forbidden: Sequence[str] = (),
    ) -> None:
        """`forbidden`: methods for which the permission is missing."""
        self.url, self.objects, self._fault, self._list_lag = (
            "memory://simulated",
            objects or Objects(),
            fault,
            list_lag,
        )
        self._ignores_conditions, self._forbidden = ignores_conditions, forbidden

    def _begin(self, call: str, name: str) -> Fault:
        self.objects.calls[call] = self.objects.calls.get(call, 0) + 1
        if call in self._forbidden:
            raise RemoteError(f"{self.url}: cannot {call} {name}: the permission to {call} is missing")
        fault = self._fault(call, name)
        if fault == "before":
            raise UnavailableError(f"{self.url}: cannot {call} {name}: the store answers 503")
        return fault

    def _end(self, fault: Fault, call: str, name: str) -> None:
        if fault == "after":
            raise UnavailableError(f"{self.url}: cannot {call} {name}: timed out")

    def put_new(self, name: str, data: bytes | bytearray | memoryview) -> bool:
        """See Bucket."""
        with self.objects.lock:
            fault = self._begin("put", name)
            is_new = name not in self.objects.by_name
            if is_new or self._ignores_conditions:
                self.objects.changing()
                self.objects.by_name[name] = bytes(data)
                self.objects.put_bytes += len(data)
            self._end(fault, "put", name)
            return is_new or self._ignores_conditions

    def get(self, name: str) -> bytes:
        """See Bucket."""
        with self.objects.lock:
            fault = self._begin("get", name)
            found = self.objects.by_name.get(name)
            self._end(fault, "get", name)
        if found is None:
            raise MissingObjectError(f"{self.url}: cannot get {name}: it is not there")
        return found

    def get_range(self, name: str, begin: int, end: int) -> bytes:
        """See Bucket."""
        found = self.get(name)[begin:end]
        if len(found) != end - begin:
            raise CorruptionError(f"{self.url}: {name} has no bytes {begin} to {end}")
        return found

    def get_end(self, name: str, size_bytes: int) -> bytes:
        """See Bucket."""
        return self.get(name)[-size_bytes:]

    def directories(self, prefix: str) -> list[str]:
        """See Bucket."""
        names = [one.name.removeprefix(prefix) for one in self.list(prefix)]
        return sorted({name.partition("/")[0] for name in names if "/" in name})

    def list(self, prefix: str) -> list[ObjectInfo]:
        """See Bucket. Names that were deleted since what is listed are listed with their old names, of size 0."""
        with self.objects.lock:
            fault = self._begin("list", prefix)
            names = self.objects.listed(self._list_lag())
            found = [
                ObjectInfo(name, len(self.objects.by_name.get(name, b""))) for name in names if name.startswith(prefix)
            ]
            self._end(fault, "list", prefix)
        return sorted(found)

    def delete(self, names: Sequence[str]) -> None:
        """See Bucket."""
        with self.objects.lock:
            for name in names:
                fault = self._begin("delete", name)
                self.objects.changing()
                self.objects.by_name.pop(name, None)
                self._end(fault, "delete", name)
