"""A large layer of which only the parts are here that somebody needed: its ends at first, then a block at a time.

Its reader compares ends and blocks with digests, so nothing is compared here. A range that is needed twice is fetched
once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from nosync.lsm.layers.format import HEAD_BYTES, opened_from
from nosync.lsm.platform.env import storage_errors
from nosync.replication.remote.fetch import Fetcher
from nosync.replication.remote.names import part_name
from nosync.replication.remote.pack import Placed

_END_BYTES = 64 << 10


class PartialFile:
    """A large layer, of which the parts are here that somebody needed. The file has no name any more: it goes with us."""

    def __init__(self, placed: Placed, fetcher: Fetcher, path: Path) -> None:
        self.placed, self._fetcher = placed, fetcher
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.unlink(path)
        os.ftruncate(self._fd, placed.version.size_bytes)
        self._lock = threading.Lock()
        self._here: list[tuple[int, int]] = []
        self._buffer: pa.Buffer | None = None

    def buffer(self) -> pa.Buffer:
        """Returns the whole file, mapped, of which the ends are there."""
        if self._buffer is None:
            size = self.placed.version.size_bytes
            begin = max(0, size - _END_BYTES)
            self.have(0, min(size, HEAD_BYTES + 8))
            self.have(begin, size)
            while (needed := opened_from(os.pread(self._fd, size - begin, begin), size)) < begin:
                begin = needed
                self.have(begin, size)
            self.have(max(0, needed), size)
            with pa.memory_map(f"/proc/self/fd/{self._fd}") as file:
                self._buffer = file.read_buffer()
        return self._buffer

    def have(self, begin: int, end: int) -> None:
        """Fetches what is missing of a range, by ranges of the parts that it lies in."""
        with self._lock:
            self._fetch(begin, end)

    def _fetch(self, begin: int, end: int) -> None:
        for gap_begin, gap_end in self._missing(begin, end):
            part_bytes = self.placed.place.part_bytes
            for part in range(gap_begin // part_bytes, -(-gap_end // part_bytes)):
                low, high = max(gap_begin, part * part_bytes), min(gap_end, (part + 1) * part_bytes)
                name = part_name(self.placed.place.object, part)
                data = self._fetcher.range(name, low - part * part_bytes, high - part * part_bytes)
                with storage_errors("keep a part of", Path(name)):
                    os.pwrite(self._fd, data, low)
        self._here = _joined([*self._here, (begin, end)])

    def _missing(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        for low, high in self._here:
            if low > begin:
                yield begin, min(low, end)
            begin = max(begin, high)
            if begin >= end:
                return
        yield begin, end

    def __del__(self) -> None:
        os.close(self._fd)


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found
