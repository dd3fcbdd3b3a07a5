"""Worker processes that run shards beside the process that runs an epoch by itself, for one interpreter has one core.

They are started where they pay, stay for the next epoch, and end by themselves when none comes for a while, or when
their parent is gone. Each keeps the layers open of the shards that it runs. What a worker did not do, because it died
or failed in a way that nobody foresaw, the parent does: a layer that is recorded is not computed again.

A message is a pickled object and the buffers that it refers to, with their lengths before them.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pickle  # noqa: TID251 - between two processes of one program, and never kept
import select
import signal
import struct
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa

from nosync.lsm.errors import NosyncError, decode_failure, encode_failure
from nosync.lsm.platform.child import start_child
from nosync.lsm.platform.process import keep_freed_memory
from nosync.runtime.segment_task import SegmentTask
from nosync.runtime.shard_task import RunTask, ShardRows, run_task_of_shard

log = logging.getLogger("nosync")

IDLE_S = 60.0
"""How long a worker waits for the next task."""
# Before anything else: modules of ours make arrays while they are imported, for which Arrow would import Pandas.
_CHILD = (
    "from nosync.lsm.platform.process import leave_out_pandas; leave_out_pandas()\n"
    "from nosync.runtime.shard_workers import main; main({idle_s})"
)
_READY = b"\n"
_LENGTHS = struct.Struct("<QI")
"""How many bytes are pickled, and how many buffers follow; then the length of each."""


class _Table(NamedTuple):
    """A table on its way. Only its rows travel, also where they are a part of larger arrays."""

    stream: pa.Buffer

    @classmethod
    def of(cls, table: pa.Table) -> _Table:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return cls(sink.getvalue())

    def read(self) -> pa.Table:
        return pa.ipc.open_stream(self.stream).read_all()


class _Asked(NamedTuple):
    """What a worker is to do: a task for some shards, on what comes to each."""

    task: SegmentTask
    shards: Sequence[int]
    rows: Sequence[_Table | None]
    tables: Sequence[Mapping[str, _Table]]


class _Done(NamedTuple):
    """What a worker made of one shard after the other, up to one that failed."""

    made: Sequence[_Table]
    failure: str = ""
    """As `encode_failure` has it."""


class _Unforeseen(NamedTuple):
    """Says what a worker failed with that is no error of nosync."""

    what: str


class ShardWorkers:
    """The workers of this process. They run tasks for one thread at a time."""

    def __init__(self, idle_s: float = IDLE_S) -> None:
        self._idle_s = idle_s
        self._workers: list[_Worker] = []
        self._cannot_start = False

    def start(self, count: int) -> None:
        """Starts workers, so that there are so many at least. They take part as soon as they are ready."""
        there = [worker for worker in self._workers if worker.is_alive()]
        if any(not worker.has_started for worker in self._workers if worker not in there):
            log.warning("a worker process did not start; all shards of small epochs are run without any")
            self._cannot_start = True
        self._workers = there
        while len(self._workers) < count and not self._cannot_start:
            self._workers.append(_Worker(self._idle_s))

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    def run(self, task: SegmentTask, given: Sequence[ShardRows], most: int | None = None) -> list[pa.Table]:
        """Runs a task for every shard, in this process and in those workers that are ready: a shard is always run by the
        same one. `most`: in so many of them at most. Returns what leaves each. Raises what `run_shard` raises, for the
        first shard that failed.
        """
        ready = [worker for worker in self._workers[:most] if worker.is_ready()]
        share = len(ready) + 1
        shards = [range(i, task.shards, share) for i in range(share)]
        asked = [(worker, of_worker) for worker, of_worker in zip(ready, shards[1:], strict=True) if of_worker]
        made: dict[int, pa.Table] = {}
        failures: dict[int, NosyncError] = {}
        try:
            asked = [(worker, of) for worker, of in asked if worker.ask(task, of, given)]
            _run_some(task, shards[0], given, made, failures)
            for worker, of_worker in asked:
                worker.answered(of_worker, made, failures)
        except BaseException:
            self.close()  # one that was asked and not heard would answer what is asked next
            raise
        if not failures:
            left = [shard for shard in range(task.shards) if shard not in made]
            _run_some(task, left, given, made, failures)
        if failures:
            raise failures[min(failures)]
        return [made[shard] for shard in range(task.shards)]

    def close(self) -> None:
        """Ends the workers, whatever they do."""
        for worker in self._workers:
            worker.close()
        self._workers = []


def _run_some(
    task: SegmentTask, shards: Sequence[int], given: Sequence[ShardRows], made: dict[int, pa.Table],
    failures: dict[int, NosyncError],
) -> None:  # fmt: skip
    """Runs a task for some shards here, up to one that fails."""
    for shard in shards:
        try:
            made[shard] = run_task_of_shard(task, shard, given[shard])
        except NosyncError as error:
            failures[shard] = error
            return


class _Worker:
    """One worker process."""

    def __init__(self, idle_s: float) -> None:
        self._child = start_child(_CHILD.format(idle_s=idle_s))
        self.has_started = False

    @property
    def pid(self) -> int:
        return self._child.pid

    def is_alive(self) -> bool:
        if self._child.poll() is None:
            return True
        self._ended()
        return False

    def is_ready(self) -> bool:
        """Returns whether it has started, and is there."""
        if not self.has_started and _is_readable(self._from, 0):
            self.has_started = self._from.read(1) == _READY
        return self.has_started and self.is_alive()

    def ask(self, task: SegmentTask, shards: Sequence[int], given: Sequence[ShardRows]) -> bool:
        """Asks for some shards. False: it is gone."""
        mine = [given[shard] for shard in shards]
        asked = _Asked(
            task,
            shards,
            [None if of.rows is None else _Table.of(of.rows) for of in mine],
            [{name: _Table.of(table) for name, table in of.tables.items()} for of in mine],
        )
        try:
            _send(self._to, asked)
        except (pickle.PicklingError, AttributeError, TypeError) as error:  # pickle raises any of these
            log.info("a task cannot be sent to worker processes, so it is run without them: %s", error)
            return False
        except BrokenPipeError:
            self._lost()
            return False
        return True

    def answered(self, shards: Sequence[int], made: dict[int, pa.Table], failures: dict[int, NosyncError]) -> None:
        """Waits for what it made. Those shards are left out that it says nothing of."""
        done: _Done | _Unforeseen | None = _receive(self._from)
        if done is None:
            self._lost()
        elif isinstance(done, _Unforeseen):
            log.info("a worker process failed, so its shards are run without it: %s", done.what)
        else:
            made.update(zip(shards, (table.read() for table in done.made), strict=False))
            failure = decode_failure(done.failure)
            if failure is not None:
                failures[shards[len(done.made)]] = failure

    def close(self) -> None:
        """Ends it, whatever it does."""
        self._child.kill()
        self._ended()

    def _lost(self) -> None:
        log.warning("a worker process ended with status %d; its shards are run without it", self._ended())

    @property
    def _to(self) -> BinaryIO:
        assert self._child.stdin is not None
        return self._child.stdin  # type: ignore[return-value]

    @property
    def _from(self) -> BinaryIO:
        assert self._child.stdout is not None
        return self._child.stdout  # type: ignore[return-value]

    def _ended(self) -> int:
        with contextlib.suppress(BrokenPipeError), self._child as child:  # closes its pipes and waits
            return child.wait()
        return self._child.wait()


def _send(pipe: BinaryIO, message: object) -> None:
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    raw = [buffer.raw() for buffer in buffers]
    pipe.write(_LENGTHS.pack(len(pickled), len(raw)))
    pipe.write(struct.pack(f"<{len(raw)}Q", *(buffer.nbytes for buffer in raw)))
    pipe.write(pickled)
    for buffer in raw:
        pipe.write(buffer)
    pipe.flush()


def _receive(pipe: BinaryIO) -> Any:
    """Returns a message; None where the other side has ended."""
    try:
        size, count = _LENGTHS.unpack(pipe.read(_LENGTHS.size))
        sizes = struct.unpack(f"<{count}Q", pipe.read(8 * count))
    except struct.error:  # in the middle of a message, perhaps
        return None
    parts = [pipe.read(n) for n in (size, *sizes)]
    if [len(part) for part in parts] != [size, *sizes]:
        return None
    return pickle.loads(parts[0], buffers=parts[1:])


def _is_readable(pipe: BinaryIO, wait_s: float) -> bool:
    readable = select.poll()  # select() takes no descriptors above 1,023
    readable.register(pipe, select.POLLIN)
    return bool(readable.poll(wait_s * 1000))


def main(idle_s: float) -> None:
    """Runs the worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, whose parent decides
    keep_freed_memory()
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    gc.freeze()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what anybody prints is no answer
    try:
        answers.write(_READY)
        answers.flush()
        while _is_readable(sys.stdin.buffer, idle_s):
            asked: _Asked | None = _receive(sys.stdin.buffer)
            if asked is None:
                return
            _send(answers, _answer(asked))
    except BrokenPipeError:
        os._exit(0)  # Python would try to flush once more, and print that it cannot


