"""Which door serves a checkpoint, where doors were cut off from each other and meet again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from nosync.checkpoints.door import who_serves
from nosync.checkpoints.door.intake import Intake
from nosync.checkpoints.door.other_doors import Server
from nosync.checkpoints.door.places import Place
from nosync.checkpoints.door.who_serves import RivalError, WhoServes
from nosync.checkpoints.keep import Keep
from nosync.checkpoints.names import Batch
from nosync.checkpoints.rewind import begin_generation
from nosync.lsm.platform.env import Env
from tests.checkpoints.fake_query import FakeQuery

METADATA = Place("words", "metadata")


class OtherDoors:
    """The doors of other hosts, which serve a checkpoint in these generations."""

    me = "n2"

    def __init__(self, *, silent: bool = False, **serve: int) -> None:
        self.serve, self.silent, self.asked = serve, silent, 0

    def peers(self) -> dict[str, bool]:
        return dict.fromkeys(("n1", "n3"), True)

    def servers(self, name: str) -> tuple[list[Server], bool]:
        assert name == "words"
        self.asked += 1
        if self.silent:
            return [], False
        found = sorted((Server(g, n) for n, g in self.serve.items()), key=lambda one: (-one.generation, one.node))
        return found, True


@pytest.fixture
def live(tmp_path: Path) -> Path:
    """A query went on here: its live directory and its keep are of generation 1."""
    live = tmp_path / "checkpoint-live" / "words"
    live.parent.mkdir()
    FakeQuery(live, "hdfs").run(3)
    keep = Keep(tmp_path, "words", Env())
    Intake(live, keep, 100, lambda: None).take_all()
    begin_generation(keep, Batch(1))
    return live


def who(data: Path, doors: OtherDoors, mine: int | None = None) -> WhoServes:
    return WhoServes(data, Env(), doors, lambda name: mine)  # type: ignore[arg-type]


def test_a_door_that_was_cut_off_is_not_believed(tmp_path: Path, live: Path) -> None:
    """It serves what another one went on from, and has not been told so yet."""
    assert asyncio.run(who(tmp_path, OtherDoors(n1=0)).node_of(METADATA, is_sent_on=False)) is None
    assert (live / "metadata").exists(), "the newer work stays"


@pytest.mark.parametrize("doors", [OtherDoors(n1=0, n3=1), OtherDoors(n3=2, n1=1)])
def test_the_door_of_the_newest_generation_is_asked(tmp_path: Path, live: Path, doors: OtherDoors) -> None:
    assert asyncio.run(who(tmp_path, doors).node_of(METADATA, is_sent_on=False)) == "n3"
    assert not live.exists(), "it is put aside"


@pytest.mark.parametrize(
    ("doors", "mine", "told"),
    [
        (OtherDoors(n1=2), 1, "is served by the door of node n1 by now"),
        (OtherDoors(n1=1), 1, "is served by the door of node n1 by now"),
        (OtherDoors(), 0, "has gone on elsewhere, into generation 1"),
    ],
)
def test_a_door_that_does_not_count_takes_no_offsets(
    tmp_path: Path, live: Path, doors: OtherDoors, mine: int, told: str
) -> None:
    with pytest.raises(RivalError, match=told):
        asyncio.run(who(tmp_path, doors, mine).check_alone("words"))


@pytest.mark.parametrize("doors", [OtherDoors(), OtherDoors(n3=1), OtherDoors(n1=0)])
def test_the_door_that_counts_takes_them(tmp_path: Path, live: Path, doors: OtherDoors) -> None:
    asyncio.run(who(tmp_path, doors, 1).check_alone("words"))


class Clock(Env):
    """A clock that goes on by what is slept."""

    now_s = 0.0

    def monotonic_s(self) -> float:
        self.now_s += 1.0
        return self.now_s


@pytest.mark.parametrize("answers_after", [3, None])
def test_a_door_that_does_not_answer_at_once_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers_after: int | None
) -> None:
    """It paused, and serves the checkpoint still. One that never answers is not waited for beyond patience."""
    doors = OtherDoors(silent=True, n1=0)

    async def no_sleep(_: float) -> None:
        doors.silent = answers_after is None or doors.asked < answers_after

    monkeypatch.setattr(asyncio, "sleep", no_sleep)
    monkeypatch.setattr(who_serves, "ask_peers", lambda *_: None)
    found = WhoServes(tmp_path, Clock(), doors, lambda name: None)  # type: ignore[arg-type]
    assert asyncio.run(found.node_of(METADATA, is_sent_on=False)) == (None if answers_after is None else "n1")
    assert doors.asked > 2
