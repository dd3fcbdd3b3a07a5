"""Processes that die in the middle of an epoch, for real: Spark runs the tasks again, and the layers are the same.

Each case runs its own driver with two executor processes (`local-cluster`). The fault strikes once, from inside a function.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyspark
import pytest

import nosync

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

ROWS = 2_000
EPOCHS = 3

DRIVER = """
import json, sys
from pathlib import Path
from tests.job.test_process_failures import run_driver
print(json.dumps(run_driver(Path(sys.argv[1]), *sys.argv[2:])), flush=True)
"""


def strike(fault: str, marker: Path) -> None:
    """Does the damage, once: whoever creates the marker file first."""
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    worker, daemon = os.getpid(), os.getppid()
    if fault == "frozen":
        marker.write_text(str(worker))
        os.kill(worker, signal.SIGSTOP)
        return
    executor = int(Path(f"/proc/{daemon}/stat").read_text().rsplit(")", 1)[1].split()[1])
    command = Path(f"/proc/{executor}/cmdline").read_bytes()
    assert b"CoarseGrainedExecutorBackend" in command, "the parent of the Python daemon is an executor"
    if fault == "executor":
        os.kill(executor, signal.SIGKILL)
    os.kill(worker, signal.SIGKILL)


def make_flow(fault: str, marker: Path) -> nosync.Dataflow:
    def struck(rows: pa.Table) -> pa.Table:
        if rows.num_rows and rows["n"][0].as_py() >= ROWS and fault != "none":  # in the second epoch
            strike(fault, marker)
        return rows

    flow = nosync.Dataflow("faults")
    source = flow.source("rows", "word string, n bigint")
    totals = source.map("struck", struck, version="1").aggregate(
        "totals", key=["word"], n=nosync.count(), total=nosync.sum("n")
    )
    totals.map("after", lambda rows: rows, version="1").aggregate(
        "sizes", key=["n"], words=nosync.count(), most=nosync.max("total")
    )
    return flow


def run_driver(root: Path, fault: str, master: str = "local-cluster[2,1,1024]") -> dict[str, Any]:
    """The whole job in a process of its own. Returns every layer's digest and what was computed how often."""
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master(master).config("spark.ui.enabled", "false")
    settings = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.log.level": "OFF",
        "spark.executorEnv.PYTHONPATH": os.environ["PYTHONPATH"],
    }
    if fault == "frozen":
        settings |= {
            "spark.speculation": "true",
            "spark.speculation.interval": "200ms",
            "spark.speculation.quantile": "0.5",
            "spark.executor.memory": "1g",
        }
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    found = run_job(spark, root, fault)
    spark.stop()
    return found


def run_job(spark: SparkSession, root: Path, fault: str) -> dict[str, Any]:
    from pyspark.sql import functions as F

    with nosync.open(root / "store") as store:
        job = nosync.Job(make_flow(fault, root / "struck"), store, spark=spark, shards=4)
        for t in range(EPOCHS):
            rows = spark.range(t * ROWS, (t + 1) * ROWS).select(
                F.concat(F.lit("w"), F.col("id") % 97).alias("word"), F.col("id").alias("n")
            )
            job.advance(t, {"rows": rows})
        manifests = store.node.manifests().values()
        digests = {str(entry.id): entry.digest for manifest in manifests for entry in manifest.entries}
        answer = sorted(tuple(row) for row in job.read("sizes").collect())
        whole = store.verify().ok
    return {"digests": digests, "answer": answer, "whole": whole, "struck": (root / "struck").exists()}


def run(root: Path, fault: str, *master: str) -> dict[str, Any]:
    root.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", DRIVER, str(root), fault, *master]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=280)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


long = pytest.mark.long("make cluster")


@pytest.fixture(scope="module")
def undisturbed(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """On one machine, in one process: other tasks on other executors publish the same layers."""
    found = run_job(spark, tmp_path_factory.mktemp("faults"), "none")
    return {**found, "answer": [list(row) for row in found["answer"]]}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", [pytest.param("worker", marks=long), pytest.param("executor", marks=long)])
def test_the_layers_are_those_of_an_undisturbed_run(undisturbed: dict[str, Any], tmp_path: Path, fault: str) -> None:
    found = run(tmp_path / "run", fault)
    assert found["struck"], "the fault must have happened"
    assert found["whole"]
    assert found["answer"] == undisturbed["answer"]
    assert found["digests"] == undisturbed["digests"]
    assert len(found["digests"]) == EPOCHS * 4 * 5


@contextmanager
def two_hosts(root: Path) -> Iterator[str]:
    """A Spark cluster with two workers, each with an address of its own on loopback.

    Spark starts no second copy of a task on the host where the first one runs, and all of a local-cluster is one host.
    """
    home = Path(pyspark.__file__).parent
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    master = f"spark://127.0.0.1:{port}"
    environment = {**os.environ, "SPARK_HOME": str(home)}
    environment.pop("SPARK_LOCAL_IP", None)
    deploy = "org.apache.spark.deploy"
    commands = [[f"{deploy}.master.Master", "--host", "127.0.0.1", "--port", str(port), "--webui-port", "0"]]
    for i in (1, 2):
        own = ["--host", f"127.0.0.{i}", "--webui-port", "0", "--cores", "1", "--memory", "1g"]
        commands.append([f"{deploy}.worker.Worker", *own, "--work-dir", str(root / f"worker{i}"), master])
    started = []
    try:
        for command in commands:
            started.append(
                subprocess.Popen(
                    [home / "bin" / "spark-class", *command], env=environment, stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )  # fmt: skip
        yield master
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(30)


@long
@pytest.mark.timeout(600)
def test_a_frozen_worker_is_overtaken(undisturbed: dict[str, Any], tmp_path: Path) -> None:
    """Speculation: a worker stands still in the middle of its function; a copy elsewhere does its work."""
    with two_hosts(tmp_path) as master:
        try:
            found = run(tmp_path / "run", "frozen", master)
        finally:
            frozen = tmp_path / "run" / "struck"
            with contextlib.suppress(ProcessLookupError, FileNotFoundError, ValueError):
                os.kill(int(frozen.read_text()), signal.SIGKILL)
    assert found["struck"]
    assert found["whole"]
    assert found["digests"] == undisturbed["digests"]
