"""Processes that die in the middle of an epoch, for real: Spark runs the tasks again, and the layers are the same.

Each case runs its own driver with two executor processes (`local-cluster`). The fault strikes once, from inside a function.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import nosync

pytestmark = pytest.mark.spark

ROWS = 2_000
EPOCHS = 3

DRIVER = """
import json, sys
from pathlib import Path
from tests.spark.test_failures import run_driver
print(json.dumps(run_driver(Path(sys.argv[1]), sys.argv[2])), flush=True)
"""


def strike(fault: str, marker: Path) -> None:
    """Does the damage, once: whoever creates the marker file first."""
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    worker, daemon = os.getpid(), os.getppid()
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


def run_driver(root: Path, fault: str) -> dict[str, Any]:
    """The whole job in a process of its own. Returns every layer's digest and what was computed how often."""
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as F

    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master("local-cluster[2,1,1024]").config("spark.ui.enabled", "false")
    settings = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.log.level": "OFF",
        "spark.executorEnv.PYTHONPATH": os.environ["PYTHONPATH"],
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    with nosync.open(root / "store") as store:
        job = nosync.Job(make_flow(fault, root / "struck"), store, spark=spark, shards=4)
        for t in range(EPOCHS):
            rows = spark.range(t * ROWS, (t + 1) * ROWS).select(
                F.concat(F.lit("w"), F.col("id") % 97).alias("word"), F.col("id").alias("n")
            )
            job.advance(t, {"rows": rows})
        manifests = store.node.manifests().values()
        found = {str(entry.id): entry.digest for manifest in manifests for entry in manifest.entries}
        answer = sorted(tuple(row) for row in job.read("sizes").collect())
        whole = store.verify().ok
    spark.stop()
    return {"digests": found, "answer": answer, "whole": whole, "struck": (root / "struck").exists()}


def run(root: Path, fault: str) -> dict[str, Any]:
    root.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", DRIVER, str(root), fault]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=280)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("faults") / "none", "none")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", ["worker", "executor"])
def test_the_layers_are_those_of_an_undisturbed_run(undisturbed: dict[str, Any], tmp_path: Path, fault: str) -> None:
    found = run(tmp_path / "run", fault)
    assert found["struck"], "the fault must have happened"
    assert found["whole"]
    assert found["answer"] == undisturbed["answer"]
    assert found["digests"] == undisturbed["digests"]
    assert len(found["digests"]) == EPOCHS * 4 * 5
