"""`nosync demo --checkpoint`: an ordinary query loses its host, goes on from a peer, and is forked with other code.

The query is `nosync/flights_query.py`, which knows nothing of nosync. Two daemons on this machine stand for two hosts.
The first one, the query and all that is on its disk are lost in autumn. The query is started again beside
the second one. Then a fork of it counts no flights in bad weather from 1 July on.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from nosync import checkpoints, flights_query
from nosync.checkpoints.api import CheckpointStatus
from nosync.demo import (
    FIRST_OF_JULY,
    FairWeather,
    Progress,
    drop_cancelled,
    epoch_of_day,
    load_bad_hours,
    load_flights,
)
from nosync.lsm.errors import InvalidInputError, NosyncError
from nosync.replication.transport.daemon_files import address_of
from nosync.spark.java import check_java
from nosync.testing.daemon_cluster import free_ports

NAME, FORK = "flights", "flights-no-weather"
_NODES = ("n1", "n2")
_FIRST_MTIME_S = 1.7e9
_LOOK_S = 0.05
PATIENCE_S = 300.0


@dataclass
class CheckpointDemoResult:
    """What the demo found; `--json` prints it."""

    batches: int
    rows: int
    lost_after: int
    """The last batch that was committed on the host that was lost."""
    went_on_after: int
    """The last batch that the other host had all of."""
    restore_ms: float
    files_restored: int
    identical: bool
    """Every batch has the rows that it should have, those that ran again included."""
    fork_at: int
    fork_identical: bool
    mean_delay: float
    mean_delay_without_weather: float
    seconds: float
    out: str
    plot: str


class CheckpointDemo:
    """Runs the demo in parts, so that the command line can talk between them. `by`: how long a batch is."""

    def __init__(self, out: Path, by: str, progress: Progress) -> None:
        if (out / "flights").exists():
            raise InvalidInputError(f"{out / 'flights'} exists: choose another --out, or remove it first")
        self.out, self._progress = out.absolute(), progress
        self.flights = load_flights()
        batch_of = {day: epoch_of_day(day, by) for day in set(self.flights["day"].to_pylist())}
        self._batch = pa.array([batch_of[day] for day in self.flights["day"].to_pylist()])
        self.batches = max(batch_of.values()) + 1
        self.lost_at = self.batches * 3 // 4
        self.fork_at = epoch_of_day(FIRST_OF_JULY, by) - 1
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def data(self, node: str) -> Path:
        """The data directory of a host's daemon."""
        return self.out / node / "nosync"

    # --- what runs ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def hosts(self) -> Iterator[None]:
        """Writes the year's files, and runs two daemons. Whatever still runs in the end is stopped."""
        check_java()
        for directory in ("flights", "batches", "fork", *_NODES):
            (self.out / directory).mkdir(parents=True)
        for t in range(self.batches):
            path = self.out / "flights" / f"{t:03}.parquet"
            pq.write_table(self.flights.filter(pc.equal(self._batch, t)), path)
            os.utime(path, (_FIRST_MTIME_S + t,) * 2)
        ports = free_ports(len(_NODES))
        try:
            for node, port in zip(_NODES, ports, strict=True):
                peers = [f"--peer={n}=127.0.0.1:{p}" for n, p in zip(_NODES, ports, strict=True) if n != node]
                self._start(
                    node, "-m", "nosync.cli", "daemon", f"--node={node}", f"--data={self.data(node)}",
                    f"--listen=127.0.0.1:{port}", "--replicas=2", f"--sockets={self.out / 'sockets'}", *peers,
                )  # fmt: skip
            for node in _NODES:
                self._wait(lambda node=node: address_of(self.data(node)) is not None, node)  # type: ignore[misc]
            yield
        finally:
            for process in self._processes.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=30)

    def start_query(self, checkpoint: Path, output: str, *more: Path) -> None:
        """Starts the query in a process of its own."""
        arguments = (checkpoint, self.out / "flights", self.out / output, *more)
        self._start("query", flights_query.__file__, *map(str, arguments))

    def _start(self, name: str, *arguments: str) -> None:
        with open(self.out / f"{name}.log", "ab") as log:
            process = subprocess.Popen([sys.executable, *arguments], stdout=log, stderr=log, start_new_session=True)
        self._processes[name] = process

    def _wait(self, is_so: Callable[[], object], name: str) -> None:
        """Waits for something that a process does. Raises NosyncError where that ended before."""
        end_s = time.monotonic() + PATIENCE_S
        while not is_so():
            if self._processes[name].poll() is not None and not is_so():
                raise NosyncError(f"{name} ended: {self.out / f'{name}.log'} says why")
            if time.monotonic() > end_s:
                raise NosyncError(f"{name} takes more than {PATIENCE_S:g} s: {self.out / f'{name}.log'} may say why")
            time.sleep(_LOOK_S)

    # --- the parts ----------------------------------------------------------------------------------------------------

    def run_until_lost(self) -> CheckpointStatus:
        """Runs the query on the first host for three quarters of the year, then loses the host. Returns how it stood."""
        checkpoint = self.out / "n1" / "checkpoint"
        with checkpoints.watch(checkpoint, self.data("n1"), name=NAME) as watch:
            self.start_query(checkpoint, "batches")
            self._wait(lambda: self._shown("batches", 0, self.batches) > self.lost_at, "query")
            status = watch.checkpoint.status()
            for name in ("query", "n1"):
                os.killpg(self._processes[name].pid, signal.SIGKILL)
                self._processes.pop(name).wait()
            watch.abandon()
        shutil.rmtree(self.out / "n1")
        return status

    def go_on(self) -> tuple[CheckpointStatus, float, int]:
        """Starts the query again on the other host. Returns how its checkpoint stood there, and what restoring took."""
        kept = checkpoints.checkpoint(NAME, self.data("n2"))
        began_s = time.perf_counter()
        made = kept.restore(self.out / "n2" / "checkpoint")
        restore_ms = 1000 * (time.perf_counter() - began_s)
        status = kept.status()
        with checkpoints.watch(made.path, self.data("n2"), name=NAME):
            self.start_query(made.path, "batches")
            self._finish("batches", 0)
        return status, restore_ms, made.files

    def run_fork(self) -> None:
        """Starts a fork of the query with other code, from the end of June on."""
        hours = self.out / "bad-hours.json"
        hours.write_text(json.dumps(load_bad_hours()))
        made = checkpoints.checkpoint(NAME, self.data("n2")).fork(self.out / "n2" / "fork", self.fork_at, name=FORK)
        with checkpoints.watch(made.path, self.data("n2"), name=FORK):
            self.start_query(made.path, "fork", hours)
            self._finish("fork", self.fork_at + 1)

    def _finish(self, output: str, first: int) -> None:
        query = self._processes["query"]

        def is_over() -> bool:
            self._shown(output, first, self.batches - first)
            return query.poll() is not None

        self._wait(is_over, "query")
        if query.returncode:
            raise NosyncError(f"the query failed: {self.out / 'query.log'} says why")

    def _shown(self, output: str, first: int, of: int) -> int:
        done = len(list((self.out / output).glob("[0-9]*.json")))
        self._progress(done, of, f"batch {first + done - 1}" if done else "starting Spark")
        return done

    # --- what came of it ----------------------------------------------------------------------------------------------

    def means(self, output: str) -> dict[int, float]:
        """Returns by batch the mean delay of all flights so far, in minutes, as the query wrote it."""
        found = {}
        for path in (self.out / output).glob("[0-9]*.json"):
            rows = json.loads(path.read_text())
            found[int(path.stem)] = sum(row["total"] for row in rows) / sum(row["n"] for row in rows)
        return dict(sorted(found.items()))

    def is_right(self, output: str, *, without_weather: bool = False) -> bool:
        """Returns whether every batch has the counts and sums that follow from the files, computed without Spark."""
        first = self.fork_at + 1 if without_weather else 0
        counted: dict[tuple[str, str], tuple[int, float]] = {}
        fair = FairWeather(load_bad_hours())
        for t in range(self.batches):
            rows = self.flights.filter(pc.equal(self._batch, t))
            rows = fair(rows) if without_weather and t >= first else drop_cancelled(rows)
            of_batch = rows.group_by(["origin", "carrier"]).aggregate([("dep_delay", "count"), ("dep_delay", "sum")])
            for row in of_batch.to_pylist():
                n, total = counted.get((row["origin"], row["carrier"]), (0, 0.0))
                key = row["origin"], row["carrier"]
                counted[key] = n + row["dep_delay_count"], total + row["dep_delay_sum"]
            if t < first:
                continue
            path = self.out / output / f"{t}.json"
            if not path.exists():
                return False
            said = {(row["origin"], row["carrier"]): (row["n"], row["total"]) for row in json.loads(path.read_text())}
            if said != counted:  # delays are whole minutes, so sums are exact
                return False
        return True

    def write_plot(self, lost_after: int) -> Path:
        """Draws both lines."""
        from nosync.html_diff.plot import plot_lines  # noqa: PLC0415 - matplotlib takes a second to import

        path, main = self.out / "checkpoint.png", self.means("batches")
        plot_lines(
            {"the query": main, "its fork: no flights in bad weather": {self.fork_at: main[self.fork_at], **self.means("fork")}},
            path, {lost_after: "host lost", self.fork_at: "fork"},
            "Mean departure delay so far, New York 2013", "batch", "minutes",
        )  # fmt: skip
        return path


