"""Checkpoints of queries that run on Spark: killed, the host's directory wiped, gone on from what is kept.

The oracle is the output of each batch in a run without faults.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

import nosync
from nosync.checkpoints.names import Batch
from nosync.testing.daemon_cluster import Daemons, eventually, running
from tests.checkpoints import ordinary_queries
from tests.checkpoints.spark_runs import FILES, NAMES, PATIENCE_S, finish, make_source, outputs, start

pytestmark = pytest.mark.spark

IS_LONG = bool(os.environ.get("NOSYNC_LONG"))


def names_of(form: str) -> tuple[str, ...]:
    return NAMES[form] if IS_LONG else ("processor", "arbitrary")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source(tmp_path_factory.mktemp("source"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("form", ordinary_queries.FORMATS if IS_LONG else ("v2",))
@pytest.mark.long("make checkpoints")
def test_a_host_is_lost_and_its_queries_go_on_elsewhere(tmp_path: Path, source: Path, form: str) -> None:
    names = names_of(form)
    finish(start(tmp_path / "free-ck", tmp_path / "free", source, form, names=names), tmp_path / "free")
    free = outputs(tmp_path / "free", names)
    assert all(len(batches) >= FILES for batches in free.values())

    with running(tmp_path / "cluster", ("n1", "n2"), replicas=2) as daemons:
        lose_the_host(tmp_path, source, form, free, daemons)


def lose_the_host(
    tmp_path: Path, source: Path, form: str, free: dict[str, dict[int, list[str]]], daemons: Daemons
) -> None:
    """`free`: the outputs of the same queries in a run without faults."""
    names, host, data = names_of(form), tmp_path / "host", daemons.data("n1")
    watches = {name: nosync.checkpoints.watch(host / name, data, name=name) for name in names}
    process = start(host, tmp_path / "out", source, form, names=names)
    eventually(
        "every query has four batches on two nodes",
        lambda: all((watch.checkpoint.status(last=0).safe or 0) >= 3 for watch in watches.values()),
        PATIENCE_S,
    )
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    daemons.kill("n1")
    for watch in watches.values():
        watch.abandon()
    daemons.wipe("n1")
    shutil.rmtree(host)  # another path: no name in what is kept may lead back to it

    data = daemons.data("n2")
    for name in names:
        kept = nosync.checkpoint(name, data)
        newest = kept.status(last=0).newest
        assert newest is not None
        assert newest >= 3, kept.status()
        assert kept.restore(tmp_path / "elsewhere" / name).batch == newest
    finish(start(tmp_path / "elsewhere", tmp_path / "out", source, form, names=names), tmp_path / "out")
    assert outputs(tmp_path / "out", names) == free

    # The same from an older batch, and other code from there.
    for name in names:
        nosync.checkpoint(name, data).restore(tmp_path / "same" / name, 2)
        nosync.checkpoint(name, data).fork(tmp_path / "fork" / name, 2)
    if IS_LONG:
        finish(start(tmp_path / "same", tmp_path / "same-out", source, form, names=names), tmp_path / "same-out")
        assert outputs(tmp_path / "same-out", names) == {
            name: {t: rows for t, rows in batches.items() if t > 2} for name, batches in free.items()
        }
    finish(start(tmp_path / "fork", tmp_path / "fork-out", source, form, "x10", names), tmp_path / "fork-out")
    forked = outputs(tmp_path / "fork-out", names)
    for name in {"processor", "arbitrary"} & set(names):
        before, after = last_sums(free[name], 2), last_sums(free[name], 99)
        assert last_sums(forked[name], 99) == {
            k: before.get(k, 0) + 10 * (after[k] - before.get(k, 0)) for k in last_sums(forked[name], 99)
        }

    # The state as of a batch, by Spark's own reader.
    spark = ordinary_queries.session(form)
    try:
        path = nosync.checkpoint("arbitrary", data).at(Batch(2)).path
        rows = spark.read.format("statestore").load(str(path)).selectExpr("key.*", "value.*").collect()
        before, after = last_sums(free["arbitrary"], 2), last_sums(free["arbitrary"], newest_of(data, "arbitrary"))
        assert len(rows) == len(before)
        found = nosync.checkpoint("arbitrary", data).diff(spark, 2, newest_of(data, "arbitrary")).collect()
        changes = {row["key"]["k"]: (row["before"], row["after"]) for row in found}
        assert changes.keys() == {k for k in after if before.get(k) != after[k]}
        assert all("total" not in str(b) or b != a for b, a in changes.values())
    finally:
        spark.stop()


def newest_of(data: Path, name: str) -> int:
    newest = nosync.checkpoint(name, data).status(last=0).newest
    assert newest is not None
    return newest


def last_sums(batches: dict[int, list[str]], until: int) -> dict[str, int]:
    """Returns the last sum of each key, up to a batch."""
    found: dict[str, int] = {}
    for t in sorted(batches):
        if t <= until:
            found |= {row["k"]: row["sum"] for row in map(json.loads, batches[t])}
    return found
