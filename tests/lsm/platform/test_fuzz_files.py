"""Files of every kind, damaged and forged: shortly here, `make fuzz` reads a million (NOSYNC_FUZZ=N any other number)."""

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

from nosync.lsm.errors import CorruptionError, ReplicationError
from nosync.lsm.layers.reader import LayerReader
from nosync.lsm.platform.env import Env
from nosync.lsm.platform.layout import PLACE_FILE
from nosync.replication.daemon.config import DaemonConfig
from nosync.replication.daemon.daemon import Daemon
from nosync.replication.daemon.members import MEMBERS_FILE, peers_of
from nosync.replication.transport.daemon_files import ADDRESS_FILE, address_of
from tests.conftest import OpenStore
from tests.helpers.forging import forge_layer
from tests.helpers.fuzzing import READERS

ROOT = Path(__file__).parents[3]
INPUTS = int(os.environ.get("NOSYNC_FUZZ", "4000"))
SEED = os.environ.get("NOSYNC_FUZZ_SEED", "1")
PATIENCE_S = 120 + INPUTS // 20


@pytest.mark.timeout(PATIENCE_S + 60)
def test_every_file_is_read_rightly_or_refused(tmp_path: Path) -> None:
    """In a process of its own, whose memory is bounded and which a forged layer may end by a signal."""
    kept = tmp_path / "input"
    ran = subprocess.run(
        [sys.executable, "-m", "tests.helpers.fuzzing", "--inputs", str(INPUTS), "--seed", SEED, "--kept", str(kept)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=None if INPUTS > 4000 else subprocess.PIPE, text=True, check=False,
        timeout=PATIENCE_S,
    )  # fmt: skip
    assert ran.returncode >= 0, (
        f"input {kept.read_text()} of seed {SEED} ended the process by {signal.Signals(-ran.returncode).name}"
    )
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    outcomes = json.loads(ran.stdout.splitlines()[-1])
    assert sum(n for name, n in outcomes.items() if not name.startswith("whole")) == INPUTS
    for kind in READERS:
        assert outcomes.get(f"{kind} read", 0) + outcomes.get(f"{kind} refused", 0) > INPUTS // 30, kind
    assert outcomes["layers refused"] > outcomes["layers read"] > 0, "forged layers get as far as their rows"
    assert outcomes["whole store read"] > 0


# --- what it found ----------------------------------------------------------------------------------------------------


def layer(open_store: OpenStore) -> Path:
    with open_store() as store:
        store.append("s", t=3, rows=pa.table({"k": [1, 2], "text": ["a", "b"]}), key=["k"])
    return next((store.directory.root / "layers").rglob("*.layer"))


@pytest.mark.parametrize("name", ["lower", "upper", "since", "shard", "shards"])
@pytest.mark.parametrize("value", [0.5, 1e308, -1, True, None, "7"])
def test_a_layer_that_says_its_times_otherwise(open_store: OpenStore, name: str, value: object) -> None:
    """A float where a time should be ended the message about it with a TypeError."""
    path = layer(open_store)
    reader = LayerReader.open(path, Env())
    forge_layer(path, fields=lambda said: said.update({name: value}))
    with pytest.raises(CorruptionError, match=path.name):
        LayerReader.open(path, Env(), reader.id)


def test_a_layer_whose_block_ends_at_once(open_store: OpenStore) -> None:
    """pyarrow says StopIteration of it, which generators turn into a RuntimeError."""
    path = layer(open_store)

    def ends(body: bytearray) -> bytearray:
        body[12:16] = bytes(4)  # the length of the first message: the end of a stream
        return body

    forge_layer(path, body=ends)
    with pytest.raises(CorruptionError, match=path.name):
        list(LayerReader.open(path, Env()).blocks())


DAMAGE: list[Any] = [
    b"", b"{", b"[" * 5000, b"null", b"7", b'{"address": 7}', b'{"address": null, "node": "n1"}', b'{"address": "a:1", "tls": 7}',
    b"\xff", b"9" * 5000,
]  # fmt: skip


@pytest.mark.parametrize("text", DAMAGE)
def test_a_daemon_is_found_by_nothing_else(tmp_path: Path, text: bytes) -> None:
    (tmp_path / ADDRESS_FILE).write_bytes(text)
    assert address_of(tmp_path) is None


@pytest.mark.parametrize("name", [ADDRESS_FILE, MEMBERS_FILE, PLACE_FILE])
@pytest.mark.parametrize("kind", ["fifo", "link", "large"])
def test_what_daemons_write_is_a_small_regular_file(tmp_path: Path, name: str, kind: str) -> None:
    """As a FIFO it hung each command, and as a link it led elsewhere."""
    data, path = tmp_path / "data", tmp_path / "data" / name
    data.mkdir()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        (tmp_path / "other").write_text(
            '{"address": "127.0.0.1:1"}' if name == ADDRESS_FILE else '{"n2": "127.0.0.1:1"}'
        )
        path.symlink_to(tmp_path / "other")
    else:
        with path.open("wb") as file:
            file.truncate(1 << 30)
    config = DaemonConfig("n1", data, "127.0.0.1:0", replicas=1)
    if name == MEMBERS_FILE:
        with pytest.raises(ReplicationError, match="is damaged"):
            peers_of(config)
    elif name == ADDRESS_FILE:
        assert address_of(data) is None
    else:
        path.rename(tmp_path / name)
        Daemon(config).node.close()
        (data / name).unlink()
        (tmp_path / name).rename(path)
        Daemon(config).node.close()
        assert path.is_file()
        assert not path.is_symlink()


@pytest.mark.parametrize(
    "text", [b"[" * 5000, b'{"n2": 7}', b'{"n2": "no address"}', b'{"N 2": "a:1"}', b"[]", b"\xff"]
)
def test_members_that_are_none(tmp_path: Path, text: bytes) -> None:
    (tmp_path / MEMBERS_FILE).write_bytes(text)
    with pytest.raises(ReplicationError, match="is damaged"):
        peers_of(DaemonConfig("n1", tmp_path, replicas=1))
