"""Daemons are killed under load: nothing that was safe is lost."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

import nosync
from nosync.testing.daemon_cluster import Daemons, eventually, running
from tests.helpers.daemons import expected, publish, state
from tests.helpers.progress import shown

CYCLES = int(os.environ.get("NOSYNC_DAEMON_CYCLES", "6"))


"""Cycles of the kill loop; the long suite (`make cluster`) does 1,000."""


def test_kill_9_under_load_loses_nothing_that_was_safe(tmp_path: Path) -> None:
    random = np.random.default_rng(7)
    with running(tmp_path, replicas=2) as daemons, daemons.open("n1") as store:
        t, safest = 0, -1
        for _ in shown(CYCLES, "kills under load"):
            for _ in range(5):
                publish(store, t)
                t += 1
            victim = daemons.nodes[int(random.integers(3))]
            safest = max(safest, _safe_or(daemons, safest))
            daemons.kill(victim)
            publish(store, t)
            t += 1
            if random.random() < 0.3 and victim != "n1" and safest >= 0:
                daemons.wipe(victim)
            daemons.start(victim)
            if random.random() < 0.3:
                eventually("everything is safe", lambda last=t - 1: daemons.safe_point("n1") == last)
        eventually("everything is safe", lambda: daemons.safe_point("n1") == t - 1)
        assert safest <= t - 1
        eventually("n2 and n3 have all", lambda: all(daemons.safe_point(n) == t - 1 for n in ("n2", "n3")))
        for node in ("n2", "n3"):
            with daemons.open(node) as other:
                for at in {0, t // 2, t - 1}:
                    assert state(other, at) == expected(at), (node, at)


def _safe_or(daemons: Daemons, known: int) -> int:
    try:
        found = daemons.safe_point("n1")
    except nosync.NosyncError:
        return known
    assert found is None or found >= known, "the safe point went back"
    return known if found is None else found
