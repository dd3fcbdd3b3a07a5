"""A store that is appended to beside its daemon: how many copies it waits for, and that it is never alone unless asked."""

from __future__ import annotations

import shutil
import threading
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

import nosync
from nosync.cli import main
from nosync.lsm.model.as_of import shown_time
from nosync.lsm.node.parts import NodeParts
from nosync.lsm.trace.directory import LayerDirectory
from nosync.replication.client import remote_node
from nosync.replication.daemon.config import DaemonConfig
from nosync.replication.daemon.daemon import Daemon
from nosync.testing import FaultyEnv
from nosync.testing.daemon_cluster import eventually, running


def append(store: nosync.Store, t: int) -> None:
    store.append("counts", t=t, rows=pa.table({"k": [1, 2], "v": [t, t]}), key=["k"])
    store.seal(t)


def copies(store: nosync.Store, t: int) -> list[int]:
    manifest = store.node.timelines.manifest(t)
    assert manifest is not None
    return [entry.copies for entry in manifest.entries]


def test_what_is_appended_waits_for_as_many_copies_as_the_daemons_keep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(tmp_path, ("n1", "n2"), start=("n1",)) as daemons:
        with daemons.open("n1") as store:
            for t in range(2):
                append(store, t)
            store.sync()
            assert copies(store, 1) == [2]
            assert store.safe_point() is None, "it is on one node"
            assert store.status().stages["counts"]["copies"] == 2
        main(["status", str(daemons.data("n1"))])
        assert "none yet" in next(line for line in capsys.readouterr().out.splitlines() if "safe point" in line)
        daemons.start("n2")
        eventually("it is on both", lambda: daemons.safe_point("n1") == 1)


def test_without_its_daemon_a_directory_is_opened_only_if_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And then it asks for as many copies all the same."""
    with running(tmp_path, ("n1", "n2")) as daemons:
        with daemons.open("n1") as store:
            append(store, 0)
        eventually("it is safe", lambda: daemons.safe_point("n1") == 0)
        data = daemons.data("n1")
        with pytest.raises(nosync.StoreLockedError, match="leave out alone=True"):
            nosync.open(data, alone=True)
        for end in (daemons.stop, daemons.kill):  # with daemon.json left there, and without
            end("n2")
            end("n1")
            with pytest.raises(nosync.ReplicationError, match=r"is kept by a daemon.*alone=True"):
                nosync.open(data, env=Hasty())
            with pytest.raises(nosync.InvalidInputError, match="key_groups=128"):
                nosync.open(data, key_groups=64)
            with nosync.open(data, alone=True) as store:
                t = (store.last_sealed() or 0) + 1
                append(store, t)
                store.sync()
                assert copies(store, t) == [2]
                assert store.safe_point() == t - 1
            daemons.start("n1")
            assert daemons.safe_point("n1") == t - 1, "it is on one node still"
            daemons.start("n2")
            eventually("and now on both", lambda: daemons.safe_point("n1") == t)  # noqa: B023 - it is waited for here
        daemons.stop("n1")
        main(["pin", str(data), "here", "1", "--alone"])
        assert "here" in capsys.readouterr().out


class Hasty(FaultyEnv):
    """A clock that goes on by itself."""

    def __init__(self) -> None:
        super().__init__()
        self._s = 0.0

    def monotonic_s(self) -> float:
        return self._s

    def wait_s(self, seconds: float) -> None:
        self._s += 10 * seconds


@pytest.mark.parametrize("is_killed", [False, True], ids=["stopped", "killed"])
def test_a_daemon_that_starts_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_killed: bool
) -> None:
    """As where both begin at boot: at any moment of its start, also the first one that the directory sees."""
    config = DaemonConfig("n1", tmp_path / "n1", "127.0.0.1:0", {"n2": "127.0.0.1:1"}, 2, new_store=True)
    daemon = Daemon(config)
    daemon.start()
    about = (tmp_path / "n1" / "daemon.json").read_bytes()
    daemon.stop()
    if is_killed:
        (tmp_path / "n1" / "daemon.json").write_bytes(about)
    found: list[nosync.Store] = []
    opening = threading.Thread(target=lambda: found.append(nosync.open(tmp_path / "n1")))
    opening.start()
    daemon = Daemon(config)  # which takes the lock
    try:
        assert not found
        daemon.start()
        opening.join(60)
        with found[0] as store:
            append(store, 0)
            assert copies(store, 0) == [2]
    finally:
        daemon.stop()


def test_who_opens_a_directory_that_a_daemon_just_takes_sees_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node opens the catalog and looks at all files before it serves anyone."""
    seen: list[str] = []

    class Slow(NodeParts):
        def start(self, directory: LayerDirectory, *, replicated: bool) -> None:
            with pytest.raises(nosync.ReplicationError, match="is kept by a daemon"):
                nosync.open(tmp_path / "n1", env=Hasty())
            seen.append("while it starts")
            super().start(directory, replicated=replicated)

    monkeypatch.setattr("nosync.lsm.node.node.NodeParts", Slow)
    daemon = Daemon(DaemonConfig("n1", tmp_path / "n1", "127.0.0.1:0", {"n2": "127.0.0.1:1"}, 2))
    daemon.start()
    daemon.stop()
    assert seen


