"""A Spark standalone cluster with a daemon on every host, each with a data directory of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyspark

import nosync
from nosync.proto.v1 import replication_pb2 as pb
from nosync.replication.transport.certs import make_certificates
from nosync.testing.daemon_cluster import eventually
from nosync.testing.namespaces import Hosts, hosts

CHECKOUT = Path(nosync.__file__).parents[1]
SPARK_HOME = Path(pyspark.__file__).parent
DAEMON_PORT, MASTER_PORT, WORKER_PORT = 7500, 7077, 7078


class SparkHosts:
    """`start_all`, then `run_driver`; the rest does harm, or looks."""

    def __init__(self, where: Hosts, root: Path, replicas: int) -> None:
        self.hosts, self.root, self.replicas = where, root, replicas
        self.master = ""
        make_certificates(root / "tls", list(where.names))

    def data(self, host: str) -> Path:
        return self.root / host / "data"

    def log(self, host: str, what: str) -> Path:
        (self.root / host).mkdir(exist_ok=True)
        return self.root / host / f"{what}.log"

    @property
    def _environment(self) -> dict[str, str]:
        return {
            "PYTHONPATH": str(CHECKOUT),
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_HOME": str(SPARK_HOME),
            "SPARK_DAEMON_MEMORY": "256m",
        }

    def start_daemon(self, host: str, *more: str) -> None:
        peers = [
            f"--peer={other}={self.hosts.address(other)}:{DAEMON_PORT}" for other in self.hosts.names if other != host
        ]
        command = [
            sys.executable, "-m", "nosync.cli", "daemon", "--node", host, "--data", str(self.data(host)),
            "--listen", f"{self.hosts.address(host)}:{DAEMON_PORT}", "--replicas", str(self.replicas),
            "--tls", str(self.root / "tls"), *peers, *more,
        ]  # fmt: skip
        log = self.log(host, "daemon")
        process = self.hosts.start(host, command, log, self._environment)

        def is_up() -> bool:
            with contextlib.suppress(OSError, ValueError):
                return bool(json.loads((self.data(host) / "daemon.json").read_text())["pid"] in self.hosts.pids(host))
            assert process.poll() is None, log.read_text()
            return False

        eventually(f"the daemon of {host} serves", is_up)

    def run_program(self, host: str, program: str, *arguments: str) -> str:
        """Runs a Python program on a host, and returns what it prints."""
        out = self.log(host, "program")
        out.unlink(missing_ok=True)
        command = [sys.executable, "-c", program, *arguments]
        code = self.hosts.start(host, command, out, self._environment).wait(timeout=300)
        if code:
            raise AssertionError(out.read_text())
        return out.read_text()

    def start_file(self, host: str, program: Path, *arguments: str) -> subprocess.Popen[bytes]:
        """Starts a Python program on a host. What it prints is in `log(host, "program")`."""
        environment = self._environment | {"SPARK_LOCAL_IP": self.hosts.address(host)}
        command = [sys.executable, str(program), *arguments]
        return self.hosts.start(host, command, self.log(host, "program"), environment)

    def start_master(self, host: str) -> None:
        self.master = f"spark://{self.hosts.address(host)}:{MASTER_PORT}"
        self._spark_class(host, "master", "Master", "--host", self.hosts.address(host), "--port", str(MASTER_PORT))
        eventually("the master is up", lambda: "Starting Spark master" in self.log(host, "master").read_text())

    def start_worker(self, host: str) -> None:
        self._spark_class(
            host, "worker", "Worker", "--host", self.hosts.address(host), "--port", str(WORKER_PORT), "--cores", "1",
            "--memory", "700m", "--work-dir", str(self.root / host / "work"), self.master,
        )  # fmt: skip

    def _spark_class(self, host: str, what: str, name: str, *arguments: str) -> None:
        environment = self._environment | {
            "NOSYNC_DATA": str(self.data(host)),
            "SPARK_LOCAL_DIRS": str(self.root / host / "local"),
            "SPARK_LOCAL_IP": self.hosts.address(host),
        }
        command = [
            "bash",
            str(SPARK_HOME / "bin" / "spark-class"),
            f"org.apache.spark.deploy.{what}.{name}",
            *arguments,
        ]
        self.hosts.start(host, command, self.log(host, what), environment)

    def kill_daemon(self, host: str) -> None:
        about = json.loads((self.data(host) / "daemon.json").read_text())
        os.kill(about["pid"], signal.SIGKILL)

    def daemon_memory_bytes(self, host: str) -> int:
        pid = json.loads((self.data(host) / "daemon.json").read_text())["pid"]
        (line,) = [x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmRSS")]
        return int(line.split()[1]) << 10

    def stop_spark(self, host: str) -> None:
        """Stops everything of a host but its daemon."""
        daemon = json.loads((self.data(host) / "daemon.json").read_text())["pid"]
        for pid in self.hosts.pids(host):
            if pid != daemon:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def start_all(self) -> None:
        self.start_master(self.hosts.names[0])
        for host in self.hosts.names:
            self.start_daemon(host)
        for host in self.hosts.names:
            self.start_worker(host)

    def start_driver(self, host: str, **settings: Any) -> Driver:
        about = {
            "master": self.master, "address": self.hosts.address(host), "data": str(self.data(host)),
            "progress": str(self.root / "progress.jsonl"), "copies": self.replicas,
            "executors": len(self.hosts.names), **settings,
        }  # fmt: skip
        file = self.root / "settings.json"
        file.write_text(json.dumps(about))
        command = [sys.executable, "-m", "nosync.testing.driver", str(file)]
        environment = self._environment | {"SPARK_LOCAL_IP": self.hosts.address(host)}
        return Driver(
            self.hosts.start(host, command, self.log(host, "driver"), environment), Path(about["progress"]),
            self.log(host, "driver"),
        )  # fmt: skip

    def status(self, host: str) -> pb.StatusReply:
        """Asks for the status on the host itself, as an operator there would."""
        program = (
            "import sys, pathlib; from nosync.replication.transport.client import client_of; "
            "sys.stdout.buffer.write(client_of(pathlib.Path(sys.argv[1])).status().SerializeToString())"
        )
        out = self.root / host / "status"
        out.unlink(missing_ok=True)
        code = self.hosts.start(
            host, [sys.executable, "-c", program, str(self.data(host))], out, self._environment
        ).wait(timeout=30)
        if code:
            raise nosync.ReplicationError(out.read_text())
        return pb.StatusReply.FromString(out.read_bytes())


class Driver:
    """A running driver, as its lines of progress say."""

    def __init__(self, process: subprocess.Popen[bytes], progress: Path, log: Path) -> None:
        self.process, self._progress, self._log = process, progress, log

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def lines(self) -> list[dict[str, Any]]:
        if not self._progress.exists():
            return []
        whole = self._progress.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def epochs(self) -> list[dict[str, Any]]:
        return [line for line in self.lines() if "t" in line]

    def wait_for_epoch(self, t: int, patience_s: float = 120.0) -> None:
        def is_there() -> bool:
            assert self.process.poll() in (None, 0), self._log.read_text()[-6000:]
            return any(line["t"] >= t for line in self.epochs())

        eventually(f"epoch {t} is done", is_there, patience_s)

    def finish(self, patience_s: float = 240.0) -> dict[str, Any]:
        """Waits for the end of the program, and returns its last line, with the outcome."""
        code = self.process.wait(timeout=patience_s)
        assert code == 0, self._log.read_text()[-6000:]
        return self.lines()[-1]


@contextlib.contextmanager
def cluster(root: Path, *names: str, replicas: int = 2) -> Iterator[SparkHosts]:
    """Yields started hosts with everything; whatever runs in the end is killed."""
    os.makedirs(root, exist_ok=True)
    with hosts(*names) as found:
        made = SparkHosts(found, root, replicas)
        made.start_all()
        yield made
