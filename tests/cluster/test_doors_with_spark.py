"""An unchanged query on three hosts with an executor and a door each. A host is lost: what comes out stays the same."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from nosync.testing.daemon_cluster import eventually
from nosync.testing.namespaces import can_make_namespaces, hosts
from nosync.testing.spark_hosts import SparkHosts

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.spark,
    pytest.mark.long("make cluster"),
    pytest.mark.skipif(not can_make_namespaces(), reason="needs a loopback of each host's own: namespaces (root, ip)"),
]

PROGRAM = Path(__file__).with_name("query_on_hosts.py")
SECRET, PORT = "ab" * 24, 7602
BATCHES = 9
PATIENCE_S = 240.0


def write_input(source: Path) -> list[list[list[object]]]:
    """Writes one file for each batch. Returns what all counts are after each."""
    source.mkdir()
    total: Counter[str] = Counter()
    expected = []
    for t in range(BATCHES):
        words = [f"{'abcdefgh'[i % 8]}{(i * 7 + t) % 13}" for i in range(300)]
        total.update(words)
        path = source / f"{t}.json"
        path.write_text("".join(json.dumps({"word": word}) + "\n" for word in words))
        expected.append([[word, n] for word, n in sorted(total.items())])
    return expected


class Query:
    """The query on some hosts: started, waited for, and read."""

    def __init__(self, made: SparkHosts, root: Path) -> None:
        self.made, self.root, self.output = made, root, root / "out"
        self.output.mkdir()
        self.expected = write_input(root / "in")
        self.process: subprocess.Popen[bytes] | None = None
        self.host = ""

    def start(self, host: str) -> None:
        self.host = host
        address = f"webhdfs://127.0.0.1:{PORT}/{SECRET}/words"
        self.process = self.made.start_file(
            host, PROGRAM, self.made.master, self.made.hosts.address(host), address, str(self.root / "in"),
            str(self.output),
        )  # fmt: skip

    def wait_for(self, t: int) -> None:
        assert self.process is not None
        process = self.process

        def is_there() -> bool:
            assert process.poll() in (None, 0), self.log()[-8000:]
            return (self.output / f"{t}.json").exists()

        eventually(f"batch {t} is done", is_there, PATIENCE_S)

    def log(self) -> str:
        return self.made.log(self.host, "program").read_text()

    def check(self) -> None:
        assert self.process is not None
        assert self.process.wait(timeout=PATIENCE_S) == 0, self.log()[-8000:]
        for t, counts in enumerate(self.expected):
            assert json.loads((self.output / f"{t}.json").read_text())["counts"] == counts, f"batch {t}"


@pytest.mark.parametrize(("driver", "lost"), [("n1", "n3"), ("n2", "n2")], ids=["of tasks", "of the driver"])
def test_a_host_is_lost(tmp_path: Path, driver: str, lost: str) -> None:
    with hosts("n1", "n2", "n3") as found:
        made = SparkHosts(found, tmp_path, 2)
        made.start_master("n1")
        for host in found.names:
            made.data(host).mkdir(parents=True)
            (made.data(host) / "checkpoint-secret").write_text(SECRET + "\n")
            (made.data(host) / "checkpoint-secret").chmod(0o600)
            made.start_daemon(host, f"--door=127.0.0.1:{PORT}", "--door-mode=strict")
        for host in found.names:
            made.start_worker(host)
        query = Query(made, tmp_path)
        query.start(driver)
        query.wait_for(3)
        ran_on = {host for t in range(4) for host in json.loads((query.output / f"{t}.json").read_text())["hosts"]}
        assert ran_on == {str(made.data(host)) for host in found.names}, "tasks run on all hosts"
        if lost == driver:
            made.stop_spark(lost)
            # A silent host keeps its cores for long: that is Spark's.
            eventually("the master knows", lambda: "Removing app" in made.log("n1", "master").read_text())
        found.kill(lost)
        if lost == driver:
            query.start("n3")
        query.wait_for(BATCHES - 1)
        query.check()
