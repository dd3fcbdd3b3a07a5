"""A session that was stopped while the job is there: every call says so, and the store is as it was.

In a process of its own: a session is the only one of its JVM, and other tests use theirs.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import nosync
from tests.conftest import OpenStore

CALLS = """
import sys
import nosync
from nosync.spark.session import local_session

spark = local_session(1, "stopped")
flow = nosync.Dataflow("f")
flow.source("s", "k string, v long").aggregate("a", key=["k"], n=nosync.sum("v"))
flow.sql("view", "SELECT k, sum(v) AS n FROM s GROUP BY k", spark=spark)
store = nosync.open(sys.argv[1], retain=100)
job = nosync.Job(flow, store, spark=spark, shards=1)
rows = spark.createDataFrame([("a", 1)], "k string, v long")
job.advance(0, {"s": rows})
job.advance(1, {"s": rows})
branch = job.branch("b", at=0)
spark.stop()
calls = {
    "advance": lambda: job.advance(2, {"s": rows}),
    "advance_batch": lambda: job.advance_batch("q", 0, {"s": rows}),
    "backfill": lambda: job.backfill({"s": rows}, epoch="2"),
    "read": lambda: job.read("a"),
    "changes": lambda: job.changes("a", 0, 1),
    "branch": lambda: job.branch("c", at=0),
    "replay": lambda: branch.replay(),
    "promote": lambda: job.promote(branch),
    "recover": lambda: job.recover(),
    "explain": lambda: job.explain("a", {"k": "a"}),
    "rewind": lambda: job.rewind(0),
    "rescale": lambda: job.rescale(2),
    "upgrade": lambda: job.upgrade(flow),
    "verify_view": lambda: job.verify_view("view"),
    "diff": lambda: nosync.diff(job, branch, "a"),
    "diff_changes": lambda: nosync.diff_changes(job, branch, "a", -1, 0),
    "diff_summary": lambda: nosync.diff_summary(job, branch, "a"),
    "Job": lambda: nosync.Job(flow, store, spark=spark, shards=1),
    "sql": lambda: nosync.Dataflow("g").sql("v", "SELECT 1", spark=spark),
    "views": lambda: nosync.views(spark, store),
}
for name, call in calls.items():
    try:
        call()
        print(name, "nothing was raised")
    except nosync.FlowError as error:
        print(name, "said" if "Spark session" in str(error) and "getOrCreate()" in str(error) else str(error))
    except BaseException as error:
        print(name, type(error).__name__, error)
print(len(calls), "calls")
"""


@pytest.mark.spark
def test_a_stopped_session_is_said_and_nothing_is_changed(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", CALLS, str(tmp_path / "store")], capture_output=True, text=True, timeout=300, check=True
    )
    lines = ran.stdout.strip().splitlines()
    assert lines[-1] == "20 calls"
    assert [line for line in lines[:-1] if not line.endswith(" said")] == []
    with nosync.open(tmp_path / "store") as store:
        assert store.newest() == 1
        assert sorted(store.branches()) == ["b", "main"]


@pytest.mark.parametrize("other", [1, "state/", None])
@pytest.mark.parametrize("compare", [nosync.diff, nosync.diff_summary, partial(nosync.diff_changes, after=0, until=1)])
def test_what_is_no_job_is_not_compared(other: object, compare: Callable[..., object]) -> None:
    with pytest.raises(nosync.InvalidInputError, match="expected two jobs"):
        compare(other, other, stage="a")


def test_a_store_is_no_job_to_compare(open_store: OpenStore) -> None:
    store = open_store()
    with pytest.raises(nosync.InvalidInputError, match="expected two jobs"):
        nosync.diff(store, store, "a")  # type: ignore[arg-type]
    with pytest.raises(nosync.InvalidInputError, match="expected two jobs"):
        nosync.diverges_at(store, store, "a")  # type: ignore[arg-type]
