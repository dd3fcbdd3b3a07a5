"""A merge in a process of its own, so that appends in this one never wait for the interpreter lock.

The parent sends a request (JSON on standard input), the child merges and publishes, and answers with a line on standard output.
Killing the child at any moment leaves nothing but a temporary file; it ends by itself when its parent is gone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa

from nosync.lsm.env import Env
from nosync.lsm.errors import NosyncError, StorageError
from nosync.lsm.failures import decode_failure, encode_failure
from nosync.lsm.layer import Digest, LayerId, parse_path
from nosync.lsm.memory import keep_freed_memory
from nosync.lsm.merge import Merge
from nosync.lsm.no_pandas import leave_out_pandas
from nosync.lsm.processor import numpy_environment
from nosync.lsm.reader import LayerReader
from nosync.lsm.timestamp import Time
from nosync.lsm.writer import Published

_POLL_S = 0.02
# Out of the way from the first instruction on: starting the interpreter is work too.
_CHILD = "import os; os.nice({nice}); from nosync.lsm.merge_process import main; main()"
OUT_OF_THE_WAY = 19


def run_in_process(
    merge: Merge, stop: Callable[[], bool], *, pause_share: float = 0.0, nice: int = 0
) -> Published | None:
    """Carries out a merge in a child process. None: `stop()` said so, and the child was killed.

    With `nice` OUT_OF_THE_WAY it gets the processor when nobody else wants it. After each step it rests for `pause_share`
    times as long as the step took: the kernel then has time to write what was merged without taking the processor from
    those who append.

    Raises what the merge raises, and StorageError where the process died.
    """
    request = {
        "root": str(merge.root.absolute()),
        "layers": [str(layer.id.path) for layer in merge.layers],
        "since": merge.requested_since,
        "bottom": merge.bottom,
        "block_rows": merge.block_rows,
        "pause_share": pause_share,
    }
    importable = str(Path(__file__).parents[2])  # where the package lies, whatever the caller did to its own path
    path = os.pathsep.join(filter(None, [importable, os.environ.get("PYTHONPATH")]))
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD.format(nice=nice)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **numpy_environment(), "PYTHONPATH": path},
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(json.dumps(request))
        child.stdin.close()
        while True:
            try:
                child.wait(_POLL_S)
                break
            except subprocess.TimeoutExpired:
                if stop():
                    child.kill()
                    return None
        answer = child.stdout.read()
    failure = decode_failure(answer)
    if failure is not None:
        raise failure
    if child.returncode:
        raise StorageError(f"the process that merged {merge.id} died with status {child.returncode}; it is tried again")
    done: dict[str, Any] = json.loads(answer)
    return Published(merge.id, Digest(done["digest"]), done["rows"], done["size_bytes"], done["existed"])


def main() -> None:
    """The child."""
    leave_out_pandas()
    keep_freed_memory()
    parent, rest = os.getppid(), threading.Event()
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    request = json.load(sys.stdin)
    root, env = Path(request["root"]), Env()
    try:
        layers = [LayerReader.open(root / "layers" / path, env, _id_of(path)) for path in request["layers"]]
        merge = Merge(
            root,
            layers,
            since=Time(request["since"]),
            bottom=request["bottom"],
            env=env,
            block_rows=request["block_rows"],
        )
        started = env.monotonic_s()
        for _ in merge.steps():
            if os.getppid() != parent:
                return
            rest.wait(request["pause_share"] * (env.monotonic_s() - started))
            started = env.monotonic_s()
        done = merge.published
    except FileNotFoundError as error:
        sys.stdout.write(encode_failure(StorageError(f"an input of a merge is gone: {error.filename}")))
        return
    except NosyncError as error:
        sys.stdout.write(encode_failure(error))
        return
    answer = {"digest": done.digest, "rows": done.rows, "size_bytes": done.size_bytes, "existed": done.existed}
    sys.stdout.write(json.dumps(answer))


def _id_of(path: str) -> LayerId | None:
    return parse_path(PurePosixPath(path))