def test_a_daemon_that_cannot_have_a_directory_does_not_keep_it(tmp_path: Path) -> None:
    """Who has it open would be refused the next time."""
    with nosync.open(tmp_path / "n1") as store:
        append(store, 0)
        with pytest.raises(nosync.StoreLockedError):
            Daemon(DaemonConfig("n1", tmp_path / "n1", "127.0.0.1:0", {}, 1))
    with nosync.open(tmp_path / "n1") as store:
        append(store, 1)


def test_a_directory_that_an_earlier_version_kept_is_kept(tmp_path: Path) -> None:
    nosync.open(tmp_path / "n1").close()
    for text in ('"0123456789abcdef"', "", "{}"):  # a bare token; damaged
        (tmp_path / "n1" / "place.json").write_text(text)
        with pytest.raises(nosync.ReplicationError, match="is kept by a daemon"):
            nosync.open(tmp_path / "n1", env=Hasty())
        nosync.open(tmp_path / "n1", alone=True).close()


@pytest.mark.long("make cluster")
def test_epochs_are_found_by_time_on_every_node(tmp_path: Path) -> None:
    """The times that one node recorded reach the other, and a reader over a connection; old ones share files."""
    with (
        running(tmp_path, ("n1", "n2"), replicas=2, extra=("--archive-epochs", "2")) as daemons,
        daemons.open("n1") as one,
    ):
        for t in range(7):
            append(one, t)
        times = one.epoch_times()
        assert sorted(times) == list(range(7))
        eventually("n2 has all", lambda: daemons.safe_point("n2") == 6)
        for node in ("n1", "n2"):
            eventually(f"{node} has few files", partial(_has_few, daemons.data(node) / "times" / "main"))
        address = f"127.0.0.1:{daemons.ports['n2']}"
        with (
            nosync.open(daemons.data("n2"), read_only=True) as other,
            nosync.connect(address, cache=tmp_path / "cache") as far,
        ):
            for store in (one, other, far):
                assert store.epoch_times() == times
                at = shown_time(times[3].sealed_us)
                assert store.epoch_as_of(at) == 3
                assert store.read("counts", at).equals(one.read("counts", 3))


def _has_few(directory: Path) -> bool:
    """Says whether the times of pairs of old epochs are in one file each."""
    return len(list(directory.iterdir())) < 7


def test_no_epoch_is_sealed_where_the_directory_is_not_mounted_any_more(tmp_path: Path) -> None:
    with running(tmp_path, ("n1",), replicas=1) as daemons, daemons.open("n1") as store:
        append(store, 0)
        data, away = daemons.data("n1"), tmp_path / "away"
        data.rename(away)  # an empty mount point stays
        data.mkdir()
        with pytest.raises(nosync.NosyncError, match="is another directory than the one that was opened"):
            store.node.seal(1, [])
        assert not (data / "manifests").exists()
        shutil.rmtree(data)
        away.rename(data)
        append(store, 1)
        assert store.last_sealed() == 1


def test_a_node_whose_disk_was_replaced_does_not_begin_the_store_anew_while_its_peer_is_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, ("n1", "n2")) as daemons:
        daemons.new_store = False
        with daemons.open("n1") as store:
            for t in range(3):
                append(store, t)
        eventually("all is safe", lambda: daemons.safe_point("n2") == 2)
        daemons.stop("n1")
        daemons.stop("n2")
        shutil.rmtree(daemons.data("n1"))
        daemons.start("n1")
        monkeypatch.setattr(remote_node, "FILL_PATIENCE_S", 3.0)  # more than a new store waits for
        eventually("n1 is there", (daemons.data("n1") / "daemon.json").exists)
        with pytest.raises(nosync.ReplicationError, match="start the daemons of all nodes first"):
            daemons.open("n1")
        daemons.start("n2")
        monkeypatch.undo()
        with daemons.open("n1") as store:
            assert store.last_sealed() == 2
            append(store, 3)
        eventually("all is safe", lambda: daemons.safe_point("n2") == 3)
