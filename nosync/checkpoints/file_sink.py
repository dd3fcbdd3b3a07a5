"""The output of a file sink as of a batch, as another directory: files as hard links, and the log by which Spark reads.

A file sink lists what each batch wrote in `_spark_metadata/<batch>`, and from time to time all so far in
`<batch>.compact`. Spark reads an output by this log, and refuses one whose log does not begin with batch 0. So a query
that goes on from an earlier batch needs an output whose log ends with that batch: this makes it, and leaves the old one
as it is.

(The log: org.apache.spark.sql.execution.streaming.FileStreamSinkLog.)
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from nosync.checkpoints.names import Batch
from nosync.checkpoints.restore import new_directory
from nosync.lsm.errors import InvalidInputError, NotAvailableError
from nosync.lsm.model.timestamp import is_number
from nosync.lsm.platform.env import Env, storage_errors
from nosync.lsm.platform.json_file import read_if_there
from nosync.lsm.platform.parsing import parsed

SINK_LOG = "_spark_metadata"
_COMPACT = ".compact"
_AS_JAVA = "/=:@!$&'()*+,;~"
"""What Java leaves as it is in the path of a URI."""


@contextmanager
def output_at(output: Path, target: Path, t: Batch, env: Env) -> Iterator[int]:
    """Makes `target`, which has what the file sink in `output` had after batch `t`. Gives how many files that are.

    It is there at the end of the `with`, and not where that fails. Raises InvalidInputError where `output` is none of a
    file sink or `target` has something in it, NotAvailableError where the log was compacted beyond the batch, StorageError
    where files cannot be linked.
    """
    output = Path(os.path.normpath(output.absolute()))  # as Spark says it in the log
    if not (output / SINK_LOG).is_dir():
        raise InvalidInputError(f"{output} is not the output of a file sink: it has no {SINK_LOG}")
    with new_directory(target, env) as making:
        with storage_errors("make", target):
            env.make_dirs(making / SINK_LOG)
        yield sum(_entry_at(name, output, target, making, env) for name in _entries(output / SINK_LOG, t, env))


def _entry_at(name: str, output: Path, target: Path, making: Path, env: Env) -> int:
    """Makes an entry of the log and the files that it lists in `making`, which will be `target`. Returns how many files."""
    lines = read_if_there(output / SINK_LOG / name, env).decode().split("\n")
    with parsed("an entry of a file sink's log", str(output / SINK_LOG / name)):
        files = [_File.of(line) for line in lines[1:] if line]
    within = [file.within(output) for file in files]
    linked = sum(_link(output / path, making / path, env) for path in within)
    moved = [file.moved_to(target.absolute() / path) for file, path in zip(files, within, strict=True)]
    with storage_errors("write", making / SINK_LOG / name), env.create(making / SINK_LOG / name) as log:
        log.write("\n".join([lines[0], *moved]).encode())
    return linked


def _entries(log: Path, t: Batch, env: Env) -> list[str]:
    """Returns the names of the entries that stand for all batches up to `t`."""
    with storage_errors("list", log):
        names = set(env.list_dir(log))
    numbers = [name.removesuffix(_COMPACT) for name in names if name.endswith(_COMPACT)]
    compacted = sorted(int(number) for number in numbers if is_number(number))
    begin = max((n for n in compacted if n <= t), default=None)
    found = [] if begin is None else [f"{begin}{_COMPACT}"]
    for n in range(0 if begin is None else begin + 1, t + 1):
        if str(n) not in names:
            later = next((c for c in compacted if c > t), None)
            why = "batch {n} wrote nothing there" if later is None else f"it was compacted up to batch {later}"
            raise NotAvailableError(
                f"{log} does not say any more what was there after batch {t}: {why.format(n=n)}"
                + ("" if later is None else f". Go on from batch {later} or a later one")
            )
        found.append(str(n))
    return found


@dataclass(frozen=True)
class _File:
    """A file that the log lists."""

    said: dict[str, Any]
    before: str
    """What stands before its path: a scheme, and slashes."""
    path: Path

    @classmethod
    def of(cls, line: str) -> _File:
        """Reads a line of the log. Raises ValueError for one that names no file of this host."""
        said = json.loads(line)
        scheme, colon, rest = str(said["path"]).partition(":")
        if not colon or "/" in scheme:  # a path may have colons, too
            scheme, rest = "", str(said["path"])
        if scheme not in ("", "file"):
            raise ValueError(f"{said['path']} is not on a file system of this host")
        path = rest.lstrip("/")
        slashes = rest[: len(rest) - len(path) - 1]
        return cls(said, f"{scheme}:{slashes}" if scheme else slashes, Path(os.path.normpath("/" + unquote(path))))

    def within(self, output: Path) -> Path:
        """Returns the path in the output. Raises InvalidInputError for a file that is elsewhere."""
        if self.path.is_relative_to(output):
            return self.path.relative_to(output)
        path, root = self.path.resolve(), output.resolve()  # whichever link the one and the other went by
        if path.is_relative_to(root):
            return path.relative_to(root)
        raise InvalidInputError(
            f"the log of {output} lists {self.path}, which is not in it: give the path that the query writes to. An output that "
            "was moved has to be where it was"
        )

    def moved_to(self, path: Path) -> str:
        """Returns a line for the file under another path."""
        there = f"{self.before}{quote(str(path), safe=_AS_JAVA)}"
        return json.dumps({**self.said, "path": there}, separators=(",", ":"))


def _link(source: Path, target: Path, env: Env) -> int:
    """Gives a file of the output a second name. Returns 1, or 0 where it has that already."""
    with storage_errors("link", target):
        env.make_dirs(target.parent)
        try:
            env.link(source, target)
        except FileExistsError:
            return 0
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                raise
            with env.create(target) as file:
                env.copy(source, file)
    return 1
