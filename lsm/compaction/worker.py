"""Merges in a process of their own, so that appends in this one never wait for the interpreter lock.

The parent sends a request for each merge (a line of JSON on standard input), the child merges, publishes, and answers
with a line on standard output. It stays for the next one, because to start takes longer than many a merge, and ends by
itself when none comes for a while, or when its parent is gone. Killing it at any moment leaves nothing but a temporary
file, which the parent removes.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa

from nosync.lsm.compaction.merge import Merge
from nosync.lsm.errors import NosyncError, StorageError, decode_failure, encode_failure
from nosync.lsm.layers.reader import LayerReader
from nosync.lsm.layers.writer import Published
from nosync.lsm.model.layer import Digest, LayerId, parse_path
from nosync.lsm.model.timestamp import Time
from nosync.lsm.platform.child import start_child
from nosync.lsm.platform.env import Env, storage_errors
from nosync.lsm.platform.process import keep_freed_memory, leave_out_pandas

_POLL_S = 0.02
IDLE_S = 10.0
"""How long a process waits for the next merge."""
# Out of the way from the first instruction on: starting the interpreter is work too.
_CHILD = "import os; os.nice({nice}); from nosync.lsm.compaction.worker import main; main({idle_s})"
OUT_OF_THE_WAY = 19


class MergeProcess:
    """A child process that carries out merges, one at a time. Started by the first one, and again where it has ended.

    With `nice` OUT_OF_THE_WAY it gets the processor when nobody else wants it.
    """

    def __init__(self, nice: int = 0, idle_s: float = IDLE_S) -> None:
        self._nice, self._idle_s = nice, idle_s
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> MergeProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    def run(self, merge: Merge, stop: Callable[[], bool], *, pause_share: float = 0.0) -> Published | None:
        """Carries out a merge. None: `stop()` said so, and the child was killed.

        After each step it rests for `pause_share` times as long as the step took: the kernel then has time to write
        what was merged without taking the processor from those who append.

        Raises what the merge raises, and StorageError where the process died.
        """
        request = {
            "root": str(merge.root.absolute()),
            "temporary": str(merge.temporary.absolute()),
            "layers": [str(layer.id.path) for layer in merge.layers],
            "since": merge.requested_since,
            "bottom": merge.bottom,
            "block_rows": merge.block_rows,
            "pause_share": pause_share,
            "is_validated": all(layer.is_validated for layer in merge.layers),
        }
        was_there = self._child is not None
        answer: bytes | None = b""
        try:
            answer, status = self._ask(request, stop)
            if answer == b"" and was_there:  # it may have ended just when it was asked
                answer, status = self._ask(request, stop)
        finally:
            if not answer:  # it was killed, and left what it had written
                with storage_errors("remove", merge.temporary):
                    Env().unlink(merge.temporary)
        if answer is None:
            return None
        if not answer:
            raise StorageError(f"the process that merged {merge.id} died with status {status}; it is tried again")
        done: dict[str, Any] = json.loads(answer)
        failure = decode_failure(done.get("failure", ""))
        if failure is not None:
            raise failure
        return Published(merge.id, Digest(done["digest"]), done["rows"], done["size_bytes"], done["existed"])

    def close(self) -> None:
        """Ends the child, in the middle of a merge as well."""
        if self._child is not None:
            self._child.kill()
            self._ended(self._child)

    def _ask(self, request: dict[str, Any], stop: Callable[[], bool]) -> tuple[bytes | None, int]:
        """Returns the child's answer; nothing and its exit status where it ended without one, None where `stop()` said
        so.
        """
        child = self._started()
        assert child.stdin is not None
        assert child.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(json.dumps(request).encode() + b"\n")
            child.stdin.flush()
        with selectors.DefaultSelector() as readable:  # select() takes no descriptors above 1,023
            readable.register(child.stdout, selectors.EVENT_READ)
            while not readable.select(_POLL_S):
                if stop():
                    self.close()
                    return None, 0
        answer = child.stdout.readline()
        return answer, 0 if answer else self._ended(child)

    def _started(self) -> subprocess.Popen[bytes]:
        if self._child is not None and self._child.poll() is not None:
            self._ended(self._child)
        if self._child is None:
            self._child = start_child(_CHILD.format(nice=self._nice, idle_s=self._idle_s))
        return self._child

    def _ended(self, child: subprocess.Popen[bytes]) -> int:
        self._child = None
        with child:  # closes its pipes and waits
            return child.wait()


def main(idle_s: float) -> None:
    """Runs the child process."""
    leave_out_pandas()
    keep_freed_memory()
    parent = os.getppid()
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    while select.select([sys.stdin], [], [], idle_s)[0]:
        request = sys.stdin.buffer.readline()
        answer = _answer(json.loads(request), parent) if request else None
        if answer is None:
            return
        try:
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()
        except BrokenPipeError:  # the parent was killed; what was merged is found by the next node
            os._exit(0)  # Python would try to flush once more, and print that it cannot


def _answer(request: dict[str, Any], parent: int) -> dict[str, Any] | None:
    """Merges, and returns what to answer; None where the parent is gone."""
    rest, root, env = threading.Event(), Path(request["root"]), Env()
    try:
        layers = [
            LayerReader.open(root / "layers" / path, env, _id_of(path), is_validated=request["is_validated"])
            for path in request["layers"]
        ]
        merge = Merge(
            root,
            layers,
            since=Time(request["since"]),
            bottom=request["bottom"],
            env=env,
            block_rows=request["block_rows"],
            temporary=Path(request["temporary"]),
        )
        started = env.monotonic_s()
        for _ in merge.steps():
            if os.getppid() != parent:
                return None
            rest.wait(request["pause_share"] * (env.monotonic_s() - started))
            started = env.monotonic_s()
        done = merge.published
    except FileNotFoundError as error:
        return {"failure": encode_failure(StorageError(f"an input of a merge is gone: {error.filename}"))}
    except NosyncError as error:
        return {"failure": encode_failure(error)}
    return {"digest": done.digest, "rows": done.rows, "size_bytes": done.size_bytes, "existed": done.existed}


def _id_of(path: str) -> LayerId | None:
    return parse_path(PurePosixPath(path))
