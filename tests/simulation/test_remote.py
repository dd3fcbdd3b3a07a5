"""Copies in an object store under faults, from seeds; and the simulation itself: it finds planted bugs.

`python -m tests.simulation.remote --seeds 10000` runs many more.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from nosync.lsm.errors import NosyncError
from nosync.testing.remote_simulation import RemoteSimulation, SimulationError
from tests.simulation.remote_bugs import BUGS

SEEDS = 30
MOST_SEEDS = 1000


@pytest.mark.few(2, "make remote")
@pytest.mark.parametrize("first", range(0, SEEDS, 10))
def test_faults_break_no_promise(first: int, tmp_path: Path) -> None:
    acknowledged = sum(RemoteSimulation(tmp_path / str(seed), seed).run() for seed in range(first, first + 10))
    assert acknowledged > 10, "something happened"


@pytest.mark.few(2, "make remote")
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: Callable[[], AbstractContextManager[None]], tmp_path: Path) -> None:
    with bug():
        for seed in range(MOST_SEEDS):
            try:
                RemoteSimulation(tmp_path / str(seed), seed).run()
            except (SimulationError, NosyncError):
                return
    pytest.fail(f"not found within {MOST_SEEDS} seeds")
