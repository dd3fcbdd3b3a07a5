"""Kept checkpoints beside daemons: copies on peers, a host that is lost, a third host, damage, what nobody needs."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import nosync
from nosync.checkpoints import serve
from nosync.checkpoints.door.api import address_of
from nosync.checkpoints.names import Batch
from nosync.cli import main as cli
from nosync.lsm.errors import InvalidInputError, ReplicationError
from nosync.replication.transport.client import client_of
from nosync.testing.daemon_cluster import Daemons, eventually, free_ports, running
from tests.checkpoints.door.client import Client, Refused
from tests.checkpoints.door.query_through_door import QueryThroughDoor
from tests.checkpoints.fake_query import KINDS, FakeQuery
from tests.helpers.checkpoints import contents

NODES = ("n1", "n2", "n3")


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Daemons]:
    with running(tmp_path / "cluster", NODES, replicas=2) as found:
        yield found


def is_safe(daemons: Daemons, name: str, t: int, node: str = "n1") -> bool:
    return nosync.checkpoint(name, daemons.data(node)).status(last=0).safe == t


def holders(daemons: Daemons, path: str) -> list[str]:
    return [node for node in NODES if (daemons.data(node) / "checkpoints" / path).exists()]


@pytest.mark.parametrize(
    "kind", [kind if kind == "v2" else pytest.param(kind, marks=pytest.mark.long("make cluster")) for kind in KINDS]
)
def test_a_host_is_lost_and_the_query_goes_on_from_another(daemons: Daemons, tmp_path: Path, kind: str) -> None:
    query = FakeQuery(tmp_path / "ck" / "words", kind)
    with nosync.checkpoints.watch(query.root, daemons.data("n1")) as watch:
        for t in range(4):
            query.run()
            eventually(f"batch {t} is safe", lambda t=t: is_safe(daemons, "words", t))  # type: ignore[misc]
        status = watch.checkpoint.status()
        assert (status.nodes, status.safe, status.newest) == (2, 3, 3)
        assert all(
            (b.copies or 0) >= 2 for b in status.batches
        )  # 3 where the first host is none of the two that keep it
        watch.checkpoint.pin("before-upgrade", 3)
        eventually("the pin is there, too", lambda: len(holders(daemons, "words/pins")) >= 2)
    expected = contents(daemons.data("n1") / "checkpoints" / "words")
    daemons.kill("n1")
    daemons.wipe("n1")
    # n2 and n3: one of them has it all, and the other fetches it when a query is to start there.
    for node in ("n2", "n3"):
        found = nosync.checkpoint("words", daemons.data(node))
        made = found.restore(tmp_path / f"on-{node}")
        assert made.batch == 3
        assert {path: expected[path] for path in contents(made.path)} == contents(made.path)
        assert [pin.name for pin in found.pins()] == ["before-upgrade"]
    # It goes on there, is followed there, and the first host gets what it lacks when it is back, empty.
    daemons.start("n1")
    again = FakeQuery(tmp_path / "on-n2", kind)
    again.batch = 3
    again.ids = query.ids
    with nosync.checkpoints.watch(again.root, daemons.data("n2"), name="words"):
        again.run()
        eventually("the next batch is safe", lambda: is_safe(daemons, "words", 4, "n2"))
    assert nosync.checkpoint("words", daemons.data("n1")).restore(tmp_path / "on-n1").batch == 4


def test_what_is_not_on_enough_nodes_is_not_safe(daemons: Daemons, tmp_path: Path) -> None:
    query = FakeQuery(tmp_path / "words", "changelog")
    with nosync.checkpoints.watch(query.root, daemons.data("n1")) as watch:
        query.run()
        eventually("batch 0 is safe", lambda: is_safe(daemons, "words", 0))
        daemons.kill("n2")
        daemons.kill("n3")
        query.run(2)
        eventually("batch 2 is here", lambda: watch.checkpoint.status(last=0).newest == 2)
        status = watch.checkpoint.status()
        assert status.safe == 0, "nobody else has the rest"
        eventually("the daemon knows it", lambda: watch.checkpoint.status().batches[-1].copies == 1)
        daemons.start("n2")
        daemons.start("n3")
        eventually("all of it is safe", lambda: is_safe(daemons, "words", 2))
        daemons.stop("n1")
        status = watch.checkpoint.status()
        assert status.problem is not None
        assert "daemon" in status.problem
        assert (status.safe, status.newest) == (None, 2)


def test_a_damaged_copy_is_found_and_comes_again(daemons: Daemons, tmp_path: Path) -> None:
    query = FakeQuery(tmp_path / "words", "hdfs")
    query.run(3)
    with nosync.checkpoints.watch(query.root, daemons.data("n1")):
        eventually("it is safe", lambda: is_safe(daemons, "words", 2))
    path = "words/state/0/0/2.delta"
    (peer,) = [node for node in holders(daemons, path) if node != "n1"][:1]
    target = daemons.data(peer) / "checkpoints" / path
    good = target.read_bytes()
    daemons.stop(peer)
    target.chmod(0o640)
    target.write_bytes(good[:-1] + b"x")  # of the same size
    daemons.start(peer)
    (third,) = [node for node in NODES if node not in holders(daemons, path)] or ["n1"]
    if third != "n1":  # who is given it checks the digest, and asks again
        made = nosync.checkpoint("words", daemons.data(third)).restore(tmp_path / "r")
        assert (made.path / "state/0/0/2.delta").read_bytes() == good
    os.truncate(target, 1)
    daemons.stop(peer)
    daemons.start(peer)  # all sizes are looked at
    eventually("the file is whole again", lambda: target.read_bytes() == good)


@pytest.mark.long("make cluster")
def test_each_node_removes_what_nobody_needs(daemons: Daemons, tmp_path: Path) -> None:
    query = FakeQuery(tmp_path / "words", "changelog")
    with nosync.checkpoints.watch(query.root, daemons.data("n1"), keep_batches=2) as watch:
        for t in range(9):
            query.run()
            eventually(f"batch {t} is safe", lambda t=t: is_safe(daemons, "words", t))  # type: ignore[misc]
        with pytest.raises(InvalidInputError, match="removes by itself what is not needed, here and on its peers"):
            watch.checkpoint.clean(1)
    keepers = holders(daemons, "words/commits/0")
    for node in keepers:  # it is looked for at the start, and every minute
        daemons.stop(node)
        daemons.start(node)
    eventually("it is gone everywhere", lambda: not holders(daemons, "words/commits/0"), 150.0)
    eventually("and nothing comes back", lambda: is_safe(daemons, "words", 8))
    for node in keepers:
        found = nosync.checkpoint("words", daemons.data(node)).status()
        assert [b.batch for b in found.batches if b.why_not is None] == [Batch(7), Batch(8)]
        assert not [p for p in daemons.status(node).problems if "checkpoints" in p]


def test_two_queries_under_one_name_are_told_of(daemons: Daemons, tmp_path: Path) -> None:
    first, second = FakeQuery(tmp_path / "a", "hdfs"), FakeQuery(tmp_path / "b", "hdfs")
    second.write("metadata", json.dumps({"id": "another"}))
    first.run(1)
    second.run(1)
    for node in ("n2", "n3"):
        daemons.stop(node)
    with nosync.checkpoints.watch(first.root, daemons.data("n1"), name="q") as watch:
        eventually("it is here", lambda: watch.checkpoint.status(last=0).newest == 0)
        eventually("the daemon knows it", lambda: watch.checkpoint.status().batches[-1].copies == 1)
    daemons.stop("n1")
    for node in ("n2", "n3"):
        daemons.start(node)
    with nosync.checkpoints.watch(second.root, daemons.data("n2"), name="q") as watch:
        eventually("the other is safe", lambda: is_safe(daemons, "q", 0, "n2"))
    daemons.start("n1")
    eventually("the conflict is told of", lambda: any("q/metadata" in name for name in daemons.status("n1").problems))
    with pytest.raises(InvalidInputError, match="say another name"):
        nosync.checkpoints.watch(second.root, daemons.data("n1"), name="q")
    client = client_of(daemons.data("n1"))
    assert client is not None
    gone = client.conflicts(take_theirs=True)  # the operator says whose counts
    client.close()
    assert "checkpoints/q/metadata" in gone
    eventually(
        "what the others have is here",
        lambda: "another" in (daemons.data("n1") / "checkpoints/q/metadata").read_text(),
    )


def test_commands_show_on_how_many_nodes_each_batch_is(
    daemons: Daemons, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    query = FakeQuery(tmp_path / "words", "hdfs")
    query.run(2)
    with nosync.checkpoints.watch(query.root, daemons.data("n1")):
        eventually("it is safe", lambda: is_safe(daemons, "words", 1))
    cli(["checkpoint", "status", "words", "--store", str(daemons.data("n1"))])
    out = capsys.readouterr().out
    assert "committed 1, safe 1 (on 2 nodes), here 1" in out
    assert "2 of 2" in out or "3 of 2" in out
    cli(["checkpoint", "status", "words", "--store", str(daemons.data("n1")), "--json"])
    assert json.loads(capsys.readouterr().out)["batches"][-1]["copies"] >= 2


def test_a_checkpoint_that_cannot_be_watched_holds_up_nothing_else(daemons: Daemons, tmp_path: Path) -> None:
    query, other, a_file = FakeQuery(tmp_path / "words", "hdfs"), tmp_path / "other", tmp_path / "file"
    query.run(2)
    other.mkdir()
    (other / "notes.txt").write_text("of nobody")
    a_file.write_text("")
    daemons.stop("n1")
    given = {"words": query.root, "other": other, "file": a_file}
    daemons.start("n1", *(f"--checkpoint={name}={path}" for name, path in given.items()))

    def told() -> dict[str, str]:
        return {name: why for name, why in daemons.status("n1").problems.items() if name.startswith("checkpoint ")}

    eventually("what can be watched is", lambda: is_safe(daemons, "words", 1))
    eventually("the others are told of", lambda: told().keys() == {"checkpoint other", "checkpoint file"})
    assert "is not the checkpoint of a Structured Streaming query" in told()["checkpoint other"]
    assert "is no directory" in told()["checkpoint file"]
    (other / "notes.txt").unlink()
    a_file.unlink()
    eventually("they are tried again", lambda: not told())
    FakeQuery(other, "hdfs").run(1)
    eventually("and followed", lambda: is_safe(daemons, "other", 0))
    shutil.rmtree(query.root)
    FakeQuery(query.root, "hdfs").write("metadata", json.dumps({"id": "another"}))
    eventually("what goes wrong later is told", lambda: "words" in str(told()))
    daemons.stop("n1")


def test_only_the_owner_asks_for_a_checkpoint_and_only_by_its_name(daemons: Daemons) -> None:
    client = client_of(daemons.data("n1"))
    assert client is not None
    with pytest.raises(ReplicationError, match="checkpoint name '../x' is not a valid name"):
        client.fetch_checkpoint("../x", 0.1)
    with pytest.raises(ReplicationError, match="is not the name of a layer"):
        client.count_copies(["checkpoints/words/../../NOSYNC"])
    assert client.count_copies(["checkpoints/words/metadata"]) == [0]
    assert client.fetch_checkpoint("nothing", 5.0) == (True, 0)
    client.close()


@pytest.mark.long("make cluster")
@pytest.mark.parametrize("mode", ["async", "strict"])
def test_a_query_behind_the_door_goes_on_beside_another_daemon(daemons: Daemons, tmp_path: Path, mode: str) -> None:
    """Nothing is restored by hand: the door beside the other daemon has what the first one's had."""
    door = serve(daemons.data("n1"), mode=mode)  # type: ignore[arg-type]
    query = QueryThroughDoor(tmp_path / "ck", door.address("words"), "changelog")
    query.run(5)
    query.begin()
    if mode == "strict":
        assert door.state("words") == "strict"
        assert is_safe(daemons, "words", 4), "the answer to the offsets of batch 5 waited for that"
    else:
        eventually("batch 4 is safe", lambda: is_safe(daemons, "words", 4))
        eventually("what batch 5 reads is there, too", lambda: len(holders(daemons, "words/offsets/5")) >= 2)
    daemons.kill("n1")
    door.close()
    daemons.wipe("n1")
    expected = (query.root / "offsets" / "5").read_bytes()
    for node in ("n2", "n3"):  # one of them has it all, and the other one asks it
        with serve(daemons.data(node), mode=mode) as there:  # type: ignore[arg-type]
            client = Client(there.address("words"))
            assert client.read("commits/4") == (query.root / "commits" / "4").read_bytes()
            assert client.read("offsets/5") == expected
            assert client.read("state/0/0/5.changelog") == (query.root / "state/0/0/5.changelog").read_bytes()


