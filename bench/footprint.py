"""What a computation costs besides time: processor seconds, bytes written, and memory, of a process and all that it started."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

T = TypeVar("T")
LOOK_EVERY_S = 1.0
"""A look takes some 40 ms of a core: four in a second made what is measured slower by a tenth."""


@dataclass(frozen=True)
class Spent:
    """Of a process tree since it began; children that have ended are in what their parents spent."""

    cpu_s: float
    written_bytes: int

    def __sub__(self, before: Spent) -> Spent:
        return Spent(self.cpu_s - before.cpu_s, self.written_bytes - before.written_bytes)


def tree() -> list[psutil.Process]:
    """This process and those it started: Spark's JVM, its Python workers, merges, daemons."""
    me = psutil.Process()
    return [me, *me.children(recursive=True)]


def spent() -> Spent:
    cpu_s, written = 0.0, 0
    for process in tree():
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            cpu_s += times.user + times.system + times.children_user + times.children_system
            written += process.io_counters().write_bytes
    return Spent(cpu_s, written)


def cpu_by_process() -> dict[str, float]:
    """Processor seconds so far: of the JVM, of Python tasks, of this process (the driver and its node), and of merges."""
    seconds = {"JVM": 0.0, "Python tasks": 0.0, "driver and node": 0.0, "merges": 0.0}
    for process in tree():
        with contextlib.suppress(psutil.NoSuchProcess):
            times, command = process.cpu_times(), process.cmdline()
            of = "JVM" if command[0].endswith("java") else "Python tasks" if "pyspark.worker" in command else "merges"
            if process.pid == os.getpid():
                of = "driver and node"
                seconds["merges"] += times.children_user + times.children_system  # of those that have ended
            seconds[of] += times.user + times.system
    return seconds


def private_bytes() -> int:
    """Memory that only these processes use, and that cannot be dropped: mapped layer files are not in it, page cache neither."""
    total = 0
    for process in tree():
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss_Anon:"))
    return total


class PeakMemory(threading.Thread):
    """Looks now and then while its `with` lasts."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._done = threading.Event()
        self.peak_bytes = 0

    def run(self) -> None:
        while True:
            self.peak_bytes = max(self.peak_bytes, private_bytes())
            if self._done.wait(LOOK_EVERY_S):
                return

    def __enter__(self) -> PeakMemory:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self.join()


def alone(work: Callable[..., T], *arguments: Any) -> T:
    """Runs a function in a process of its own, with a JVM of its own, so that what it leaves behind costs no one else.

    Raises what the function raises.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()
