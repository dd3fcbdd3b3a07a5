"""How long a Spark job over three hosts takes to go on when one of them is lost; with a small and a larger state. Beside Flink.

The hosts are network namespaces (root), else addresses of the loopback network; each has a Spark worker, a daemon and a
directory. Given is the time from the loss until the epoch that it hit has its output, everything included: noticing, taking
the host out, cancelling, running the epoch again; and beside it what an epoch takes without a loss. Nothing is restored: the
state is in the others' directories. The goal is about what the loss adds.

Flink has a task manager on each host, of which one is spare, RocksDB, incremental checkpoints every second onto a disk that
all share, and heartbeats as quick as ours. Where two hosts lose their workers, the spare one takes both tasks. Given is the
time until all its tasks run again, with their state, as its REST interface shows it, whose caches (3 s by default) are switched
off; what it then computes again since the last checkpoint is not counted. Each is done several times; given is the median.
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.flinkcluster import flink_cluster
from bench.harness import Result, Samples
from nosync.replication.protocol.peer import SUSPECT_AFTER_S
from nosync.testing.driver import ROWS_PER_EPOCH, loading_epochs
from nosync.testing.namespaces import Hosts
from nosync.testing.spark_hosts import SparkHosts, cluster

HARM_AFTER, BEFORE, EPOCHS = 12, 6, 16
"""Of those after the epochs in which the state is made."""
SMALL_KEYS, LARGE_KEYS = 400_000, 6_000_000
"""About 0.4 and 2.7 GB of state."""
SPARKS_OWN_S = 120.0
"""spark.network.timeout: how long Spark waits for a host that says nothing."""
LOST = "n3"
PATIENCE_S = 900.0
QUICK = {
    "heartbeat.interval": "500ms",
    "heartbeat.timeout": f"{1000 * SUSPECT_AFTER_S:.0f}ms",
    "restart-strategy.type": "fixed-delay",
    "restart-strategy.fixed-delay.attempts": "1000",
    "restart-strategy.fixed-delay.delay": "0s",
    "web.refresh-interval": "20ms",  # or the REST interface tells of a failure up to 3 s late
    "rest.cache.checkpoint-statistics.timeout": "20ms",
}
REPEATS = {"short": 1, "normal": 3, "full": 5}


@dataclass(frozen=True)
class Harm:
    """Says what happens to a host: that of nosync, and Flink's. `goal_s`: at most so much later is the output than
    without it.
    """

    name: str
    ours: Callable[[SparkHosts], None]
    flinks: Callable[[Hosts], None]
    goal_s: float


def _kill_processes(hosts: Hosts) -> None:
    hosts.signal(LOST, signal.SIGKILL)


def _kill_two(hosts: Hosts) -> None:
    """The task managers that have tasks; on one of the hosts is the job manager, too, which stays."""
    _kill_processes(hosts)
    for pid in hosts.pids("n1"):
        if b"TaskManagerRunner" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)


def _stop_two(made: SparkHosts) -> None:
    for host in ("n2", "n3"):
        made.stop_spark(host)


def _freeze(hosts: Hosts) -> None:
    hosts.signal(LOST, signal.SIGSTOP)


def _lose(hosts: Hosts) -> None:
    hosts.kill(LOST)


HARMS = (
    Harm("workers of one host killed (kill -9)", lambda made: made.stop_spark(LOST), _kill_processes, 1.0),
    Harm("workers of two hosts of three killed at once", _stop_two, _kill_two, 2.0),
    Harm("the whole host frozen (SIGSTOP)", lambda made: _freeze(made.hosts), _freeze, 2.0),
    Harm("the whole host lost, its link too", lambda made: _lose(made.hosts), _lose, 2.0),
)


def run(scale: str) -> Iterator[Result]:
    variants = {"heartbeats of 0.5 s": QUICK} | ({"default": {}} if scale == "full" else {})
    for harm in HARMS[-1:] if scale == "short" else HARMS:
        until_s, state = dict[int, Samples](), dict[int, str]()
        is_large_too = scale == "full" or (scale == "normal" and harm == HARMS[-1])
        for keys in (SMALL_KEYS, LARGE_KEYS) if is_large_too else (SMALL_KEYS,):
            runs = []
            for _ in range(REPEATS[scale]):
                with tempfile.TemporaryDirectory(dir=".") as directory:
                    runs.append(_measure(Path(directory).absolute(), keys, harm.ours))
            until_s[keys], normal_s = Samples([run.until_s for run in runs]), Samples([run.normal_s for run in runs])
            extra_s = statistics.median(run.until_s - run.normal_s for run in runs)
            state[keys] = f"{keys:,} keys of 256 bytes"
            yield Result(
                f"{harm.name}; {state[keys]}", "nosync, until there is output", until_s[keys].median, "s",
                "an epoch without a loss", normal_s.median, until_s[keys].median / normal_s.median,
                f"<= {harm.goal_s} s more", extra_s <= harm.goal_s, until_s[keys].spread, len(runs),
                {"sparks_own_timeout_s": SPARKS_OWN_S, "state_bytes": runs[0].state_bytes},
            )  # fmt: skip
            computed, missing = sum(run.computed for run in runs), sum(run.missing for run in runs)
            yield Result(
                f"{harm.name}; {state[keys]}", "nosync, layers computed again", computed, "layers",
                "layers that were missing", missing, computed / missing if missing else None,
                "= 1 for one", computed == missing if missing else None, repeats=len(runs),
            )  # fmt: skip
        for name, settings in variants.items() if scale != "short" else ():
            theirs = [_flinks(settings, harm.flinks) for _ in range(REPEATS[scale])]
            ours, its = until_s[SMALL_KEYS], Samples([one["seconds"] for one in theirs])
            ratio = ours.median / its.median
            yield Result(
                f"{harm.name}; {state[SMALL_KEYS]}", "nosync, until there is output", ours.median, "s",
                f"Flink {theirs[0]['version']}, {name}: until its tasks run again", its.median, ratio, "< 1", ratio < 1,
                ours.spread, len(ours.seconds), {"flinks_state_bytes": theirs[0]["state_bytes"], **settings},
                baseline_spread=its.spread, baseline_repeats=len(theirs),
            )  # fmt: skip


def _flinks(settings: dict[str, str], harm: Callable[[Hosts], None]) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory(dir=".") as directory,
        flink_cluster(Path(directory).absolute(), settings) as made,
    ):
        return made.seconds_to_run_again(SMALL_KEYS, harm)


@dataclass(frozen=True)
class Found:
    """Says what one run found: the time of an epoch before the harm (median), the time from the harm to the output of
    the epoch that it hit, and what was lost.
    """

    normal_s: float
    until_s: float
    state_bytes: int
    missing: int
    computed: int


def _measure(root: Path, keys: int, harm: Callable[[SparkHosts], None]) -> Found:
    """Raises RuntimeError where a row was lost, or counted twice."""
    first = loading_epochs(keys)
    with cluster(root, "n1", "n2", "n3") as made:
        driver = made.start_driver("n1", epochs=first + EPOCHS, keys=keys)
        driver.wait_for_epoch(first + HARM_AFTER, PATIENCE_S)
        harmed_s = time.monotonic()
        harm(made)
        end = driver.finish()
        expected = {"rows": keys + (EPOCHS * ROWS_PER_EPOCH), "wrong_keys": 0}
        if end["outcome"] != expected:
            raise RuntimeError(f"the job's sums are of {end['outcome']}, expected {expected}")
        seconds = {line["t"]: float(line["seconds"]) for line in driver.epochs()}
        outputs_s = {line["t"]: float(line["at_s"]) for line in driver.epochs()}
        layers = [path for host in made.hosts.names for path in made.data(host).glob("layers/sums/**/*.layer")]
        state_bytes = sum(path.stat().st_size for path in layers) // made.replicas
    before = range(first + HARM_AFTER - BEFORE + 1, first + HARM_AFTER + 1)
    after = [t for t in range(first + HARM_AFTER, first + EPOCHS) if outputs_s[t] > harmed_s]
    hit = max(after, key=seconds.__getitem__)  # the one that the loss held up, or, where it held none up, any
    missing, computed = (sum(report[i] for report in end["recoveries"]) for i in (0, 1))
    normal_s = statistics.median(seconds[t] for t in before)
    return Found(normal_s, outputs_s[hit] - harmed_s, state_bytes, missing, computed)
