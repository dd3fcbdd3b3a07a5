"""What a computation costs besides time: processor seconds, bytes written, and memory, of a process and all that it started."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable
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
    """Says what a process tree has spent since it began. What children spent that have ended is in it."""

    cpu_s: float
    written_bytes: int

    def __sub__(self, before: Spent) -> Spent:
        return Spent(self.cpu_s - before.cpu_s, self.written_bytes - before.written_bytes)


def tree() -> list[psutil.Process]:
    """Returns this process and those it started: Spark's JVM, its Python workers, merges, daemons."""
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
    """Returns the processor seconds so far: of the JVM, of Python tasks, of this process (the driver and its node), and
    of merges.
    """
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


@dataclass(frozen=True)
class Memory:
    """Says how much memory several processes use: their own, which cannot be dropped, and what they have mapped from
    files, which can be. Page cache that nobody has mapped is in neither.
    """

    own_bytes: int = 0
    mapped_bytes: int = 0


def memory(processes: Iterable[psutil.Process]) -> Memory:
    found = {"Pss_Anon:": 0, "Pss_File:": 0}
    for process in processes:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
                name, size_kb, *_ = line.split()
                if name in found:
                    found[name] += int(size_kb) << 10
    return Memory(*found.values())


class PeakMemory(threading.Thread):
    """Looks now and then while its `with` lasts. `with_this`: this process is one of what is measured."""

    def __init__(self, *, with_this: bool = True) -> None:
        super().__init__(daemon=True)
        self._done = threading.Event()
        self._first = 0 if with_this else 1
        self.peak = Memory()

    def run(self) -> None:
        while True:
            now = memory(tree()[self._first :])
            self.peak = Memory(max(self.peak.own_bytes, now.own_bytes), max(self.peak.mapped_bytes, now.mapped_bytes))
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
