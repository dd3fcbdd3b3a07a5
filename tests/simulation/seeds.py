"""Many seeds of a simulation, on all cores."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable

from tests.helpers.progress import shown


def count_failures(failure_of: Callable[[int], str], seeds: range, again: str) -> int:
    """Runs the seeds, shows how far it is, and prints each that fails, with the command that runs it again.

    `failure_of`: returns what went wrong with a seed, nothing if nothing did. `again`: a command, to which the seed is added.
    """
    began_s, failed = time.monotonic(), 0
    with multiprocessing.Pool() as pool:
        reasons = pool.imap(failure_of, seeds, chunksize=5)
        for done, why in zip(shown(len(seeds), "seeds"), reasons, strict=True):
            if why:
                failed += 1
                print(f"{why}\n  again: {again}{seeds[done]}", flush=True)
    print(f"{len(seeds):,} seeds, {failed} failed, {time.monotonic() - began_s:.0f} s", flush=True)
    return failed
