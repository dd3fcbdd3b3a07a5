"""Runs copies in an object store under faults, from many seeds: `python -m tests.simulation.remote --seeds 10000`."""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from pathlib import Path

from nosync.testing.remote_simulation import RemoteSimulation

SHOWN_EVERY = 100


def main() -> None:
    """Runs the seeds. Raises SimulationError, which says the seed and what had happened."""
    arguments = argparse.ArgumentParser(allow_abbrev=False)
    arguments.add_argument("--seeds", type=int, default=1000)
    arguments.add_argument("--first", type=int, default=0)
    given = arguments.parse_args()
    logging.disable(logging.CRITICAL)
    acknowledged = 0
    for seed in range(given.first, given.first + given.seeds):
        with tempfile.TemporaryDirectory(prefix="nosync-simulation-") as directory:
            acknowledged += RemoteSimulation(Path(directory), seed).run()
        if (done := seed + 1 - given.first) % SHOWN_EVERY == 0:
            print(f"{done:,} of {given.seeds:,} seeds", file=sys.stderr, flush=True)
    print(f"{given.seeds} seeds: no promise broken; {acknowledged} epochs were acknowledged, and restored")


if __name__ == "__main__":
    main()
