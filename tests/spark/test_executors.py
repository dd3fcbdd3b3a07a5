"""Executors whose Python has no nosync: a job says so when it is made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytestmark = pytest.mark.spark
ROOT = Path(__file__).parents[2]

DRIVER = """
import json, os, sys, time
sys.path[:0] = [sys.argv[1]]
from pathlib import Path
from pyspark.sql import SparkSession
import nosync
from nosync.spark import executors

asked = []
ask = executors._ask
executors._ask = lambda spark: asked.append(1) or ask(spark)
root, bare, full = map(Path, sys.argv[2:])
(root / "stores").mkdir()

def session(python, configured):
    os.environ["PYSPARK_PYTHON"] = str(python)
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").config("spark.log.level", "OFF")
    builder = builder.config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
    if configured:
        builder = builder.config("spark.python.daemon.module", "nosync.spark.worker_daemon")
    return builder.getOrCreate()

flow = nosync.Dataflow("f")
flow.source("rows", "k string, n bigint").aggregate("counts", key=["k"], n=nosync.count())
found = {}
for name, python, configured in (("plain", bare, False), ("configured", bare, True), ("full", full, False)):
    spark = session(python, configured)
    with nosync.open(root / "stores" / name) as store:
        asked.clear()
        try:
            nosync.Job(flow, store, spark=spark, shards=2)
            started = time.perf_counter()
            executors._able.clear()
            job = nosync.Job(flow, store, spark=spark, shards=2)
            asking = time.perf_counter() - started
            started = time.perf_counter()
            job = nosync.Job(flow, store, spark=spark, shards=2)
            found["seconds"] = [asking, time.perf_counter() - started]
            job.advance(0, {"rows": spark.range(3).selectExpr("string(id) AS k", "id AS n")})
            found[name] = len(asked), store.read("counts").num_rows
        except nosync.FlowError as error:
            found[name] = str(error), store.last_sealed()
    spark.stop()
print("found", json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[object]]:
    """What a driver of its own, whose workers have other Pythons, is told."""
    root = tmp_path_factory.mktemp("executors")
    bare, full = root / "bare", root / "full"
    for home in (bare, full):
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    (site,) = full.glob("lib/python*/site-packages")
    (site / "all.pth").write_text(f"{ROOT}\n{sysconfig.get_path('purelib')}\n")
    environment = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"}
    environment.pop("PYTHONPATH", None)  # workers would find nosync there
    ran = subprocess.run(
        [sys.executable, "-c", DRIVER, str(ROOT), str(root), str(bare / "bin" / "python"), str(full / "bin" / "python")],
        cwd=root, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    said = [line for line in ran.stdout.splitlines() if line.startswith("found")]
    assert said, ran.stdout + ran.stderr
    answers: dict[str, list[object]] = json.loads(said[0].removeprefix("found"))
    print(answers)
    return answers


@pytest.mark.long
@pytest.mark.parametrize("session", ["plain", "configured"])
def test_a_job_on_executors_without_nosync_is_refused_when_it_is_made(
    found: dict[str, list[object]], session: str
) -> None:
    """`configured`: Spark's daemon of workers is nosync's, so that not even a worker starts."""
    told, sealed = found[session]
    version = sys.version.split()[0]
    assert f"bare/bin/python {version} without nosync" in str(told)
    assert "set PYSPARK_PYTHON" in str(told)
    assert "\n" not in str(told)
    assert sealed is None


@pytest.mark.long
def test_executors_that_have_it_are_asked_once_in_an_application(found: dict[str, list[object]]) -> None:
    """Twice here, for the driver forgets the first answer."""
    assert found["full"] == [2, 3]
