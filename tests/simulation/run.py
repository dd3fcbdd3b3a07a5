"""Many seeds of the simulation, on all cores. Prints each that fails, and the command that runs it again."""

from __future__ import annotations

import argparse
import sys

from nosync.testing.simulation import Cluster
from nosync.testing.simulation_oracle import SimulationError
from tests.simulation.seeds import count_failures


def failure_of(seed: int) -> str:
    """What went wrong with a seed; nothing if nothing did."""
    try:
        Cluster(seed).run()
    except SimulationError as error:
        return str(error)
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds, from 0")
    parser.add_argument("--seed", type=int, help="one seed, with its course of events")
    given = parser.parse_args()
    if given.seed is not None:
        cluster = Cluster(given.seed)
        try:
            cluster.run()
        finally:
            print("\n".join(cluster.trace))
        return
    sys.exit(1 if count_failures(failure_of, range(given.seeds), "make sim SEED=") else 0)


if __name__ == "__main__":
    main()
