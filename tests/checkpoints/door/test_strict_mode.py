"""Strict mode under peers that are away, slow and back: what an answer promises, beside what really is on the nodes.

The gate, the intake and the keep are the real ones. Peers are sets of files, and get them in any order. The oracle asks of
the nodes that are left when others are lost: can the query go on from what they have, with what it was to read?
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nosync.checkpoints.closure import Closures
from nosync.checkpoints.door.gate import GateState, Held
from nosync.checkpoints.door.intake import Intake
from nosync.checkpoints.door.served_checkpoints import DoorSettings, gate_of
from nosync.checkpoints.index import FileIndex
from nosync.checkpoints.keep import Keep
from nosync.checkpoints.names import Batch
from nosync.lsm.platform.env import Env
from tests.checkpoints.fake_query import KINDS, FakeQuery

PATIENCE_S = 20.0
NODES = ("here", "p1", "p2")


class Clock(Env):
    """A clock that the test moves."""

    now_s = 0.0

    def monotonic_s(self) -> float:
        return self.now_s


class Published(FakeQuery):
    """Tells of each file, in order, as the door does."""

    intake: Intake | None = None

    def write(self, path: str, data: str | bytes) -> None:
        super().write(path, data)
        if self.intake is not None:
            self.intake.published(path)


class StrictMode(RuleBasedStateMachine):
    """One query, this node and two peers."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.env = Clock()
        self.held: Held | None = None
        self.held_s = 0.0
        self.is_running = False

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    @initialize(kind=st.sampled_from(KINDS), copies=st.sampled_from([2, 3]), before=st.integers(0, 4))
    def begin(self, kind: str, copies: int, before: int) -> None:
        """`before`: so many batches were there before the gate."""
        self.copies = copies
        self.query = Published(self.root / "live", kind, partitions=1)
        self.query.run(before)
        self.keep = Keep(self.root / "data", "q", self.env)
        self.intake = Intake(self.query.root, self.keep, 100, lambda: None)
        self.intake.take_all()
        self.query.intake = self.intake
        self.has: dict[str, set[str]] = {"p1": set(), "p2": set()}
        self.up = {"p1", "p2"}
        chosen = DoorSettings(is_strict=True, nodes=copies, patience_s=PATIENCE_S, copies=self.count)
        self.gate = gate_of(self.keep, self.intake, self.env, chosen)

    def count(self, keep: Keep, paths: Collection[str]) -> int:
        """What a daemon says: of each file the number of nodes that said they have it, whether up or away; the fewest."""
        return min(1 + sum(path in files for files in self.has.values()) for path in paths)

    # --- the query ----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.held is None and not self.is_running)
    @rule()
    def begin_batch(self) -> None:
        t = self.query.begin()
        self.intake.step(0.0)
        self.held = self.gate.hold([f"offsets/{t}", *([f"commits/{t - 1}"] if t else [])])
        self.held_s = self.env.now_s

    @precondition(lambda self: self.is_running)
    @rule()
    def end_batch(self) -> None:
        self.query.states()
        self.query.commit()
        self.intake.step(0.0)
        self.is_running = False

    @precondition(lambda self: self.held is not None)
    @rule()
    def ask(self) -> None:
        assert self.held is not None
        was_held = self.held.until_s is not None and self.gate.state is GateState.STRICT
        if not self.gate.may_answer(self.held):
            assert self.env.now_s - self.held_s < PATIENCE_S, "nobody waits for longer"
            assert not self.is_all_there(), "what is there is not waited for"
            return
        if was_held and self.gate.state is GateState.STRICT:
            assert self.is_promised(), "the answer came before the copies"
        self.held, self.is_running = None, True

    def is_all_there(self) -> bool:
        return all(files >= set(self.keep.index.paths()) for files in self.has.values())

    def is_promised(self) -> bool:
        """Returns whether whoever is left can go on after the batch before, and reads what this batch was to read."""
        t = self.query.batch
        files = {"here": set(self.keep.index.paths()), **self.has}
        for lost in itertools.combinations(NODES, self.copies - 1):
            left = set().union(*(files[node] for node in NODES if node not in lost))
            index = FileIndex({path: self.env.size_bytes(self.keep.root / path) for path in left})
            closures = Closures(index, self.keep.read, self.keep.head)
            if t and closures.why_not(Batch(t - 1)) is not None:
                return False
            reads = {f"offsets/{t}", "metadata"} | {
                f"sources/0/{n}" for n in [t] if (self.query.root / f"sources/0/{n}").exists()
            }
            if not reads <= left or (t % 4 == 3 and f"sources/0/{t}.compact" not in left):
                return False
        return True

    # --- the peers ----------------------------------------------------------------------------------------------------

    @rule(peer=st.sampled_from(["p1", "p2"]))
    def is_away_or_back(self, peer: str) -> None:
        self.up ^= {peer}

    @rule(peer=st.sampled_from(["p1", "p2"]), data=st.data())
    def is_slow(self, peer: str, data: st.DataObject) -> None:
        """It gets some of what it lacks, in any order."""
        lacks = sorted(set(self.keep.index.paths()) - self.has[peer])
        if peer in self.up and lacks:
            self.has[peer] |= set(data.draw(st.lists(st.sampled_from(lacks), max_size=12)))

    @rule(peer=st.sampled_from(["p1", "p2"]), but=st.integers(0, 3))
    def catches_up(self, peer: str, but: int) -> None:
        """It gets all that it lacks, but for a few."""
        lacks = sorted(set(self.keep.index.paths()) - self.has[peer])
        if peer in self.up:
            self.has[peer] |= set(lacks[: len(lacks) - but])

    @rule(seconds=st.sampled_from([1.0, 7.0, PATIENCE_S]))
    def time_goes_by(self, seconds: float) -> None:
        self.env.now_s += seconds

    @invariant()
    def is_strict_again_when_all_is_there(self) -> None:
        if not hasattr(self, "gate") or self.held is not None:
            return
        if self.is_all_there():
            assert self.gate.state is GateState.STRICT


StrictMode.TestCase.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestStrictMode = StrictMode.TestCase
