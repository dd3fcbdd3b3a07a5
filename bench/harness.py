"""What all benchmarks share: timing, the result schema, the machine, and a check that it was idle."""

from __future__ import annotations

import json
import math
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
from blake3 import blake3

BENCH = Path(__file__).parent
RESULTS = BENCH / "results"
UNFINISHED = RESULTS / ".unfinished.json"
MEASURED = ("nosync", "lsm", "replication", "bench")
"""Directories whose code decides what a benchmark finds."""
BUSY_SHARE = 0.25
"""Of the cores: where something else takes more, figures would mislead."""
_LOOKS, _LOOK_S = 10, 2.0


@dataclass(frozen=True)
class Result:
    """Holds one measurement. `ratio` is value / baseline_value, in the unit's own direction."""

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
    baseline_spread: float | None = None
    baseline_repeats: int | None = None
    """None: as ours."""


@dataclass(frozen=True)
class Samples:
    """Holds the seconds of repeated calls."""

    seconds: Sequence[float]

    def percentile(self, p: float) -> float:
        """Returns the smallest that `p` percent are not above."""
        ordered = sorted(self.seconds)
        return ordered[max(0, math.ceil(p * len(ordered) / 100) - 1)]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Returns the interquartile range over the median."""
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
    """Returns how many cores something else takes now. Looks again for a while where that is too many.

    The system's own load averages go back a minute, into the benchmark before this one.
    """
    cores = os.cpu_count() or 1
    for _ in range(_LOOKS):
        load: float = psutil.cpu_percent(_LOOK_S) / 100 * cores
        if not is_busy(load):
            break
    return round(load, 2)


def is_busy(load: float) -> bool:
    return load > BUSY_SHARE * (os.cpu_count() or 1)


def source_digest(top: Path = BENCH.parent) -> str:
    """Returns the digest of the code that is measured."""
    digest = blake3()
    for path in sorted(path for directory in MEASURED for path in (top / directory).rglob("*.py")):
        digest.update(f"{path.relative_to(top)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest(length=8)


def write(name: str, results: Sequence[Result], load: float, scale: str, seconds: float) -> Path:
    """`seconds`: what the whole benchmark took."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    text = {
        "benchmark": name, "scale": scale, "day": time.strftime("%Y-%m-%d"), "code": source_digest(),
        "took_s": round(seconds), "machine": machine(), "load_before": load, "results": [asdict(r) for r in results],
    }  # fmt: skip
    path.write_text(json.dumps(text, indent=1) + "\n")
    return path


@dataclass
class Progress:
    """Remembers what a run of several benchmarks has done, in a file, so that a run that was interrupted can go on."""

    scale: str
    path: Path = UNFINISHED
    code: str = field(default_factory=source_digest)
    done: list[str] = field(default_factory=list)

    def resume(self) -> list[str]:
        """Returns what an interrupted run of the same code and scale has done; nothing where there was none."""
        try:
            found = json.loads(self.path.read_text())
        except (FileNotFoundError, ValueError):  # none, or one that a crash cut short
            return []
        if (found["scale"], found["code"]) == (self.scale, self.code):
            self.done = found["done"]
        return self.done

    def add(self, name: str) -> None:
        self.done.append(name)
        written = self.path.with_suffix(".new")
        written.write_text(json.dumps({"scale": self.scale, "code": self.code, "done": self.done}))
        written.replace(self.path)

    def finish(self) -> None:
        self.path.unlink(missing_ok=True)
