"""Many seeds of copies in an object store under faults, on all cores. Prints each that fails, and what runs it again."""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from pathlib import Path

from nosync.lsm.errors import NosyncError
from nosync.testing.remote_simulation import RemoteSimulation, SimulationError
from tests.simulation.seeds import count_failures


def failure_of(seed: int) -> str:
    """What went wrong with a seed; nothing if nothing did."""
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="nosync-simulation-") as directory:
        try:
            RemoteSimulation(Path(directory), seed).run()
        except (SimulationError, NosyncError) as error:
            return f"seed {seed}: {error}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first one")
    given = parser.parse_args()
    seeds = range(given.first, given.first + given.seeds)
    sys.exit(1 if count_failures(failure_of, seeds, "python -m tests.simulation.remote --seeds 1 --first ") else 0)


if __name__ == "__main__":
    main()