def run_checkpoint_demo(
    out: Path, by: str, progress: Progress, show: Callable[[str, Any], None]
) -> CheckpointDemoResult:
    """Runs the whole demo, and calls `show(part, what)` with the outcome of each part as soon as it is there.

    Raises InvalidInputError where `out` has a demo already, and NosyncError where a process fails.
    """
    began_s = time.perf_counter()
    demo = CheckpointDemo(out, by, progress)
    with demo.hosts():
        before = demo.run_until_lost()
        show("lost", before)
        after, restore_ms, files = demo.go_on()
        show("went_on", (after, restore_ms, files))
        identical = demo.is_right("batches")
        show("identical", identical)
        demo.run_fork()
        fork_identical = demo.is_right("fork", without_weather=True)
        main, fork = demo.means("batches"), demo.means("fork")
        show("fork", (demo.fork_at, main[demo.batches - 1], fork[demo.batches - 1], fork_identical))
    assert before.committed is not None
    assert after.newest is not None
    return CheckpointDemoResult(
        batches=demo.batches,
        rows=demo.flights.num_rows,
        lost_after=before.committed,
        went_on_after=after.newest,
        restore_ms=round(restore_ms, 1),
        files_restored=files,
        identical=identical,
        fork_at=demo.fork_at,
        fork_identical=fork_identical,
        mean_delay=main[demo.batches - 1],
        mean_delay_without_weather=fork[demo.batches - 1],
        seconds=round(time.perf_counter() - began_s, 1),
        out=str(demo.out),
        plot=str(demo.write_plot(before.committed)),
    )
