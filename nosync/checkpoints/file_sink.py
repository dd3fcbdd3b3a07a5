"""The output of a file sink as of a batch, as another directory: files as hard links, and the log by which Spark reads.

A file sink lists what each batch wrote in `_spark_metadata/<batch>`, and from time to time all so far in
`<batch>.compact`. Spark reads an output by this log, and refuses one whose log does not begin with batch 0. So a query
that goes on from an earlier batch needs an output whose log ends with that batch: this makes it, and leaves the old one
as it is.

(The log: org.apache.spark.sql.execution.streaming.FileStreamSinkLog.)
"""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import quote, unquote

from nosync.checkpoints.names import Batch
from nosync.lsm.errors import InvalidInputError, NotAvailableError
from nosync.lsm.model.timestamp import is_number
from nosync.lsm.platform.env import Env, storage_errors
from nosync.lsm.platform.json_file import read_if_there
from nosync.lsm.platform.parsing import parsed

SINK_LOG = "_spark_metadata"
_COMPACT = ".compact"
_AS_JAVA = "/=:@!$&'()*+,;~"
"""What Java leaves as it is in the path of a URI."""


def output_at(output: Path, target: Path, t: Batch, env: Env) -> int:
    """Makes `target`, which has what the file sink in `output` had after batch `t`. Returns how many files that are.

    Raises InvalidInputError where `output` is none of a file sink or `target` has something in it, NotAvailableError
    where the log was compacted beyond the batch, StorageError where files cannot be linked.
    """
    if not (output / SINK_LOG).is_dir():
        raise InvalidInputError(f"{output} is not the output of a file sink: it has no {SINK_LOG}")
    if env.list_dir(target) or (env.exists(target) and not target.is_dir()):
        raise InvalidInputError(f"{target} is there, and not empty: say a new directory for the output")
    entries = _entries(output / SINK_LOG, t, env)
    env.make_dirs(target / SINK_LOG)
    linked = 0
    for name in entries:
        lines = read_if_there(output / SINK_LOG / name, env).decode().split("\n")
        with parsed("an entry of a file sink's log", str(output / SINK_LOG / name)):
            moved = [_moved(line, output, target) for line in lines[1:] if line]
        for _, relative in moved:
            linked += _link(output / relative, target / relative, env)
        with storage_errors("write", target / SINK_LOG / name), env.create(target / SINK_LOG / name) as file:
            file.write("\n".join([lines[0], *(line for line, _ in moved)]).encode())
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


def _moved(line: str, output: Path, target: Path) -> tuple[str, Path]:
    """Returns a line of the log for a file in the other directory, and the file relative to it."""
    said = json.loads(line)
    scheme, _, rest = str(said["path"]).rpartition(":")
    if scheme not in ("", "file"):
        raise ValueError(f"{said['path']} is not on a file system of this host")
    path = rest.lstrip("/")
    slashes = rest[: len(rest) - len(path) - 1]
    relative = Path("/" + unquote(path)).relative_to(output.absolute())
    prefix = f"{scheme}:" if scheme else ""
    said["path"] = f"{prefix}{slashes}{quote(str(target.absolute() / relative), safe=_AS_JAVA)}"
    return json.dumps(said, separators=(",", ":")), relative


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
