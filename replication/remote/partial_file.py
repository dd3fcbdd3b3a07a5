"""A large layer of which only the parts are here that somebody needed: its ends at first, then a block at a time.

Its reader compares ends and blocks with digests, so nothing is compared here. A range that is needed twice is fetched
once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa

from nosync.lsm.layers.format import HEAD_BYTES, opened_from
from nosync.lsm.platform.env import opened_regular, storage_errors
from nosync.replication.remote.bucket import MissingObjectError
from nosync.replication.remote.fetch import THREADS, Fetcher
from nosync.replication.remote.names import part_name
from nosync.replication.remote.pack import Placed

_END_BYTES = 64 << 10


class PartialFile:
    """A large layer, of which the parts are here that somebody needed. The file has no name any more: it goes with us."""

    _fd = -1

    def __init__(
        self,
        placed: Placed,
        fetcher: Fetcher,
        path: Path,
        whole: Path | None = None,
        moved: Callable[[MissingObjectError], Placed | None] = lambda error: None,
    ) -> None:
        """`path`: a name for a moment. `whole`: where the whole file may come to be. `moved`: says where the bytes are
        whose object is gone; None: nowhere.
        """
        self.placed, self._fetcher, self._whole, self._moved = placed, fetcher, whole, moved
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
            self.have([(0, min(size, HEAD_BYTES + 8)), (begin, size)])
            while (needed := opened_from(os.pread(self._fd, size - begin, begin), size)) < begin:
                begin = needed
                self.have([(begin, size)])
            self.have([(max(0, needed), size)])
            with pa.memory_map(f"/proc/self/fd/{self._fd}") as file:
                self._buffer = file.read_buffer()
        return self._buffer

    def have(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Fetches what is missing of ranges: of the file where all of it came meanwhile, else by ranges of the parts that
        they lie in, several at once.
        """
        with self._lock:
            self._fetch([gap for one in ranges for gap in self._missing(*one) if not self._copy(*gap)])
            self._here = _joined([*self._here, *ranges])

    def _copy(self, begin: int, end: int) -> bool:
        """Takes a range of the whole file. False: it is not here."""
        if self._whole is None:
            return False
        try:
            with opened_regular(self._whole, os.O_RDONLY) as (fd, found):
                if found.st_size != self.placed.version.size_bytes:
                    return False  # torn by a power cut
                self._write(os.pread(fd, end - begin, begin), begin)
        except OSError:
            return False
        return True

    def _fetch(self, gaps: Sequence[tuple[int, int]]) -> None:
        try:
            self._fetch_at_once(gaps)
        except MissingObjectError as error:
            moved = self._moved(error)
            if moved is None or moved.version != self.placed.version:
                if all(self._copy(*gap) for gap in gaps):
                    return
                raise
            self.placed = moved
            self._fetch_at_once(gaps)

    def _fetch_at_once(self, gaps: Sequence[tuple[int, int]]) -> None:
        if len(gaps) < 2:  # without threads
            for gap in gaps:
                self._fetch_parts(*gap)
            return
        with ThreadPoolExecutor(min(THREADS, len(gaps)), thread_name_prefix="nosync-fetch") as pool:
            for _ in pool.map(lambda gap: self._fetch_parts(*gap), gaps):
                pass

    def _fetch_parts(self, begin: int, end: int) -> None:
        part_bytes = self.placed.place.part_bytes
        if not part_bytes:  # it is in a pack by now
            place = self.placed.place
            self._write(self._fetcher.range(place.object, place.offset + begin, place.offset + end), begin)
            return
        for part in range(begin // part_bytes, -(-end // part_bytes)):
            low, high = max(begin, part * part_bytes), min(end, (part + 1) * part_bytes)
            name = part_name(self.placed.place.object, part)
            self._write(self._fetcher.range(name, low - part * part_bytes, high - part * part_bytes), low)

    def _write(self, data: bytes, at: int) -> None:
        with storage_errors("keep a part of", Path(self.placed.version.name)):
            rest = memoryview(data)
            while rest:  # a disk that is nearly full takes a part, and refuses the next one
                written = os.pwrite(self._fd, rest, at)
                rest, at = rest[written:], at + written

    def _missing(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        for low, high in self._here:
            if low > begin:
                yield begin, min(low, end)
            begin = max(begin, high)
            if begin >= end:
                return
        yield begin, end

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found