def _answer(asked: _Asked) -> _Done | _Unforeseen:
    made: list[_Table] = []
    for shard, rows, tables in zip(asked.shards, asked.rows, asked.tables, strict=True):
        given = ShardRows(None if rows is None else rows.read(), {name: table.read() for name, table in tables.items()})
        try:
            made.append(_Table.of(run_task_of_shard(asked.task, shard, given)))
        except NosyncError as error:
            return _Done(made, encode_failure(error))
        except Exception as error:  # noqa: BLE001 - the parent does it, and sees for itself
            return _Unforeseen(f"{type(error).__name__}: {error}")
    return _Done(made)


class _OfProcess:
    """The workers of one process, and whose turn it is. A fork has none of its parent's."""

    def __init__(self) -> None:
        self.begin()
        os.register_at_fork(after_in_child=self.begin)

    def begin(self) -> None:
        self.workers, self.turn = ShardWorkers(), threading.Lock()


_of_process = _OfProcess()


@contextlib.contextmanager
def workers_of_process(count: int) -> Iterator[RunTask | None]:
    """Lends so many workers of this process: what runs a task in them, too. None: another epoch has them just now.

    They stay for the next one that asks, of whichever job.
    """
    if not _of_process.turn.acquire(blocking=False):
        yield None
        return
    try:
        _of_process.workers.start(count)
        yield partial(_of_process.workers.run, most=count)
    finally:
        _of_process.turn.release()
