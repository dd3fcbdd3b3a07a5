"""The protocol under faults, from seeds; and the simulation itself: it repeats, and it finds planted bugs.

`make sim SEEDS=10000` runs many more seeds, `make sim SEED=17` one again, with its course of events.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nosync.testing.simulation import Cluster
from nosync.testing.simulation_oracle import SimulationError
from tests.simulation.bugs import BUGS

SEEDS = 60
MOST_SEEDS = 1000


@pytest.mark.parametrize("first", range(0, SEEDS, 10))
def test_faults_break_no_promise(first: int) -> None:
    for seed in range(first, first + 10):
        assert Cluster(seed).run(), "something happened"


@pytest.mark.few(6, "make sim")
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str) -> None:
    for seed in range(MOST_SEEDS):
        try:
            BUGS[bug](seed).run()
        except SimulationError:
            return
    pytest.fail(f"not found within {MOST_SEEDS} seeds")


def test_a_seed_takes_the_same_course_in_every_process() -> None:
    code = "from nosync.testing.simulation import Cluster; c = Cluster(5); print(c.run(), c.world.now_s)"
    found = [
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True,
            env=os.environ | {"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("0", "1", "12345")
    ]  # fmt: skip
    assert len(set(found)) == 1
    assert "publishes 7" in found[0]


@pytest.mark.skipif(shutil.which("spin") is None or shutil.which("cc") is None, reason="no spin or C compiler here")
def test_the_model_holds_and_planted_bugs_break_it() -> None:
    script = Path(__file__).parents[2] / "docs" / "model" / "check.sh"
    done = subprocess.run(["sh", str(script)], capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[0] == "as it is: 0 errors"
    assert len(done.stdout.splitlines()) == 6
