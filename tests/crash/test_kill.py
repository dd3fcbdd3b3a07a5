"""kill -9 while several processes publish and the node syncs and merges: whole or absent, and acked means readable."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

import nosync
from nosync.lsm.layers.writer import arrange
from nosync.lsm.model.layer import Description, LayerId, Shard, TraceId
from nosync.testing.daemon_cluster import eventually
from tests.helpers.oracles import state_of
from tests.helpers.progress import shown

CYCLES = int(os.environ.get("NOSYNC_CRASH_CYCLES", "4"))
SHARDS = 3
ROWS = 400
COMPACT_EVERY = 4
MERGING_SHARE = 0.3
"""In so many rounds the node is killed after it has merged, when it goes on to merge what came meanwhile."""

WRITER = """
import sys
import threading
from pathlib import Path
from tests.crash.test_kill import layer_rows, publish
from nosync.lsm.trace.directory import LayerDirectory
directory = LayerDirectory(Path(sys.argv[1]), 128)
shard, t = int(sys.argv[2]), int(sys.argv[3])
pause = threading.Event()
while True:
    publish(directory, shard, t)
    t += 1
    while t > 20 and not (directory.root / "manifests" / "main" / f"{t - 20}.json").exists():
        pause.wait(0.001)  # not too far ahead of what is sealed
"""

NODE = """
import sys
import threading
import nosync
settings = nosync.StoreSettings(retain=2, scan_interval_s=0.01, grace_s=0.0, block_rows=100)
store = nosync.open(sys.argv[1], settings=settings)
t = int(sys.argv[2])
pause = threading.Event()
while True:
    pause.wait(0.01)  # or thousands of epochs a cycle are to be looked at
    try:
        store.seal(t)
    except nosync.NotAvailableError:
        continue
    t += 1
    print(store.safe_point(), flush=True)
"""


def layer_rows(shard: int, t: int) -> pa.Table:
    """What epoch t writes: every key of the shard changes at each third epoch."""
    keys = [k for k in range(shard, ROWS, SHARDS) if (k + t) % 3 == 0]
    return pa.table({"k": pa.array(keys, pa.int64()), "v": pa.array([k * 1_000_003 + t for k in keys], pa.int64())})


def publish(directory: object, shard: int, t: int) -> None:
    id = LayerId(TraceId("kv", "raw", Shard(shard)), Description.of_epoch(t))
    directory.publish(id, arrange(layer_rows(shard, t), ["k"], whose="test"))  # type: ignore[attr-defined]


def merged(root: Path) -> set[str]:
    """Returns the names of merged layers."""
    epochs = [(path.name, *path.name.split("-")[:2]) for path in (root / "layers").rglob("*.layer")]
    return {name for name, lower, upper in epochs if int(upper) > int(lower) + 1}


def expected_state(t: int) -> dict[tuple[object, ...], tuple[object, ...]]:
    state: dict[tuple[object, ...], tuple[object, ...]] = {}
    for e in range(max(0, t - 2), t + 1):  # in three epochs every key changes
        for shard in range(SHARDS):
            state |= {(row["k"],): (row["v"],) for row in layer_rows(shard, e).to_pylist()}
    return state


@pytest.mark.timeout(max(300, 30 * CYCLES))  # a round takes under 3 s where nothing else runs
def test_kill_loop(tmp_path: Path) -> None:
    seed = random.randrange(10**9)
    print(f"seed {seed}")
    choose = random.Random(seed)
    root, acked = tmp_path / "s", -1
    with nosync.open(root) as store:  # the stage and its shards exist; from here on an epoch has a layer of each
        for shard in range(SHARDS):
            publish(store.directory, shard, 0)
        store.seal(0)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    for round in shown(CYCLES, "rounds of kill -9"):
        with nosync.open(root, settings=nosync.StoreSettings(background=False)) as store:
            sealed = store.last_sealed()
            begin = [
                max((int(layer.upper) for layer in store.layers() if layer.shard == s), default=0)
                for s in range(SHARDS)
            ]
        commands = [[sys.executable, "-c", NODE, str(root), str(0 if sealed is None else sealed + 1)]]
        commands += [[sys.executable, "-c", WRITER, str(root), str(s), str(begin[s])] for s in range(SHARDS)]
        children = [
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for command in commands
        ]
        node = children[0]
        assert node.stdout is not None
        for _ in range(choose.randrange(3, 40)):
            said = node.stdout.readline().strip()
            assert said, "the node died by itself"
            acked = max(acked, -1 if said == "None" else int(said))
        if choose.random() < MERGING_SHARE:  # else a node rarely lives until its merging process is there
            before = merged(root)
            eventually("the node has merged", lambda before=before: merged(root) - before)  # type: ignore[misc]
        assert all(child.poll() is None for child in children), "a process died by itself"
        for child in choose.sample(children, len(children)):
            child.send_signal(signal.SIGKILL)
            child.wait()
            assert child.stdout is not None
            child.stdout.close()
        with nosync.open(root, settings=nosync.StoreSettings(background=False, retain=2, grace_s=0.0)) as store:
            safe = store.safe_point()
            assert (-1 if safe is None else safe) >= acked
            assert not store.missing()
            assert store.verify().ok
            assert not list((root / "quarantine").iterdir()), "a visible name is a whole layer"
            readable = range(max(0, store.since()), (store.last_sealed() or 0) + 1)
            for t in {readable[-1], *choose.sample(readable, min(20, len(readable)))}:
                assert state_of(store.read("kv", as_of=t), ["k"]) == expected_state(t)
            if round % COMPACT_EVERY == 0:  # nodes that are killed so soon leave more unmerged with each round
                store.compact()
    assert acked > 0
