"""Random flows of several stages, with files lost around merges and other numbers of shards, against a run without any of that.

NOSYNC_FUZZ=n tries n flows in the place of a few (`make fuzz`).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import nosync
from nosync.job.recovery_planner import Cell, RecordedCells, plan
from nosync.lsm.platform.env import Env
from tests.helpers import pipelines
from tests.helpers.pipelines import Op, build, table
from tests.helpers.runner import StoreRunner

EXAMPLES = int(os.environ.get("NOSYNC_FUZZ", "15"))
GRACE_S = 100.0
Rows = list[tuple[int, int, int]]


class Clock(Env):
    """A clock that the test sets forward."""

    now_s = 0.0

    def monotonic_s(self) -> float:
        return self.now_s


@dataclass(frozen=True)
class Event:
    """What happens after an epoch: merges, then files are lost, then time passes, then all is recovered and time passes again."""

    shards: int
    merges: int
    lost: tuple[int, ...]
    is_late: bool


events = st.builds(
    Event, st.integers(1, 3), st.integers(0, 4), st.lists(st.integers(0, 300), max_size=6).map(tuple), st.booleans()
)


@contextmanager
def a_store(env: Env) -> Iterator[nosync.Store]:
    options = nosync.StoreSettings(background=False, grace_s=GRACE_S, archive_epochs=2, retry_s=0.0)
    with tempfile.TemporaryDirectory() as root, nosync.open(Path(root) / "s", env=env, settings=options) as store:
        yield store


def recover(store: nosync.Store, runner: StoreRunner, rows: list[Rows], shards: list[int]) -> None:
    """What Job.recover does: the planner says what to compute, and epochs run in order until nothing is missing."""
    for _ in range(3):
        missing = store.missing()
        if not missing:
            return
        wanted = [Cell(m.t, m.entry.id.trace.stage, m.entry.id.trace.shard.index) for m in missing]
        inventory = RecordedCells(store.directory.descriptions, store.node.since())
        histories = store.node.histories()
        found = plan(runner.flow, inventory, wanted, histories=histories, can_replay=lambda source, t: True)
        assert found.impossible == {}
        for step in found.steps:
            runner.shards = shards[step.t]
            runner.advance(step.t, table(rows[step.t]))
        store.sync()
    assert store.missing() == []


def states(store: nosync.Store, stages: list[str], epochs: int) -> dict[tuple[str, int], Any]:
    found = {}
    for stage in stages:
        for t in range(epochs):
            rows = store.read(stage, t)
            found[stage, t] = sorted(map(repr, rows.select(sorted(rows.column_names)).to_pylist()))
    return found


@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
@given(pipelines.pipelines, st.lists(st.tuples(st.lists(pipelines.row, max_size=6), events), min_size=2, max_size=6))
def test_whatever_happens_every_epoch_reads_as_without_it(ops: list[Op], epochs: list[tuple[Rows, Event]]) -> None:
    rows, shards = [of for of, _ in epochs], [event.shards for _, event in epochs]
    env = Clock()
    with a_store(env) as store, a_store(Env()) as calm:
        runner, oracle = StoreRunner(build(ops), store, 1), StoreRunner(build(ops), calm, 2, shards=1)
        for t, (of_epoch, event) in enumerate(epochs):
            runner.shards = event.shards
            runner.advance(t, table(of_epoch))
            store.sync()
            oracle.advance(t, table(of_epoch))
            for _ in range(event.merges):
                store.node.merge_once()
            files = sorted((store.directory.root / "layers").rglob("*.layer"))
            for path in {files[n % len(files)] for n in event.lost}:
                path.unlink()
            if event.is_late:  # its garbage goes before anybody looked
                env.now_s += 2 * GRACE_S
                store.node.collect_garbage()
                store.node.archive_manifests()
            recover(store, runner, rows, shards)
        env.now_s += 2 * GRACE_S
        store.node.collect_garbage()
        assert store.missing() == []
        stages = [stage.name for stage in runner.flow.recorded]
        assert states(store, stages, len(epochs)) == states(calm, stages, len(epochs))
        assert store.safe_point() == len(epochs) - 1


def test_the_oracle_sees_a_wrong_row() -> None:
    """A canary: what the test compares is not empty."""
    with a_store(Env()) as one, a_store(Env()) as other:
        for store, v in ((one, 1), (other, 2)):
            StoreRunner(build([Op("sums", 1, 0, 0)]), store, 1, shards=1).advance(0, table([(1, 1, v)]))
        assert states(one, ["s0"], 1) != states(other, ["s0"], 1)
        assert isinstance(one.read("s0", 0), pa.Table)