def test_a_door_whose_daemon_is_away_does_not_begin_a_query_anew(daemons: Daemons, tmp_path: Path) -> None:
    with serve(daemons.data("n1")) as door:
        QueryThroughDoor(tmp_path / "ck", door.address("words"), "hdfs").run(2)
        eventually("it is safe", lambda: is_safe(daemons, "words", 1))
    for node in NODES:
        daemons.stop(node)
    daemons.wipe("n1")
    daemons.start("n1")  # it has nothing, and nobody gives it anything
    daemons.stop("n1")
    with serve(daemons.data("n1")) as door:
        with pytest.raises(Refused, match="the daemon of .* is not running") as raised:
            Client(door.address("words")).status("metadata")
        assert raised.value.name == "IOException", "for a file that is not there Spark would begin a new query"


@pytest.mark.parametrize("mode", ["async", "strict"])
def test_a_daemon_watches_checkpoints_and_opens_the_door(tmp_path: Path, mode: str) -> None:
    (port,) = free_ports(1)
    query = FakeQuery(tmp_path / "ck" / "words", "changelog")
    with running(tmp_path / "cluster", ("n1", "n2"), replicas=2, start=("n2",)) as daemons:
        daemons.start("n1", f"--checkpoint=words={query.root}", f"--door=127.0.0.1:{port}", f"--door-mode={mode}")
        query.run(3)
        eventually("the watched one is safe", lambda: is_safe(daemons, "words", 2))
        eventually("the door is open", lambda: address_of("clicks", daemons.data("n1")))
        behind = QueryThroughDoor(tmp_path / "clicks", address_of("clicks", daemons.data("n1")), "hdfs")
        behind.run(3)
        eventually("the one behind the door is safe", lambda: is_safe(daemons, "clicks", 2))
        assert daemons.stop("n1") == 0, daemons.log("n1")
        query.run()
        daemons.start("n1", f"--checkpoint=words={query.root}")
        eventually("it is followed again", lambda: is_safe(daemons, "words", 3))


def test_mistakes_of_a_daemon_about_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["daemon", "--node", "n1", "--data", str(tmp_path / "d"), "--replicas", "1", "--check"]
    for more, text in (
        (["--checkpoint", "words"], "--checkpoint 'words' is not NAME=PATH"),
        (["--checkpoint", "Words=/x"], "checkpoint name 'Words' is not a valid name"),
        (["--door", "7602"], "door: "),
    ):
        with pytest.raises(SystemExit):
            cli([*command, *more])
        assert text in " ".join(capsys.readouterr().err.split())
    (tmp_path / "node.toml").write_text('node = "n1"\ndata = "d"\n[checkpoints]\nwords = 3\n')
    with pytest.raises(SystemExit):
        cli(["daemon", "--config", str(tmp_path / "node.toml"), "--check"])
    assert "checkpoints.words is 3, expected a path" in " ".join(capsys.readouterr().err.split())
