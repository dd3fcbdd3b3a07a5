"""Worker processes beside the one that runs an epoch: they make the same layers, and an epoch outlives them."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
import pytest

import nosync
from nosync.lsm.errors import StageError
from nosync.runtime import shard_workers
from nosync.runtime.local_part import run_epoch
from nosync.runtime.shard_task import RunTask
from nosync.runtime.shard_workers import ShardWorkers, workers_of_process
from nosync.testing import FlowTester, flow_tester
from nosync.testing.daemon_cluster import eventually

SHARDS = 5
Tell = Callable[[int], None]


def flow() -> nosync.Dataflow:
    found = nosync.Dataflow("f")
    orders = found.source("orders", "customer bigint, price bigint, note string")
    names = found.table("customers", "customer bigint, name string", key=["customer"])
    joined = orders.where("paid", "price > 0").join("named", names.select("names", "customer", "name"), on=["customer"])
    joined.aggregate("sums", key=["name"], price=nosync.sum("price"), n=nosync.count())
    orders.aggregate("by_note", key=["note"], most=nosync.max("price"), customers=nosync.count_distinct("customer"))
    return found


def rows_of(t: int) -> dict[str, Any]:
    orders = [
        {"customer": (i * 7 + t) % 23, "price": i * 31 % 101 - 5, "note": "é" * (i % 4) or None} for i in range(200)
    ]
    customers = [{"customer": i, "name": f"name {(i + t) % 11}"} for i in range(t, 23)]
    return {"orders": orders, "customers": customers}


@pytest.fixture
def workers() -> Iterator[ShardWorkers]:
    found = ShardWorkers()
    yield found
    found.close()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[int]]]:
    """Fills with what workers were asked: which, and for which shards."""
    found: list[tuple[int, list[int]]] = []
    ask = shard_workers._Worker.ask

    def and_note(self: Any, task: Any, shards: Sequence[int], given: Any) -> bool:
        found.append((self.pid, list(shards)))
        return ask(self, task, shards, given)

    monkeypatch.setattr(shard_workers._Worker, "ask", and_note)
    return found


def started(workers: ShardWorkers, count: int) -> list[int]:
    workers.start(count)
    eventually("the workers are ready", lambda: all(worker.is_ready() for worker in workers._workers))
    return workers.pids


def epochs(
    monkeypatch: pytest.MonkeyPatch, workers: ShardWorkers | None, *, before: Tell = lambda _: None, count: int = 3
) -> Any:
    """Returns the digests of all layers, after epochs by some workers. `before`: is told each epoch before it is run."""
    with monkeypatch.context() as patched:
        if workers is not None:
            patched.setattr(flow_tester, "run_epoch", partial(run_epoch, run_task=workers.run))
        tester = FlowTester(flow(), shards=SHARDS)
        for t in range(count):
            before(t)
            tester.advance(rows_of(t))
        return tester.digests()


@pytest.mark.parametrize("count", [1, 2, 7])
def test_layers_are_the_same_with_workers(
    count: int, workers: ShardWorkers, asked: list[tuple[int, list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = started(workers, count)
    assert epochs(monkeypatch, workers) == epochs(monkeypatch, None)
    # A shard is always run by the same one, which has its layers open.
    share = count + 1
    wanted = {pid: list(range(i, SHARDS, share)) for i, pid in enumerate(pids, start=1) if i < SHARDS}
    assert dict(asked) == wanted
    assert all(wanted[pid] == shards for pid, shards in asked)


def test_workers_that_are_not_ready_are_not_waited_for(
    workers: ShardWorkers, asked: list[tuple[int, list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_workers, "_CHILD", "import sys; sys.stdin.read()")
    workers.start(2)
    assert epochs(monkeypatch, workers) == epochs(monkeypatch, None)
    assert not asked


def test_an_epoch_outlives_workers_that_are_killed(
    workers: ShardWorkers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While they work: they are stopped before, so that they do not answer. Others take their places."""
    first = started(workers, 2)
    run = shard_workers.run_task_of_shard

    def killing(task: Any, shard: int, given: Any) -> pa.Table:
        for worker in workers._workers:
            worker._child.kill()  # which does nothing to one that has ended
        return run(task, shard, given)

    def before(t: int) -> None:
        if t == 1:
            for pid in first:
                os.kill(pid, signal.SIGSTOP)
            monkeypatch.setattr(shard_workers, "run_task_of_shard", killing)
        if t == 2:
            monkeypatch.setattr(shard_workers, "run_task_of_shard", run)
            assert not set(started(workers, 2)) & set(first)

    with caplog.at_level(logging.WARNING, "nosync"):
        assert epochs(monkeypatch, workers, before=before) == epochs(monkeypatch, None)
    assert "a worker process ended with status -9; its shards are run without it" in caplog.text


def overflowing() -> nosync.Dataflow:
    found = nosync.Dataflow("f")
    found.source("rows", "k bigint, n bigint").aggregate("sums", key=["k"], n=nosync.sum("n"))
    return found


def message(workers: ShardWorkers | None, monkeypatch: pytest.MonkeyPatch, keys: Sequence[int]) -> str:
    rows = [{"k": k, "n": 2**63 - 1} for k in keys for _ in range(2)]
    with monkeypatch.context() as patched:
        if workers is not None:
            patched.setattr(flow_tester, "run_epoch", partial(run_epoch, run_task=workers.run))
        tester = FlowTester(overflowing(), shards=SHARDS)
        with pytest.raises(StageError) as error:
            tester.advance({"rows": rows})
        tester.advance({"rows": [{"k": k, "n": 1} for k in keys]})  # workers answer what they are asked next
        assert tester.read("sums").num_rows == len(keys)
    assert error.value.stage == "sums"
    return str(error.value)


