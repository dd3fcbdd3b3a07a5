"""A door that is killed at any change of the disk: what it acknowledged is there, and what is kept can be gone on from."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

import pytest

import nosync
from nosync.checkpoints.keep import Keep
from nosync.checkpoints.names import Batch
from nosync.lsm.platform.env import Env
from tests.checkpoints.door.client import Client
from tests.checkpoints.door.query_through_door import QueryThroughDoor
from tests.helpers.checkpoints import contents
from tests.helpers.killed import Dies, KilledAt

IS_LONG = bool(os.environ.get("NOSYNC_LONG"))
STEPS = range(0, 700, 1 if IS_LONG else 71)
BATCHES = 4


class KilledDoor(KilledAt):
    """A door that is killed says nothing any more either."""

    def monotonic_s(self) -> float:
        if self.left < 0:  # nor does a strict answer come
            raise Dies
        return super().monotonic_s()


class Recorded(QueryThroughDoor):
    """Remembers what the door acknowledged."""

    def __init__(self, root: Path, address: str) -> None:
        self.acknowledged: dict[str, bytes] = {}
        super().__init__(root, address, "changelog", partitions=1)

    def write(self, path: str, data: str | bytes) -> None:
        super().write(path, data)
        self.acknowledged[path] = data.encode() if isinstance(data, str) else data

    def remove(self, path: str) -> None:
        del self.acknowledged[path]  # it may be gone, or not
        super().remove(path)


@pytest.mark.few(10, "make checkpoints")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("mode", ["async", "strict"])
@pytest.mark.parametrize("n", STEPS)
def test_killed_at_a_change_of_the_disk(tmp_path: Path, n: int, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data, query = tmp_path / "data", None
    with monkeypatch.context() as patched:
        env = KilledDoor(10**9)
        patched.setattr("nosync.checkpoints.door.api.Env", lambda: env)
        with nosync.checkpoints.serve(data, mode=mode) as door:  # type: ignore[arg-type]
            env.left = n
            with contextlib.suppress(AssertionError, OSError, Exception):
                query = Recorded.__new__(Recorded)
                query.__init__(tmp_path / "ck", door.address("q"))  # type: ignore[misc]
                query.run(BATCHES)
            env.left = -1  # nothing that it still tries comes to the disk
    assert query is not None
    acknowledged = query.acknowledged
    batches = {log: numbers(acknowledged, log) for log in ("offsets", "commits")}

    for is_lost in (False, True):
        again = tmp_path / f"again-{is_lost}"
        shutil.copytree(data, again)
        if is_lost:
            shutil.rmtree(again / "checkpoint-live" / "q", ignore_errors=True)
        elif query.batch < BATCHES:
            check_kept(again, acknowledged)
        with nosync.checkpoints.serve(again) as door:
            client = Client(door.address("q"))
            client.make_dirs("")
            live = contents(again / "checkpoint-live" / "q")
            if not is_lost:
                assert {path: live.get(path) for path in acknowledged} == acknowledged
            elif mode == "strict" and batches["offsets"]:
                newest = max(batches["offsets"])
                assert live[f"offsets/{newest}"] == acknowledged[f"offsets/{newest}"]
                assert max(numbers(live, "commits"), default=-1) >= newest - 1
            committed, begun = numbers(live, "commits"), numbers(live, "offsets")
            if begun and max(begun) == max(committed, default=-1) + 1:
                query.client, query.batch = client, max(begun)
                query.states()
                query.commit()
        if begun:
            assert nosync.checkpoint("q", again).status(last=0).safe == max(begun)
            check_kept(again, acknowledged)


def numbers(paths: dict[str, bytes], log: str) -> set[int]:
    return {int(path.rpartition("/")[2]) for path in paths if path.startswith(f"{log}/")}


def check_kept(data: Path, acknowledged: dict[str, bytes]) -> None:
    """Whatever commit is kept has all that belongs to it, with the contents that were sent."""
    if not (data / "checkpoints" / "q").exists():
        return
    keep = Keep(data, "q", Env())
    for t in keep.index.batches():
        closure = keep.closures.of(Batch(t))
        for path in closure.paths & acknowledged.keys():
            assert keep.read(path) == acknowledged[path], path
