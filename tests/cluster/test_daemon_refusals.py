"""What daemons refuse: configurations, cloned directories, other contents under a name that is known."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import nosync
from nosync.cli import main
from nosync.testing.daemon_cluster import eventually, running
from tests.helpers.daemons import expected, publish, state

REFUSED = [
    (["--node", "n1"], "node n1 is among its own peers"),
    (["--listen", "0.0.0.0:0"], "off loopback both sides need certificates"),
    (["--nice", "20"], "20 is not in the range 0<=x<=19"),
    (["--replicas", "3"], "replicas=3, and the store has 2 nodes (n2, n1)"),
    (["--peer", "N3=127.0.0.1:1"], "'N3' is not a node id"),
    (["--peer", "n3"], "--peer 'n3' is not NODE=HOST:PORT"),
    (["--listen", "nowhere"], "address 'nowhere' is not HOST:PORT"),
    (["--metrics", "x"], "metrics: address 'x' is not HOST:PORT"),
]


def test_configurations_that_are_refused(tmp_path: Path) -> None:
    with running(tmp_path, ("n1", "n2"), replicas=2) as daemons:
        daemons.stop("n2")
        for change, message in REFUSED:
            command = daemons.command("n2", *change)
            done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
            assert message in " ".join(done.stderr.split())
            assert done.returncode in (1, 2), f"{change}: {done.stderr}"
            assert "Traceback" not in done.stderr
            assert not (daemons.data("n2") / "daemon.json").exists()
        process = subprocess.Popen(daemons.command("n2", "--replicas", "1"), stderr=subprocess.DEVNULL)
        try:  # it is well by itself, and the other one refuses it
            eventually("n1 says why", lambda: "node n2 keeps replicas=1, this one 2" in daemons.log("n1"))
        finally:
            process.kill()
            process.wait()


def test_a_cloned_directory_is_refused(tmp_path: Path) -> None:
    with running(tmp_path, ("n1", "n2"), replicas=2) as daemons, daemons.open("n1") as store:
        publish(store, 0)
        eventually("safe", lambda: daemons.safe_point("n1") == 0)
        daemons.stop("n2")
        daemons.stop("n1")
        daemons.wipe("n2")
        shutil.copytree(daemons.data("n1"), daemons.data("n2"))
        daemons.start("n1")
        daemons.start("n2")
        eventually("n1 says why", lambda: "its data directory is a copy of this one" in daemons.peer("n1", "n2").why)
        assert daemons.peer("n1", "n2").state == "refused"


def test_other_contents_stall_the_safe_point_until_an_operator_decides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two jobs ran while the nodes could not see each other, and the second one was wrong."""
    nodes = ("n1", "n2")
    with running(tmp_path, nodes, replicas=2, start=()) as daemons:
        for node, wrong in (("n1", 0), ("n2", 1)):
            daemons.start(node)
            with daemons.open(node) as store:
                publish(store, 0, values_of=wrong)
                store.sync()
            daemons.kill(node)
        for node in nodes:
            daemons.start(node)
        for node in nodes:
            eventually(f"{node} says so", lambda node=node: "has other contents" in str(daemons.status(node).problems))
            assert daemons.safe_point(node) is None
        named = [name.removeprefix("conflict ") for name in daemons.status("n2").problems]
        assert sorted(name.partition("/")[0] for name in named) == ["layers", "layers", "manifests"]
        data = str(daemons.data("n2"))
        main(["conflicts", data])
        assert set(named) <= set(capsys.readouterr().out.split())
        with (
            daemons.open("n2") as beside,
            nosync.connect(f"127.0.0.1:{daemons.ports['n2']}", cache=tmp_path / "cache") as elsewhere,
            nosync.open(data, read_only=True) as reader,
        ):
            seen = beside, elsewhere, reader
            assert not any(state(store, 0) == expected(0) for store in seen)
            main(["conflicts", data, "--take-theirs"])
            eventually("both agree", lambda: daemons.safe_point("n1") == daemons.safe_point("n2") == 0)
            eventually("nobody complains any more", lambda: not any(daemons.status(n).problems for n in nodes))
            assert all(state(store, 0) == expected(0) for store in seen), "stores that were open notice"
        with daemons.open("n2") as store:
            assert state(store, 0) == expected(0)


def test_a_stopped_daemon_leaves_the_directory_to_the_next(tmp_path: Path) -> None:
    with running(tmp_path, ("n1",), replicas=1) as daemons:
        with daemons.open("n1") as store:
            publish(store, 0)
            with pytest.raises(nosync.InvalidInputError, match="belongs to a daemon"):
                nosync.open(daemons.data("n1"), retain=3)
        assert daemons.stop("n1") == 0
        for _ in range(3):  # the moment it serves, it can be stopped
            daemons.start("n1")
            assert daemons.stop("n1") == 0
            assert not (daemons.data("n1") / "daemon.json").exists()
        said = daemons.log("n1").splitlines()
        assert all(line.startswith("node n1 serves") for line in said), "nothing went wrong"
        with nosync.open(daemons.data("n1"), alone=True) as store:  # embedded
            assert store.safe_point() == 0
            assert state(store, 0) == expected(0)


def test_publishing_goes_on_while_the_daemon_is_away(tmp_path: Path) -> None:
    with running(tmp_path, ("n1", "n2"), replicas=2) as daemons, daemons.open("n1") as store:
        publish(store, 0)
        eventually("safe", lambda: daemons.safe_point("n1") == 0)
        daemons.kill("n1")
        publish(store, 1)
        with pytest.raises(nosync.ReplicationError, match="does not answer"):
            store.safe_point()
        assert state(store, 1) == expected(1)
        daemons.start("n1")
        publish(store, 2)
        eventually("all is safe", lambda: store.safe_point() == 2)
