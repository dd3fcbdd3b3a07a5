"""How long a Spark job over three hosts takes to go on when one of them is lost; with a small and a larger state.

The hosts are network namespaces (root), else addresses of the loopback network; each has a Spark worker, a daemon and a
directory. Given is how much longer the epoch that the loss falls into takes than the ones before it, everything included:
noticing, taking the host out, cancelling, running the epoch again. Nothing is restored: the state is in the others' directories.
"""

from __future__ import annotations

import signal
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.harness import Result
from nosync.testing.spark_hosts import SparkHosts, cluster

HARM_AFTER, EPOCHS = 7, 10
SPARKS_OWN_S = 120.0
"""spark.network.timeout: how long Spark waits for a host that says nothing."""


def _lose(made: SparkHosts) -> None:
    made.hosts.kill("n3")


def _freeze(made: SparkHosts) -> None:
    made.hosts.signal("n3", signal.SIGSTOP)


def _kill_spark(made: SparkHosts) -> None:
    made.stop_spark("n3")


HARM: list[tuple[str, Callable[[SparkHosts], None], float]] = [
    ("Spark's worker and executor killed (kill -9)", _kill_spark, 1.0),
    ("the whole host frozen (SIGSTOP)", _freeze, 2.0),
    ("the whole host lost, its link too", _lose, 2.0),
]


def run(scale: str) -> Iterator[Result]:
    for name, harm, goal_s in HARM:
        extra = {}
        for keys in (10**5, 10**7 if scale == "full" else 2 * 10**6):
            with tempfile.TemporaryDirectory(dir=".") as directory:
                normal_s, hit_s = _measure(Path(directory).absolute(), keys, harm)
            extra[keys] = hit_s - normal_s
            ratio = hit_s / normal_s
            yield Result(
                f"{name}; {keys:,} keys", "nosync, beyond a normal epoch", extra[keys], "s", "an epoch before it", normal_s,
                ratio, f"<= {goal_s} s", extra[keys] <= goal_s, None, 1, {"sparks_own_timeout_s": SPARKS_OWN_S},
            )  # fmt: skip


def _measure(root: Path, keys: int, harm: Callable[[SparkHosts], None]) -> tuple[float, float]:
    """Seconds of an epoch before the harm (median), and of the longest one after it."""
    with cluster(root, "n1", "n2", "n3") as made:
        driver = made.start_driver("n1", epochs=EPOCHS, keys=keys)
        driver.wait_for_epoch(HARM_AFTER, 600.0)
        harm(made)
        driver.finish()
        seconds = {line["t"]: float(line["seconds"]) for line in driver.epochs()}
    return (
        statistics.median(seconds[t] for t in range(HARM_AFTER - 3, HARM_AFTER + 1)),
        max(seconds[t] for t in range(HARM_AFTER + 1, EPOCHS)),
    )
