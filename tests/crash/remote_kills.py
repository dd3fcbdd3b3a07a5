"""kill -9 of a process that copies into an object store, again and again: nothing that was remotely safe is lost.

`make remote` runs longer; `python -m tests.crash.remote_kills --cycles 300 --url s3://bucket/prefix` against a store of
yours.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

import nosync
from nosync.replication.remote.cloud import open_bucket
from nosync.replication.remote.restore import restore
from tests.helpers.progress import shown

_STAGE = "s"
_SLOWEST_S = 60.0


def rows_at(t: int) -> pa.Table:
    """Returns what epoch `t` changes."""
    many = 2 + 400 * (t % 7 == 0)
    return pa.table({"k": [f"{t}-{i}" for i in range(many)] + ["all"], "n": [t] * (many + 1)})


def write(root: str, url: str) -> None:
    """Seals epochs until it is killed, and says up to where they are remotely safe."""
    settings = nosync.StoreSettings(grace_s=0.1, scan_interval_s=0.1, archive_epochs=20)
    remote = nosync.RemoteSettings(url, flush_s=0.02, flush_bytes=20_000, large_bytes=10_000, grace_s=1.0, close_s=0.0)
    with nosync.open(root, remote=remote, settings=settings, retain=5) as store:
        said = -1
        while True:
            last = store.last_sealed()
            t = 0 if last is None else last + 1
            store.append(_STAGE, t=t, rows=rows_at(t), key=["k"])
            store.seal(t)
            (status,) = store.status().remotes
            if status.safe_point is not None and status.safe_point > said:
                said = status.safe_point
                print(said, flush=True)


def check(url: str, directory: Path, acknowledged: int) -> int:
    """Restores the store, and returns its newest epoch. Raises AssertionError where something is lost or wrong."""
    report = restore(open_bucket(url), directory)
    assert report.epoch is not None, f"nothing is there, and {acknowledged} was remotely safe"
    assert report.epoch >= acknowledged, f"{acknowledged} was remotely safe, and {report.epoch} was restored"
    with nosync.open(directory, read_only=True) as store:
        found = store.read(_STAGE)
    expected = {k: n for t in range(report.epoch + 1) for k, n in zip(*rows_at(t).to_pydict().values(), strict=True)}
    assert dict(zip(found["k"].to_pylist(), found["n"].to_pylist(), strict=True)) == expected
    return report.epoch


def run(cycles: int, url: str, directory: Path, seed: int = 0) -> int:
    """Kills the writer so many times; every few times its directory is lost as well. Returns the newest epoch."""
    random, root, acknowledged = np.random.default_rng(seed), directory / "store", -1
    newest = -1
    for cycle in shown(cycles, "kills"):
        command = [sys.executable, "-m", "tests.crash.remote_kills", "--write", str(root), "--url", url]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        end_s = time.monotonic() + _SLOWEST_S
        first = process.stdout.readline()  # it has begun to copy
        assert first, f"cycle {cycle}: the writer ended by itself"
        assert time.monotonic() < end_s
        time.sleep(float(random.uniform(0.0, 0.4)))  # not a wait: it is killed at any moment
        process.send_signal(signal.SIGKILL)
        said = [first, *process.stdout.read().splitlines()]
        process.wait()
        acknowledged = max([acknowledged, *(int(line) for line in said if line.strip().isdigit())])
        if cycle % 3 == 2:
            shutil.rmtree(root)
            newest = check(url, root, acknowledged)
        else:
            with tempfile.TemporaryDirectory(dir=directory) as copy:
                newest = check(url, Path(copy, "restored"), acknowledged)
    return newest


def main() -> None:
    """See the text at the top."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--write")
    arguments.add_argument("--url", required=True)
    arguments.add_argument("--cycles", type=int, default=20)
    arguments.add_argument("--seed", type=int, default=0)
    given = arguments.parse_args()
    if given.write:
        write(given.write, given.url)
    with tempfile.TemporaryDirectory(prefix="nosync-kills-") as directory:
        newest = run(given.cycles, given.url, Path(directory), given.seed)
    print(f"{given.cycles} kills: nothing remotely safe is lost; {newest + 1} epochs are there")


if __name__ == "__main__":
    main()
