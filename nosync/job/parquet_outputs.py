"""Where a ParquetSink puts the output of epochs: directories of this host, or objects of an object store.

An epoch appears under its name whole or not at all: a directory by a rename, an object because a PUT is atomic. The output
says itself of which timelines its epochs are: the marks are of all that the stage was ever given to, and what an output has
to withdraw after it was away may not be in them any more.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from nosync.lsm.errors import StorageError
from nosync.lsm.facts.deliveries import DeliveryLog
from nosync.lsm.model.timestamp import is_number
from nosync.lsm.platform.env import Env, storage_errors
from nosync.lsm.platform.paths import local_path
from nosync.replication.remote.bucket import Bucket, MissingObjectError, UnavailableError
from nosync.replication.remote.cloud import open_bucket
from nosync.replication.remote.patient import PatientBucket
from nosync.replication.remote.url import is_remote_url

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_ENV = Env()
_PAUSES_S = (0.2, 0.5, 1.0, 2.0, 4.0)
"""How long a PUT waits before it is said again."""
_NAME = "_nosync"
"""The name of a file with a number that only its store and stage know. Spark leaves out what begins with an underscore."""
_LINES = "_nosync_lines"
"""A directory with an empty file `<first epoch>-<timeline>` for each timeline that epochs are of, up to the next one's."""
_STAGED = ".staged-"
"""What an epoch is written to, with its number, before it has its name."""
_SPARK_SCHEMA = "org.apache.spark.sql.parquet.row.metadata"
_OF_EPOCH = "epoch="
_INSTEAD = "An object store is s3://BUCKET/PREFIX, gs:// or az://; anything else takes a CallbackSink"


@dataclass(frozen=True)
class Lines:
    """Says of which timelines the epochs of an output are."""

    begins: tuple[tuple[int, str], ...]
    """The timelines, each with its first epoch, in order."""

    @staticmethod
    def named(names: Iterable[str]) -> Lines:
        parts = [name.partition("-") for name in names]
        return Lines(tuple(sorted((int(first), line) for first, _, line in parts if is_number(first) and line)))

    def of(self, t: int) -> str | None:
        """Returns the timeline of an epoch; None: versions before this one wrote it."""
        return next((line for first, line in reversed(self.begins) if first <= t), None)

    def left_after(self, epochs: Iterable[int], marks: DeliveryLog) -> int | None:
        """Returns the epoch after which those that are there are not the job's; None: all are."""
        lines = ((t, self.of(t)) for t in sorted(epochs))
        return next((t - 1 for t, line in lines if line is not None and not marks.is_of(line, t)), None)

    def with_line(self, t: int, line: str) -> Lines:
        before = tuple(one for one in self.begins if one[0] < t)
        return Lines(before if before and before[-1][1] == line else (*before, (t, line)))

    def names(self) -> set[str]:
        return {f"{first}-{line}" for first, line in self.begins}


class ParquetOutput(Protocol):
    """The output of one sink."""

    @property
    def place(self) -> str | Path:
        """Returns its directory, absolute, or its URL."""

    def number(self) -> str | None:
        """Returns the number of the output; None: it has none yet."""

    def begin(self, number: str) -> None:
        """Gives the output its number. Durable when this returns."""

    def lines(self) -> Lines:
        """Returns of which timelines the epochs are."""

    def note_line(self, t: int, line: str) -> None:
        """Says that the epochs from `t` on are of a timeline, and that there are none after them of others. Durable when this
        returns.
        """

    def has(self, t: int) -> bool:
        """Returns whether epoch `t` is there."""

    def epochs(self) -> list[int]:
        """Returns the epochs that are there."""

    def look_again(self) -> None:
        """Lets `epochs` look at what is there, whatever it knows."""

    def write(self, changes: DataFrame, t: int, before_it_is_there: Callable[[], None]) -> None:
        """Lets epoch `t` be there. `before_it_is_there`: is called when its rows are known."""

    def remove(self, t: int) -> None:
        """Removes an epoch."""


def output_at(path: str | Path) -> ParquetOutput:
    """Returns the output at a path or a URL. Raises InvalidInputError for what is neither, RemoteError without the extra."""
    if is_remote_url(path) and not str(path).lower().startswith("file:"):
        return BucketOutput(str(path))
    return DirectoryOutput(local_path(path, "the output of a ParquetSink", _INSTEAD))


