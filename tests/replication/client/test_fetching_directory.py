"""Tasks find a store on their own host, and what it lacks with its peers; all in one process, with a daemon that is
made up.
"""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

import nosync
from nosync.lsm.model.history import View
from nosync.lsm.model.layer import Description, LayerId, Shard, TraceId
from nosync.lsm.model.timestamp import Time, pack
from nosync.lsm.platform.env import Env
from nosync.lsm.platform.store_marker import create_store
from nosync.lsm.trace.directory import LayerDirectory
from nosync.replication.client import fetching_directory, location
from nosync.replication.client.fetching_directory import FetchingDirectory
from nosync.replication.client.location import DATA_VARIABLE, StoreLocation
from nosync.replication.transport import client
from nosync.replication.transport.daemon_files import ADDRESS_FILE

TRACE = TraceId("counts", "raw", Shard(0))
STATE = View(TRACE, pack(0))


class Clock(Env):
    """A clock that moves when it is waited for."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic_s(self) -> float:
        return self.now_s

    def wait_s(self, seconds: float) -> None:
        self.now_s += seconds


class FakeDaemon:
    """Sends what it is asked for after a while, or does not answer."""

    def __init__(self, may_come: bool = True, arrive: Callable[[], None] = lambda: None, down: bool = False) -> None:
        self.may_come, self.arrive, self.down = may_come, arrive, down
        self.asked: list[list[str]] = []

    def keep(self, traces: list[str]) -> bool:
        if self.down:
            raise nosync.ReplicationError("the daemon does not answer")
        self.asked.append(traces)
        self.arrive()
        return self.may_come

    def close(self) -> None:
        pass


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A store with epochs 0 to 2."""
    with nosync.open(tmp_path / "theirs") as store:
        for t in range(3):
            store.append("counts", t=t, rows=pa.table({"k": [1, 2], "v": [t, t]}), key=["k"])
            store.seal(t)
        store.sync()
    return tmp_path / "theirs"


def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: FakeDaemon | None) -> FetchingDirectory:
    create_store(tmp_path / "mine", 128, Env(), store_id="s")
    monkeypatch.setattr(client, "client_of", lambda root: fake)
    found = FetchingDirectory(tmp_path / "mine", 128)
    found.env = Clock()
    return found


def copy(theirs: Path, mine: Path) -> None:
    for file in (theirs / "layers").rglob("*.layer"):
        target = mine / file.relative_to(theirs)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())


def test_what_is_missing_is_asked_for_and_read_when_it_has_come(
    tmp_path: Path, theirs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeDaemon(arrive=lambda: copy(theirs, tmp_path / "mine"))
    directory = empty(tmp_path, monkeypatch, fake)
    trace = directory.open_view(STATE, until=pack(3), as_of=Time(pack(3) - 1))
    assert trace.layers[-1].id.description.upper == pack(3)
    assert fake.asked == [["counts/raw/0"]]
    directory.layer_at(TRACE, pack(1))
    assert directory.fetch(LayerId(TRACE, Description.of_epoch(2)))
    assert len(fake.asked) == 1, "it is here now"


def test_waiting_has_an_end_and_in_vain_it_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDaemon()
    directory = empty(tmp_path, monkeypatch, fake)
    clock = directory.env
    assert isinstance(clock, Clock)
    for waited_s in (
        fetching_directory.FETCH_PATIENCE_S,
        fetching_directory.FETCH_PATIENCE_S + fetching_directory.LOOK_EVERY_S,
    ):
        with pytest.raises(nosync.NosyncError, match="counts"):
            directory.layer_at(TRACE, pack(1))
        assert clock.now_s == pytest.approx(waited_s, abs=0.05)
    clock.now_s += 60
    assert not directory.fetch(LayerId(TRACE, Description.of_epoch(2)))
    assert clock.now_s > 60 + fetching_directory.FETCH_PATIENCE_S * 1.9


@pytest.mark.parametrize("fake", [None, FakeDaemon(may_come=False), FakeDaemon(down=True)])
def test_where_nobody_can_send_it_nobody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: FakeDaemon | None
) -> None:
    directory = empty(tmp_path, monkeypatch, fake)
    with pytest.raises(nosync.NosyncError, match="counts"):
        directory.layer_at(TRACE, pack(1))
    assert directory.env.monotonic_s() < fetching_directory.LOOK_EVERY_S


def test_what_comes_while_the_peers_are_asked_is_seen(
    tmp_path: Path, theirs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeDaemon(may_come=False, arrive=lambda: copy(theirs, tmp_path / "mine"))
    directory = empty(tmp_path, monkeypatch, fake)
    assert directory.fetch(LayerId(TRACE, Description.of_epoch(2)))


def test_a_task_finds_the_store_of_its_host(tmp_path: Path, theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = location.open_directory(StoreLocation(str(theirs), 128))
    assert alone.root == theirs
    assert not isinstance(alone, FetchingDirectory)
    create_store(tmp_path / "here", 128, Env(), store_id="s")
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path / "here"))
    assert location.open_directory(StoreLocation(str(theirs), 128)).root == theirs, (
        "of an embedded store there is one directory"
    )
    found = location.open_directory(StoreLocation("/driver/has/it/here", 128, "s"))
    assert found.root == tmp_path / "here"
    with pytest.raises(nosync.ReplicationError, match=r"belongs to store s, the job's is other"):
        location.open_directory(StoreLocation("/driver/has/it/here", 128, "other"))
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(nosync.ReplicationError, match=r"nowhere does not exist.*spark.executorEnv.NOSYNC_DATA"):
        location.open_directory(StoreLocation("/driver/has/it/there", 128, "s"))


def test_rounds_of_other_hosts_are_asked_for_where_a_daemon_is(tmp_path: Path) -> None:
    create_store(tmp_path / "here", 128, Env(), store_id="s")
    directory = FetchingDirectory(tmp_path / "here", 128)
    traces = [TraceId("hops", "f", Shard(0, 1))]
    directory.fetch_rounds(traces, 3)  # no daemon: what is here is all there is
    (tmp_path / "here" / ADDRESS_FILE).write_text('{"address": "127.0.0.1:1", "node": "n2"}')
    with pytest.raises(nosync.ReplicationError, match="does not answer"):
        directory.fetch_rounds(traces, 3)


def test_what_a_process_has_mapped_of_stores_that_it_has_left_is_unmapped(tmp_path: Path) -> None:
    def opened(name: str) -> weakref.ref[LayerDirectory]:
        nosync.open(tmp_path / name).close()
        return weakref.ref(location.open_directory(StoreLocation(str(tmp_path / name), 128)))

    first, second = opened("a"), opened("b")
    shutil.rmtree(tmp_path / "a")
    others = [opened("c0")]
    assert first() is None, "its directory is gone"
    others += [opened(f"c{i}") for i in range(1, location.MOST_DIRECTORIES - 1)]
    assert second() is not None
    assert location.open_directory(StoreLocation(str(tmp_path / "b"), 128)) is second(), (
        "and it is the most lately used now"
    )
    others.append(opened("d"))
    assert [one() is None for one in others] == [True] + [False] * (len(others) - 1)
    assert second() is not None
