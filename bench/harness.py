"""What all benchmarks share: timing, the result schema, the machine, and a check that it was idle."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

RESULTS = Path(__file__).parent / "results"
BUSY_LOAD_PER_CORE = 0.75


@dataclass(frozen=True)
class Result:
    """One measurement. `ratio` is value / baseline_value, in the unit's own direction."""

    workload: str
    engine: str
    value: float
    unit: str
    baseline: str = ""
    baseline_value: float | None = None
    ratio: float | None = None
    goal: str = ""
    met: bool | None = None
    spread: float | None = None
    repeats: int = 1
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Samples:
    """Seconds of repeated calls."""

    seconds: Sequence[float]

    def percentile(self, p: float) -> float:
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(p / 100 * len(ordered)))]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Interquartile range over the median."""
        return (self.percentile(75) - self.percentile(25)) / self.median


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def sample(call: Callable[[], Any], repeats: int, warm: int = 1) -> Samples:
    for _ in range(warm):
        call()
    return Samples([timed(call) for _ in range(repeats)])


def paired(first: Callable[[], Any], second: Callable[[], Any], repeats: int, warm: int = 1) -> tuple[Samples, Samples]:
    """Alternates the two calls, so that drift of the machine hits both."""
    for _ in range(warm):
        first()
        second()
    a, b = [], []
    for _ in range(repeats):
        a.append(timed(first))
        b.append(timed(second))
    return Samples(a), Samples(b)


def cpu_s() -> float:
    """Seconds that all cores have spent for this process and those it started: Spark's JVM, its Python workers, daemons."""
    me = psutil.Process()
    total = 0.0
    for process in [me, *me.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def machine() -> dict[str, Any]:
    model = ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else ""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    packages = ("nosync", "pyarrow", "numpy", "rocksdict", "pyspark")
    return {
        "cpu": model or platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
    }


def load_before() -> float:
    return os.getloadavg()[0]


def is_busy(load: float) -> bool:
    return load > BUSY_LOAD_PER_CORE * (os.cpu_count() or 1)


def write(name: str, results: Sequence[Result], load: float) -> Path:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    text = {"benchmark": name, "machine": machine(), "load_before": load, "results": [asdict(r) for r in results]}
    path.write_text(json.dumps(text, indent=1) + "\n")
    return path
