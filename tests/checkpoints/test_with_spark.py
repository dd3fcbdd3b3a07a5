"""Checkpoints of queries that run on Spark: killed, the host's directory wiped, gone on from what is kept.

The oracle is the output of each batch in a run without faults.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import nosync
from nosync.checkpoints.names import Batch
from nosync.testing.daemon_cluster import Daemons, eventually, running
from tests.checkpoints import ordinary_queries

pytestmark = pytest.mark.spark

# Spark's transformWithState, "processor" here, needs its RocksDB store; Spark refuses the query with the other.
NAMES = {
    form: tuple(
        name
        for name in ("aggregate", "join", "dedupe", "processor", "arbitrary")
        if form != "hdfs" or name != "processor"
    )
    for form in ordinary_queries.FORMATS
}
FILES = 8
PATIENCE_S = 240.0
IS_LONG = bool(os.environ.get("NOSYNC_LONG"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a directory with two inputs, of a file for each batch."""
    chance, root = random.Random(5), tmp_path_factory.mktemp("source")
    for side in "ab":
        (root / side).mkdir()
        for i in range(FILES):
            rows = []
            for _ in range(60):
                ms = i * 7000 + chance.randrange(9000)
                at = f"2026-01-01T00:{ms // 60000:02}:{ms % 60000 // 1000:02}.{ms % 1000:03}Z"
                rows.append(json.dumps({"k": f"k{chance.randrange(20)}", "n": chance.randrange(100), "ts": at}))
            (root / side / f"{i:03}.json").write_text("\n".join(rows))
            os.utime(root / side / f"{i:03}.json", (1.7e9 + i, 1.7e9 + i))
    return root


def start(checkpoints: Path, output: Path, source: Path, form: str, variant: str = "") -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        ordinary_queries.__file__,
        checkpoints,
        output,
        source,
        form,
        ",".join(NAMES[form]),
        variant,
    ]
    output.mkdir(parents=True, exist_ok=True)
    with open(output / "log", "ab") as log:
        return subprocess.Popen([*map(str, command)], stdout=log, stderr=log, start_new_session=True)


def finish(process: subprocess.Popen[bytes], output: Path) -> None:
    assert process.wait(timeout=PATIENCE_S) == 0, (output / "log").read_text()[-3000:]


def outputs(output: Path, names: tuple[str, ...]) -> dict[str, dict[int, list[str]]]:
    return {name: {int(p.stem): json.loads(p.read_text()) for p in (output / name).glob("*.json")} for name in names}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("form", ordinary_queries.FORMATS if IS_LONG else ("v2",))
def test_a_host_is_lost_and_its_queries_go_on_elsewhere(tmp_path: Path, source: Path, form: str) -> None:
    names = NAMES[form]
    finish(start(tmp_path / "free-ck", tmp_path / "free", source, form), tmp_path / "free")
    free = outputs(tmp_path / "free", names)
    assert all(len(batches) >= FILES for batches in free.values())

    with running(tmp_path / "cluster", ("n1", "n2"), replicas=2) as daemons:
        lose_the_host(tmp_path, source, form, free, daemons)


def lose_the_host(
    tmp_path: Path, source: Path, form: str, free: dict[str, dict[int, list[str]]], daemons: Daemons
) -> None:
    """`free`: the outputs of the same queries in a run without faults."""
    names, host, data = NAMES[form], tmp_path / "host", daemons.data("n1")
    watches = {name: nosync.checkpoints.watch(host / name, data, name=name) for name in names}
    process = start(host, tmp_path / "out", source, form)
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
    finish(start(tmp_path / "elsewhere", tmp_path / "out", source, form), tmp_path / "out")
    assert outputs(tmp_path / "out", names) == free

    # The same from an older batch, and other code from there.
    for name in names:
        nosync.checkpoint(name, data).restore(tmp_path / "same" / name, 2)
        nosync.checkpoint(name, data).fork(tmp_path / "fork" / name, 2)
    finish(start(tmp_path / "same", tmp_path / "same-out", source, form), tmp_path / "same-out")
    assert outputs(tmp_path / "same-out", names) == {
        name: {t: rows for t, rows in batches.items() if t > 2} for name, batches in free.items()
    }
    finish(start(tmp_path / "fork", tmp_path / "fork-out", source, form, "x10"), tmp_path / "fork-out")
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
        assert len(rows) == len(last_sums(free["arbitrary"], 2))
    finally:
        spark.stop()


def last_sums(batches: dict[int, list[str]], until: int) -> dict[str, int]:
    """Returns the last sum of each key, up to a batch."""
    found: dict[str, int] = {}
    for t in sorted(batches):
        if t <= until:
            found |= {row["k"]: row["sum"] for row in map(json.loads, batches[t])}
    return found
