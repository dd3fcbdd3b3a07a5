"""What the programs of Flink share. Runs in Flink's own environment."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyflink.common import Configuration
from pyflink.table import EnvironmentSettings, TableEnvironment

BASE = {
    "parallelism.default": "2",
    "state.backend.type": "rocksdb",
    "execution.checkpointing.incremental": "true",
    "execution.checkpointing.interval": "1s",
    "taskmanager.memory.managed.size": "1600m",  # for RocksDB: the size of the process has no effect in one JVM
    "rest.bind-port": "0",
}


def table_environment(about: dict[str, Any]) -> TableEnvironment:
    """Returns an environment for streams, with RocksDB and checkpoints into `about["checkpoints"]`; `about["settings"]`
    are more of Flink's.
    """
    configuration = Configuration()
    for name, value in {
        **BASE,
        "execution.checkpointing.dir": about["checkpoints"],
        "state.changelog.dstl.dfs.base-path": about["checkpoints"],  # used where the changelog is enabled
        **about.get("settings", {}),
    }.items():
        configuration.set_string(name, value)
    settings = EnvironmentSettings.new_instance().in_streaming_mode().with_configuration(configuration).build()
    return TableEnvironment.create(settings)


def spent() -> tuple[float, int]:
    """Returns the processor seconds, and bytes written, of this process and those it started (Flink runs in a JVM of
    its own).
    """
    cpu_s, written = 0.0, 0
    for process in _tree(os.getpid()):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            user, system, *_ = (process / "stat").read_text().rpartition(")")[2].split()[11:]
            lines = (process / "io").read_text().splitlines()
            cpu_s += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
            written += sum(int(line.split()[1]) for line in lines if line.startswith("write_bytes:"))
    return cpu_s, written


def _tree(pid: int) -> Iterator[Path]:
    process = Path("/proc") / str(pid)
    yield process
    for task in process.glob("task/*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            for child in task.read_text().split():
                yield from _tree(int(child))