class DirectoryOutput:
    """See ParquetOutput: a directory `epoch=<t>` for each epoch, which Spark writes."""

    def __init__(self, root: Path) -> None:
        self.place = self._root = root

    def number(self) -> str | None:
        path = self._root / _NAME
        with storage_errors("read", path):
            return _number(path.read_bytes() if path.exists() else b"")

    def begin(self, number: str) -> None:
        path = self._root / _NAME
        with storage_errors("write", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            begun = path.with_name(f".{_NAME}-{number}")
            begun.write_text(f"{number}\n")
            _ENV.sync_file(begun)
            begun.replace(path)
            _ENV.sync_dir(path.parent)

    def lines(self) -> Lines:
        directory = self._root / _LINES
        with storage_errors("list", directory):
            return Lines.named(path.name for path in directory.glob("*"))

    def note_line(self, t: int, line: str) -> None:
        directory, before = self._root / _LINES, self.lines()
        if (now := before.with_line(t, line)) == before:
            return
        with storage_errors("write", directory):
            directory.mkdir(parents=True, exist_ok=True)
            for name in before.names() - now.names():
                (directory / name).unlink()
            for name in now.names() - before.names():
                (directory / name).touch()
            _ENV.sync_dir(directory)
            _ENV.sync_dir(self._root)

    def has(self, t: int) -> bool:
        return self._of(t).exists()

    def epochs(self) -> list[int]:
        return _epochs([path.name for path in self._root.glob(f"{_OF_EPOCH}*")])

    def look_again(self) -> None:
        """See ParquetOutput: it always does."""

    def write(self, changes: DataFrame, t: int, before_it_is_there: Callable[[], None]) -> None:
        # A name of its own: a driver that was replaced may still write the same epoch.
        target, staged = self._of(t), self._root / f"{_STAGED}{t}-{_ENV.token()}"
        with storage_errors("write the output", target):
            self._remove_staged(t)
            try:
                changes.write.parquet(str(staged))
                _sync(staged)  # what is there under its final name is never written again
                before_it_is_there()
                try:
                    staged.rename(target)
                except OSError as error:
                    if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                        raise  # else another driver was quicker: it is the same epoch
                _ENV.sync_dir(target.parent)
            finally:
                shutil.rmtree(staged, ignore_errors=True)

    def _remove_staged(self, t: int) -> None:
        """Removes what attempts at earlier epochs left that died."""
        for path in self._root.glob(f"{_STAGED}*"):
            number = path.name.removeprefix(_STAGED).partition("-")[0]
            if is_number(number) and int(number) < t:
                shutil.rmtree(path, ignore_errors=True)

    def remove(self, t: int) -> None:
        with storage_errors("withdraw the output", self._of(t)):
            shutil.rmtree(self._of(t))

    def _of(self, t: int) -> Path:
        return self._root / f"{_OF_EPOCH}{t}"


class BucketOutput:
    """See ParquetOutput: an object `epoch=<t>/part-00000.parquet` for each epoch, which the driver writes."""

    def __init__(self, url: str) -> None:
        self.place = url
        self._bucket: Bucket = PatientBucket(open_bucket(url), _ENV)
        self._known: set[int] | None = None
        """The epochs that are there. To list them takes a request for every thousand, and each epoch asks for them."""
        self._lines: Lines | None = None

    def number(self) -> str | None:
        try:
            return _number(self._bucket.get(_NAME))
        except MissingObjectError:
            return None

    def begin(self, number: str) -> None:
        self._bucket.put_new(_NAME, f"{number}\n".encode())

    def lines(self) -> Lines:
        if self._lines is None:
            found = self._bucket.list(f"{_LINES}/")
            self._lines = Lines.named(one.name.removeprefix(f"{_LINES}/") for one in found)
        return self._lines

    def note_line(self, t: int, line: str) -> None:
        before = self.lines()
        if (now := before.with_line(t, line)) == before:
            return
        self._lines = None
        self._bucket.delete([f"{_LINES}/{name}" for name in before.names() - now.names()])
        for name in now.names() - before.names():
            put(self._bucket, f"{_LINES}/{name}", b"")
        self._lines = now

    def has(self, t: int) -> bool:
        return bool(self._bucket.list(f"{_OF_EPOCH}{t}/"))

    def epochs(self) -> list[int]:
        if self._known is None:
            self._known = set(_epochs(self._bucket.directories("")))
        return sorted(self._known)

    def write(self, changes: DataFrame, t: int, before_it_is_there: Callable[[], None]) -> None:
        found = pa.BufferOutputStream()
        # So Spark reads the types that it wrote: an interval is a number in Parquet.
        rows = changes.toArrow().replace_schema_metadata({_SPARK_SCHEMA: changes.schema.json()})
        pq.write_table(rows, found)
        before_it_is_there()
        known, self._known = self._known, None  # a call that fails may have put it all the same
        data = found.getvalue().to_pybytes()
        put(self._bucket, self._of(t), data)
        self._known = None if known is None else {*known, t}

    def look_again(self) -> None:
        self._known = self._lines = None

    def remove(self, t: int) -> None:
        self._bucket.delete([one.name for one in self._bucket.list(f"{_OF_EPOCH}{t}/")])
        self._known = None

    def _of(self, t: int) -> str:
        return f"{_OF_EPOCH}{t}/part-00000.parquet"


def put(bucket: Bucket, name: str, data: bytes) -> None:
    """Puts an object, and asks again for some seconds where the store is busy. Raises StorageError where another one has
    its name, RemoteError.
    """
    for pause_s in (*_PAUSES_S, None):
        try:
            is_new = bucket.put_new(name, data)
        except UnavailableError:
            if pause_s is None:
                raise
            _ENV.wait_s(pause_s)
            continue
        if not is_new and bucket.get(name) != data:
            raise StorageError(
                f"{bucket.url}: {name} is there with other bytes: another job writes into this output. Stop it, and make the "
                "job again"
            )
        return


def _number(data: bytes) -> str | None:
    found = data.decode(errors="replace").strip()
    return found if found.isdecimal() else None  # anything else is left of a write that was cut off


def _epochs(names: list[str]) -> list[int]:
    numbers = [name.removeprefix(_OF_EPOCH) for name in names if name.startswith(_OF_EPOCH)]
    return [int(number) for number in numbers if number.isdecimal()]


def _sync(directory: Path) -> None:
    for path in directory.iterdir():
        if path.is_file():
            _ENV.sync_file(path)
    _ENV.sync_dir(directory)
