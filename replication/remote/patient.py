"""A bucket for who reads: what is not answered is asked again for some seconds. A writer knows what may be said twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from nosync.lsm.platform.env import Env
from nosync.replication.remote.bucket import Bucket, ObjectInfo, UnavailableError

_ATTEMPTS, _PAUSE_S = 6, 0.2
_MOST_S, _LEAST_ATTEMPTS = 25.0, 3
"""After so many seconds, and attempts, no call is made again: a store that says nothing takes a while each time."""

T = TypeVar("T")


class PatientBucket:
    """See Bucket. What changes objects is asked once."""

    def __init__(self, bucket: Bucket, env: Env) -> None:
        self._bucket, self._env, self.url = bucket, env, bucket.url

    def get(self, name: str) -> bytes:
        """See Bucket."""
        return self._retried(lambda: self._bucket.get(name))

    def get_range(self, name: str, begin: int, end: int) -> bytes:
        """See Bucket."""
        return self._retried(lambda: self._bucket.get_range(name, begin, end))

    def get_end(self, name: str, size_bytes: int) -> bytes:
        """See Bucket."""
        return self._retried(lambda: self._bucket.get_end(name, size_bytes))

    def directories(self, prefix: str) -> list[str]:
        """See Bucket."""
        return self._retried(lambda: self._bucket.directories(prefix))

    def list(self, prefix: str) -> list[ObjectInfo]:
        """See Bucket."""
        return self._retried(lambda: self._bucket.list(prefix))

    def put_new(self, name: str, data: bytes | bytearray | memoryview) -> bool:
        """See Bucket."""
        return self._bucket.put_new(name, data)

    def delete(self, names: Sequence[str]) -> None:
        """See Bucket."""
        self._bucket.delete(names)

    def _retried(self, call: Callable[[], T]) -> T:
        end_s = self._env.monotonic_s() + _MOST_S
        for attempt in range(_ATTEMPTS):
            try:
                return call()
            except UnavailableError:
                is_over = self._env.monotonic_s() >= end_s and attempt + 1 >= _LEAST_ATTEMPTS
                if attempt + 1 == _ATTEMPTS or is_over:
                    raise
                self._env.wait_s(_PAUSE_S * 2**attempt)
        raise AssertionError("the last attempt returns or raises")
