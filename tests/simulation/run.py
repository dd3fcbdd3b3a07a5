"""Many seeds of the simulation, on all cores. Prints each that fails, and the command that runs it again."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time

from nosync.testing.simulation import Cluster
from nosync.testing.simulation_oracle import SimulationError


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
    started, failed = time.perf_counter(), 0
    with multiprocessing.Pool() as pool:
        for seed, why in enumerate(pool.imap(failure_of, range(given.seeds), chunksize=20)):
            if why:
                failed += 1
                print(f"{why}\n  again: make sim SEED={seed}", flush=True)
            if (seed + 1) % 1000 == 0:
                print(f"{seed + 1:,} seeds, {failed} failed, {time.perf_counter() - started:.0f} s", flush=True)
    print(f"{given.seeds:,} seeds, {failed} failed, {time.perf_counter() - started:.0f} s")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
