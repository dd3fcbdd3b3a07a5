"""A cluster of Flink on the same hosts as ours in `bench.takeover_hosts`: a task manager on each."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.flink import flink_home, flink_python, variables
from nosync.testing.daemon_cluster import eventually
from nosync.testing.driver import PAD_BYTES
from nosync.testing.namespaces import Hosts, hosts

NAMES = ("n1", "n2", "n3")
SPARE = "n2"
PROGRAM = Path(__file__).parent / "peers" / "flink_failure.py"
PATIENCE_S = 300.0


class FlinkHosts:
    """The job manager on n1; the job's two tasks on n1 and n3, and n2 is there to take over."""

    def __init__(self, where: Hosts, root: Path, settings: dict[str, str]) -> None:
        self.hosts, self._root, self._settings = where, root, settings

    def log(self, host: str, what: str) -> Path:
        return self._root / f"{host}-{what}.log"

    def _start(self, host: str, script: str, **settings: str) -> None:
        master = self.hosts.address(NAMES[0])
        all_settings = {
            "jobmanager.rpc.address": master, "jobmanager.bind-host": "0.0.0.0", "rest.address": master,
            "rest.bind-address": "0.0.0.0", "taskmanager.bind-host": "0.0.0.0", "jobmanager.memory.process.size": "1g",
            "taskmanager.memory.process.size": "1500m", "taskmanager.numberOfTaskSlots": "1",
            "io.tmp.dirs": str(self._root / f"{host}-tmp"), **self._settings, **settings,
        }  # fmt: skip
        (self._root / f"{host}-tmp").mkdir(exist_ok=True)
        given = [word for name, value in all_settings.items() for word in ("-D", f"{name}={value}")]
        command = ["bash", str(flink_home() / "bin" / script), "start-foreground", *given]
        environment = variables() | {"FLINK_LOG_DIR": str(self._root), "PYTHONPATH": ""}
        self.hosts.start(host, command, self.log(host, script), environment)

    def start(self) -> None:
        self._start(NAMES[0], "jobmanager.sh")
        for host in NAMES:
            if host != SPARE:
                self.start_task_manager(host)

    def start_task_manager(self, host: str, slots: int = 1) -> None:
        settings = {"taskmanager.host": self.hosts.address(host), "taskmanager.numberOfTaskSlots": str(slots)}
        self._start(host, "taskmanager.sh", **settings)
        log = self.log(host, "taskmanager.sh")
        eventually(
            f"the task manager of {host} is registered",
            lambda: log.exists() and "Successful registration at resource manager" in log.read_text(), PATIENCE_S,
        )  # fmt: skip

    def seconds_to_run_again(self, keys: int, harm: Callable[[Hosts], None]) -> dict[str, Any]:
        """Returns the seconds from the harm until all tasks run again, with their state; and how large that is."""
        about = {
            "rest": self.hosts.address(NAMES[0]), "keys": keys, "pad_bytes": PAD_BYTES, "rows_per_s": 2_000,
            "checkpoints": (self._root / "checkpoints").as_uri(),
            "settings": {
                **self._settings, "execution.target": "remote", "rest.address": self.hosts.address(NAMES[0]), "rest.port": "8081",
            },
        }  # fmt: skip
        out = self.log(NAMES[0], "job")
        environment = variables() | {"PYTHONPATH": ""}
        process = self.hosts.start(NAMES[0], [str(flink_python()), str(PROGRAM), json.dumps(about)], out, environment)

        def lines() -> list[dict[str, Any]]:
            if process.poll():
                raise RuntimeError(f"Flink failed:\n{out.read_text()[-3000:]}")
            return [json.loads(line) for line in out.read_text().splitlines() if line.startswith("{")]

        eventually("all keys are in Flink's state", lambda: bool(lines()), PATIENCE_S)
        self.start_task_manager(SPARE, slots=2)
        time.sleep(2.0)
        began_s = time.monotonic()
        harm(self.hosts)
        eventually("Flink's tasks run again", lambda: len(lines()) > 1, PATIENCE_S)
        loaded, again = lines()
        return {**loaded, "seconds": again["at_s"] - began_s}


@contextmanager
def flink_cluster(root: Path, settings: dict[str, str]) -> Iterator[FlinkHosts]:
    os.makedirs(root / "checkpoints")
    with hosts(*NAMES) as found:
        made = FlinkHosts(found, root, settings)
        made.start()
        yield made
