"""The peers that operators told a daemon of: a file with a digest, which is read as it was written or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import nosync
from nosync.lsm.platform.json_file import unseal_json
from nosync.replication.daemon.config import DaemonConfig
from nosync.replication.daemon.daemon import Daemon
from nosync.replication.daemon.members import MEMBERS_FILE, peers_of, read_members
from nosync.replication.transport.client import client_of
from nosync.testing.daemon_cluster import free_ports

TOLD = {"n2": "127.0.0.1:7502", "body": "127.0.0.1:7503", "nosync": "127.0.0.1:7504"}
CONFIGURED = {"n2": "127.0.0.1:9999"}


def config(tmp_path: Path) -> DaemonConfig:
    return DaemonConfig("n1", tmp_path, "127.0.0.1:0", CONFIGURED, replicas=1)


def test_a_file_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    assert peers_of(config(tmp_path)) == CONFIGURED
    (tmp_path / MEMBERS_FILE).write_text(json.dumps(TOLD | {"n1": "127.0.0.1:1"}))
    assert peers_of(config(tmp_path)) == TOLD, "names that the file itself has are nodes like any other"
    (tmp_path / MEMBERS_FILE).write_text("{}")
    assert peers_of(config(tmp_path)) == {}, "the last one was taken out"


def test_what_a_daemon_is_told_has_a_digest(tmp_path: Path) -> None:
    port, *others = free_ports(3)
    told = DaemonConfig("n1", tmp_path / "d", f"127.0.0.1:{port}", {"n2": f"127.0.0.1:{others[0]}"}, replicas=1)
    daemon = Daemon(told)
    daemon.start()
    try:
        client = client_of(told.data)
        assert client is not None
        client.change_members({"n3": f"127.0.0.1:{others[1]}"}, ["n2"])
        client.close()
    finally:
        daemon.stop()
    body, _ = unseal_json((told.data / MEMBERS_FILE).read_bytes(), "it")
    assert body == {"peers": {"n3": f"127.0.0.1:{others[1]}"}}
    assert peers_of(told) == {"n3": f"127.0.0.1:{others[1]}"}


def test_no_flipped_bit_makes_other_peers(tmp_path: Path) -> None:
    path = tmp_path / MEMBERS_FILE
    daemon = Daemon(DaemonConfig("n1", tmp_path / "d", "127.0.0.1:0", {}, replicas=1))
    daemon.start()
    try:
        client = client_of(tmp_path / "d")
        assert client is not None
        client.change_members(TOLD, [])
        client.close()
    finally:
        daemon.stop()
    whole = (tmp_path / "d" / MEMBERS_FILE).read_bytes()
    refused = 0
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            assert read_members(path) == TOLD, f"bit {bit}"
        except nosync.ReplicationError:
            refused += 1
    assert refused > 7 * len(whole)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"n2": 7}', '{"n2": "nowhere"}', '{"N2": "127.0.0.1:1"}', "\0" * 90])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / MEMBERS_FILE).write_text(text)
    with pytest.raises(
        nosync.ReplicationError, match=r"members\.json is damaged .*: remove it, and the configured peers"
    ):
        peers_of(config(tmp_path))