def test_errors_are_those_of_the_first_shard_that_failed(
    workers: ShardWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(workers, 2)
    shards = set()
    for keys in ([0], [1], [2], [3], [4], [5], range(40)):
        found = message(workers, monkeypatch, keys)
        assert found == message(None, monkeypatch, keys)
        shards.add(found.split("timestamp")[0])
    assert len(shards) > 2, "of several shards, some of them the workers'"


def test_what_a_worker_cannot_do_is_done_here(
    workers: ShardWorkers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = (
        "import nosync.runtime.shard_workers as w\n"
        "def fail(task, shard, given): raise MemoryError('no more')\n"
        "w.run_task_of_shard = fail; w.main({idle_s})"
    )
    monkeypatch.setattr(shard_workers, "_CHILD", broken)
    started(workers, 1)
    with caplog.at_level(logging.INFO, "nosync"):
        assert epochs(monkeypatch, workers) == epochs(monkeypatch, None)
    assert "a worker process failed, so its shards are run without it: MemoryError: no more" in caplog.text


def test_what_cannot_be_sent_is_run_here(workers: ShardWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    started(workers, 1)
    monkeypatch.setattr(shard_workers._Table, "of", lambda table: lambda: table)
    assert epochs(monkeypatch, workers) == epochs(monkeypatch, None)


def test_what_a_worker_prints_is_no_answer(workers: ShardWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    printing = (
        "import os\n"
        "import nosync.runtime.shard_workers as w\n"
        "run = w.run_task_of_shard\n"
        "def loud(*of): print('hello', flush=True); os.write(1, b'hello'); return run(*of)\n"
        "w.run_task_of_shard = loud; w.main({idle_s})"
    )
    monkeypatch.setattr(shard_workers, "_CHILD", printing)
    started(workers, 1)
    assert epochs(monkeypatch, workers) == epochs(monkeypatch, None)


def test_an_interruption_ends_the_workers_and_the_next_epoch_is_right(
    workers: ShardWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that was asked and not heard would answer what it is asked next."""
    run = shard_workers.run_task_of_shard

    def interrupted(task: Any, shard: int, given: Any) -> pa.Table:
        raise KeyboardInterrupt

    pids = started(workers, 2)
    with monkeypatch.context() as patched:
        patched.setattr(flow_tester, "run_epoch", partial(run_epoch, run_task=workers.run))
        tester = FlowTester(flow(), shards=SHARDS)
        patched.setattr(shard_workers, "run_task_of_shard", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tester.advance(rows_of(0))
        patched.setattr(shard_workers, "run_task_of_shard", run)
        assert not workers.pids
        assert not any(is_running(pid) for pid in pids)
        started(workers, 2)
        for t in range(3):
            tester.advance(rows_of(t))
        assert tester.digests() == epochs(monkeypatch, None)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_workers_end_when_they_are_idle_and_when_their_parent_is_gone(workers: ShardWorkers) -> None:
    idle = ShardWorkers(idle_s=0.2)
    (pid,) = started(idle, 1)
    eventually("the worker has ended", lambda: not idle._workers[0].is_alive())
    assert started(idle, 1) != [pid]
    idle.close()
    program = (
        "from nosync.runtime.shard_workers import ShardWorkers\n"
        "from nosync.testing.daemon_cluster import eventually\n"
        "import os\n"
        "workers = ShardWorkers(); workers.start(1)\n"
        "eventually('it is ready', workers._workers[0].is_ready)\n"
        "print(workers.pids[0], flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=False)
    eventually("the worker of a killed parent has ended", lambda: not is_running(int(done.stdout)))


def test_a_worker_that_cannot_start_is_not_started_again(
    workers: ShardWorkers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shard_workers, "_CHILD", "import sys; sys.exit(3)")
    workers.start(1)
    eventually("it has ended", lambda: workers._workers[0]._child.poll() is not None)
    assert epochs(monkeypatch, workers) == epochs(monkeypatch, None)
    with caplog.at_level(logging.WARNING, "nosync"):
        workers.start(1)
        workers.start(1)
    assert not workers.pids
    assert caplog.text.count("a worker process did not start") == 1


def test_one_epoch_at_a_time_has_the_workers_of_a_process_and_a_fork_has_none() -> None:
    mine = shard_workers._of_process.workers
    with workers_of_process(1) as run_task:
        assert run_task is not None
        others: list[RunTask | None] = []

        def ask() -> None:
            with workers_of_process(1) as found:
                others.append(found)

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        assert others == [None]
        (pid,) = mine.pids
        child = os.fork()
        if child == 0:
            ours = shard_workers._of_process
            os._exit(0 if ours.turn.acquire(blocking=False) and not ours.workers.pids else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert mine.pids == [pid]
    mine.close()


def test_a_job_that_asks_for_fewer_workers_leaves_those_of_another(
    asked: list[tuple[int, list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two jobs of a process, by turns: to start a worker again takes longer than many an epoch."""
    mine = shard_workers._of_process.workers
    with workers_of_process(3):
        pids = started(mine, 3)
    for count in (1, 3, 2):
        asked.clear()
        with workers_of_process(count) as run_task, monkeypatch.context() as patched:
            patched.setattr(flow_tester, "run_epoch", partial(run_epoch, run_task=run_task))
            FlowTester(flow(), shards=SHARDS).advance(rows_of(0))
        assert {pid for pid, _ in asked} == set(pids[:count])
    assert mine.pids == pids
    mine.close()


def test_only_rows_travel_and_not_all_that_they_are_a_part_of() -> None:
    table = pa.table({"n": range(1_000_000)})
    sent = shard_workers._Table.of(table.slice(17, 3))
    assert sent.stream.size < 10_000
    assert sent.read().equals(table.slice(17, 3))
