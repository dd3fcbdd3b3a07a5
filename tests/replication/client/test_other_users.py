"""A job of another user than the daemon's, as docs/daemons.md says; and what is told where files are not shared.

Each process begins as root and becomes the user when it has imported all that it needs, so this needs root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import nosync

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two users")
GROUP, KEEPER, WORKER = 54320, 54321, 54322
PROGRAM = """
import os, sys
from pathlib import Path
import pandas, pyarrow as pa
import nosync
from nosync.lsm.trace.directory import LayerDirectory
from nosync.lsm.platform.store_marker import read_marker
from nosync.lsm.platform.env import Env
from nosync.lsm.model.layer import Description, LayerId, Shard, TraceId
from nosync.lsm.layers.writer import arrange
from nosync.replication.client import remote_node as attached
from nosync.replication.daemon import daemon

def record(t):  # what the daemon's user does: seals what is there, makes it durable, merges it
    with nosync.open(root) as store:
        if t == 0:
            store.append("counts", t=t, rows=pa.table({"k": [t]}), key=["k"])
        store.seal(t)
        store.sync()
        store.compact()
        return store.safe_point()

def publish(t):  # what a job's task does
    directory = LayerDirectory(Path(root), read_marker(Path(root), Env()).key_groups)
    id = LayerId(TraceId("counts", "raw", Shard(0)), Description.of_epoch(t))
    return directory.publish(id, arrange(pa.table({"k": [t]}), ["k"], whose="it")).existed

root, user, group, umask, code = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
os.setgroups([])
os.setresgid(group, group, group)
os.setresuid(user, user, user)
os.umask(umask)
try:
    print(eval(code))
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


@pytest.fixture
def data() -> Iterator[Path]:
    """A data directory that others may reach, unlike those of pytest."""
    made = Path(tempfile.mkdtemp())
    made.chmod(0o755)
    yield made / "d"
    shutil.rmtree(made)


def as_user(user: int, umask: int, data: Path, code: str) -> str:
    """What a process of that user says."""
    command = [sys.executable, "-c", PROGRAM, str(data), str(user), str(GROUP), str(umask), code]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout.strip()


def test_two_users_of_one_group_work_in_one_directory(data: Path) -> None:
    data.mkdir()
    os.chown(data, KEEPER, GROUP)
    data.chmod(0o2770)
    assert as_user(KEEPER, 0o007, data, "record(0)") == "0"
    for t in (1, 2):
        assert as_user(WORKER, 0o007, data, f"publish({t})") == "False"
        assert as_user(KEEPER, 0o007, data, f"record({t})") == str(t)
    with nosync.open(data, read_only=True) as store:
        assert store.read("counts").num_rows == 3
        assert len(store.layers()) == 1, "what the other user made was merged, and is removed"
    shutil.rmtree(data / "ready")  # or the daemon's own file would be written to
    assert as_user(WORKER, 0o077, data, "publish(3)") == "False"
    assert as_user(KEEPER, 0o077, data, "record(3)") == "3", "the umask decides nothing"


def readable_to_the_group(data: Path) -> None:
    data.mkdir()
    os.chown(data, os.getuid(), GROUP)
    data.chmod(0o2750)


def test_a_job_that_may_only_read_the_lock_is_told_who_holds_it(data: Path) -> None:
    """The holder is found without the right to write, or nothing is known of a daemon that is there."""
    readable_to_the_group(data)
    with nosync.open(data):
        said = as_user(WORKER, 0o007, data, "nosync.open(root)")
        assert said.startswith(f"StoreLockedError: {data} is open in process {os.getpid()}")
    said = as_user(WORKER, 0o007, data, "nosync.open(root)")
    assert said.startswith(f"StorageError: cannot lock {data / 'LOCK'}: Permission denied")


def test_what_is_not_shared_is_a_matter_of_permission(data: Path) -> None:
    """As with umask 077 of the daemon: it is not said that it does not answer, nor that there is none."""
    readable_to_the_group(data)
    with nosync.open(data):
        (data / "daemon.json").write_text('{"address": "127.0.0.1:1", "node": "n1"}')
        (data / "daemon.json").chmod(0o600)
        said = as_user(WORKER, 0o007, data, "nosync.open(root)")
        assert said.startswith(f"StorageError: cannot read {data / 'daemon.json'}: Permission denied"), said
        data.chmod(0o700)
        for read_only in (False, True):
            said = as_user(WORKER, 0o007, data, f"nosync.open(root, read_only={read_only})")
            assert said.startswith("StorageError: cannot "), said
            assert "ermission denied" in said
