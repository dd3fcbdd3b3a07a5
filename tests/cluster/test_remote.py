"""Daemons that copy into one object store: all nodes are lost, and a restored directory has what was remotely safe."""

from __future__ import annotations

import subprocess
import urllib.request
from pathlib import Path

import pytest

import nosync
from nosync.replication.daemon.config import DaemonConfig, make_config, read_config
from nosync.replication.remote.cloud import open_bucket
from nosync.replication.remote.restore import restore
from nosync.replication.remote.status import bucket_status
from nosync.replication.remote.stubs import is_lazy
from nosync.testing.daemon_cluster import Daemons, eventually, free_ports, running
from tests.helpers.daemons import expected, publish, state


def remotely_safe(daemons: Daemons, node: str) -> int | None:
    with nosync.open(daemons.data(node), read_only=True) as store:
        (status,) = store.status().remotes
        assert status.problem == ""
        return status.safe_point


@pytest.mark.parametrize("nodes", [("n1", "n2"), ("n1", "n2", "n3")])
def test_all_nodes_are_lost(tmp_path: Path, nodes: tuple[str, ...]) -> None:
    url = f"file://{tmp_path}/bucket"
    config = tmp_path / "remote.toml"
    config.write_text(f'[remote]\nurl = "{url}"\nflush_s = 0.2\n')
    with running(tmp_path / "nodes", nodes, replicas=2, extra=("--config", str(config))) as daemons:
        with daemons.open("n1") as store:
            for t in range(6):
                publish(store, t)
            eventually("all is remotely safe", lambda: remotely_safe(daemons, "n1") == 5)
            assert store.status().remotes[0].safe_point == 5
            store.sync_remote()
        eventually("others know", lambda: remotely_safe(daemons, "n2") == 5)
        status = bucket_status(open_bucket(url))
        assert status.branches == {"main": 5}
        assert set(status.nodes) >= {"n1"}
        for node in nodes:
            daemons.kill(node)
            daemons.wipe(node)
    restore(open_bucket(url), tmp_path / "restored")
    with nosync.open(tmp_path / "restored") as store:
        assert store.last_sealed() == 5
        assert store.missing() == []
        for t in range(6):
            assert state(store, t) == expected(t)
        publish(store, 6)


def test_daemons_begin_with_a_directory_that_is_restored_lazily(tmp_path: Path) -> None:
    """n2 has nothing: what n1 sends it comes out of the bucket."""
    url = f"file://{tmp_path}/bucket"
    with nosync.open(tmp_path / "lost", remote=url) as store:
        for t in range(4):
            publish(store, t)
        store.sync_remote()
    nodes = ("n1", "n2")
    with running(tmp_path / "nodes", nodes, replicas=2) as daemons:
        for node in nodes:
            daemons.kill(node)
            daemons.wipe(node)
        restore(open_bucket(url), daemons.data("n1"), lazy=True)
        for node in nodes:
            daemons.start(node)
        with daemons.open("n1") as store:
            eventually("both nodes have all", lambda: store.safe_point() == 3, 60)
            publish(store, 4)
            eventually("it goes on", lambda: store.safe_point() == 4, 60)
        eventually("all was fetched", lambda: not is_lazy(daemons.data("n1")), 60)
        with nosync.open(daemons.data("n2"), read_only=True) as store:
            assert [state(store, t) for t in range(5)] == [expected(t) for t in range(5)]


def test_a_node_goes_on_after_a_restart(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/bucket"
    config = tmp_path / "remote.toml"
    config.write_text(f'[remote]\nurl = "{url}"\nflush_s = 0.2\n')
    with running(tmp_path / "nodes", ("n1", "n2"), replicas=2, extra=("--config", str(config))) as daemons:
        with daemons.open("n1") as store:
            for t in range(3):
                publish(store, t)
        eventually("all is remotely safe", lambda: remotely_safe(daemons, "n1") == 2)
        daemons.kill("n1")
        metrics = f"127.0.0.1:{free_ports(1)[0]}"
        daemons.start("n1", "--metrics", metrics)
        with daemons.open("n1") as store:
            for t in range(3, 5):
                publish(store, t)
        eventually("and goes on", lambda: remotely_safe(daemons, "n1") == 4)
        text = urllib.request.urlopen(f"http://{metrics}/metrics").read().decode()
        assert f'nosync_remote_safe_epoch{{url="{url}"}} 4.0' in text
        assert f'nosync_remote_problem{{url="{url}"}} 0.0' in text


def test_a_daemon_says_at_its_start_what_is_wrong(tmp_path: Path) -> None:
    with running(tmp_path, ("n1",), replicas=1, start=()) as daemons:
        for remote, why in (("ftp://x/y", "not known"), ("s3://user:pass@b/x", "leave them out")):
            done = subprocess.run(
                daemons.command("n1", "--remote", remote), capture_output=True, text=True, check=False
            )
            assert done.returncode == 1
            assert why in done.stderr
            assert "Traceback" not in done.stderr


def test_a_configuration(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"

    def read(text: str) -> DaemonConfig:
        path.write_text(f'node = "n1"\ndata = "d"\n{text}')
        return make_config(read_config(path), str(path))

    assert read('remote = "s3://b/x"').remote == nosync.RemoteSettings("s3://b/x")
    assert read('[remote]\nurl = "s3://b/x"\nflush_s = 60').remote == nosync.RemoteSettings("s3://b/x", flush_s=60)
    assert read("").remote is None
    for text, why in (
        ("remote = 7", "expected a URL"), ("[remote]\nflush_s = 1", "a table with url"),
        ('[remote]\nurl = "s3://b/x"\nflush = 1', "unknown field 'flush'"),
        ('[remote]\nurl = "s3://b/x"\nflush_s = -1', "expected seconds"), ('remote = "ftp://b"', "not known"),
    ):  # fmt: skip
        with pytest.raises(nosync.ReplicationError, match=why):
            read(text)
