"""A daemon that hangs costs those who count copies little."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from nosync.checkpoints import peers
from nosync.checkpoints.keep import Keep
from nosync.lsm.errors import ReplicationError
from nosync.lsm.platform.env import Env


class Later(Env):
    now_s = 100.0

    def monotonic_s(self) -> float:
        return self.now_s


class Hangs:
    """A client whose daemon does not answer, until it does."""

    def __init__(self) -> None:
        self.asked, self.closed, self.answer = 0, 0, None

    def count_copies(self, paths: Sequence[str], timeout_s: float) -> list[int]:
        self.asked += 1
        if self.answer is None:
            raise ReplicationError("the daemon did not answer")
        return self.answer

    def close(self) -> None:
        self.closed += 1


def test_a_daemon_that_hangs_is_asked_again_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env, client = Later(), Hangs()
    monkeypatch.setattr(peers, "client_of_daemon", lambda _: client)
    counted, keep = peers.CountedCopies(tmp_path, env), Keep(tmp_path, "q", env)
    assert [counted.fewest(keep, ["a"]) for _ in range(5)] == [0] * 5
    assert (client.asked, client.closed) == (1, 1)
    client.answer = [3, 2]
    assert counted.fewest(keep, ["a", "b"]) == 0
    env.now_s += 1.5
    assert counted.fewest(keep, ["a", "b"]) == 2
    assert (client.asked, client.closed) == (2, 1)
