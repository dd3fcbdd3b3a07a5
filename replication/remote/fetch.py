"""Files out of a bucket: by ranges of packs and by parts, compared with their digests before anybody has them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

import pyarrow as pa

from nosync.lsm.errors import CorruptionError
from nosync.replication.remote.bucket import Bucket
from nosync.replication.remote.files import check_digest
from nosync.replication.remote.names import part_name
from nosync.replication.remote.pack import Placed

_GAP_BYTES = 256 << 10
"""What lies between two files of a pack is fetched too where it is less: a request costs more."""
_MOST_AT_ONCE = 16 << 20
THREADS = 8
"""Requests at once."""

Take = Callable[[Placed, pa.Buffer], None]
TakeLarge = Callable[[Placed, Iterator[bytes]], None]


@dataclass(frozen=True)
class Piece:
    """Files that are fetched by one request; or one file that has objects of its own."""

    files: tuple[Placed, ...]

    @property
    def size_bytes(self) -> int:
        return sum(placed.version.size_bytes for placed in self.files)


def pieces_of(wanted: Iterable[Placed]) -> list[Piece]:
    """Returns how files are fetched with few requests: those of a pack that lie close to each other at once."""
    by_object: dict[str, list[Placed]] = {}
    found = []
    for placed in wanted:
        if placed.place.part_bytes:
            found.append(Piece((placed,)))
        else:
            by_object.setdefault(placed.place.object, []).append(placed)
    for files in by_object.values():
        files.sort(key=lambda placed: placed.place.offset)
        found += [Piece(tuple(some)) for some in _close(files)]
    return found


def _close(files: list[Placed]) -> Iterator[list[Placed]]:
    some: list[Placed] = []
    for placed in files:
        if some:
            end = some[-1].place.offset + some[-1].version.size_bytes
            total = placed.place.offset + placed.version.size_bytes - some[0].place.offset
            if placed.place.offset - end > _GAP_BYTES or total > _MOST_AT_ONCE:
                yield some
                some = []
        some.append(placed)
    if some:
        yield some


class Fetcher:
    """Fetches from one bucket. `requests` and `bytes` count what was asked for."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket, self.url = bucket, bucket.url
        self.requests, self.bytes = 0, 0

    def fetch(self, piece: Piece, take: Take, take_large: TakeLarge | None = None) -> None:
        """Has `take` called with each file of a piece, whose bytes are those that were copied. `take_large` gets the parts
        of a file that has objects of its own, and compares them itself.

        Raises CorruptionError naming the object where they are not, MissingObjectError, RemoteError.
        """
        first = piece.files[0]
        if first.place.part_bytes and take_large is not None:
            take_large(first, self.parts(first))
            return
        if first.place.part_bytes:
            data = b"".join(self.parts(first))
            self._checked(first, pa.py_buffer(data), take)
            return
        begin = first.place.offset
        end = max(placed.place.offset + placed.version.size_bytes for placed in piece.files)
        whole = pa.py_buffer(self.range(first.place.object, begin, end))
        for placed in piece.files:
            self._checked(placed, whole.slice(placed.place.offset - begin, placed.version.size_bytes), take)

    def parts(self, placed: Placed) -> Iterator[bytes]:
        """Yields the bytes of a file that has objects of its own. They were not compared with anything yet."""
        size, part_bytes = placed.version.size_bytes, placed.place.part_bytes
        for part, begin in enumerate(range(0, size, part_bytes)):
            name = part_name(placed.place.object, part)
            yield self.range(name, 0, min(part_bytes, size - begin))

    def range(self, name: str, begin: int, end: int) -> bytes:
        """Returns a range of an object."""
        self.requests += 1
        self.bytes += end - begin
        return self._bucket.get_range(name, begin, end)

    def _checked(self, placed: Placed, data: pa.Buffer, take: Take) -> None:
        where = f"{self._bucket.url}/{placed.place.object}"
        try:
            check_digest(placed.version.name, data, placed.version.digest, f"{where}: {placed.version.name}")
        except CorruptionError as error:
            raise CorruptionError(
                f"{error}. The object was damaged or changed. A store that still has the file copies it to another prefix: "
                "open it with that as a second remote"
            ) from error
        take(placed, data)


def fetch_all(
    fetcher: Fetcher,
    wanted: Iterable[Placed],
    take: Take,
    progress: Callable[[int], None] = lambda size_bytes: None,
    take_large: TakeLarge | None = None,
) -> None:
    """Fetches files, several requests at once. `progress(size_bytes)` is called after each. Raises what the first one
    raises that fails.
    """
    pieces = sorted(pieces_of(wanted), key=lambda piece: -piece.size_bytes)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="nosync-fetch") as pool:
        running = {pool.submit(fetcher.fetch, piece, take, take_large): piece for piece in pieces}
        try:
            for done in as_completed(running):
                done.result()
                progress(running[done].size_bytes)
        except BaseException:
            for one in running:
                one.cancel()
            raise
