"""Strict mode's gate, with a clock and copies that the test moves."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nosync.checkpoints.door.gate import Gate, GateState, Held

PATIENCE_S = 20.0


class World:
    """A clock, and files on nodes: `here` always has a file, peers have the first files of those that were published."""

    def __init__(self, nodes: int = 2, before: Sequence[str] = ()) -> None:
        self.now_s, self.nodes = 0.0, nodes
        self.published: list[str] = list(before)
        self.at_peer = 0
        self.gate = Gate("q", self.copies, lambda: self.now_s, nodes=nodes, patience_s=PATIENCE_S, before=tuple(before))

    def copies(self, paths: Sequence[str]) -> int:
        return 2 if all(path in self.published[: self.at_peer] for path in paths) else 1

    def ship(self) -> None:
        self.at_peer = len(self.published)

    def begin(self, n: int) -> Held:
        """Publishes offsets/n, after the commit of the batch before."""
        needs = [f"offsets/{n}"] + ([f"commits/{n - 1}"] if n else [])
        self.published += reversed(needs)
        return self.gate.hold(needs)


def test_an_answer_waits_for_the_copies_of_its_batch() -> None:
    world = World()
    held = world.begin(0)
    assert world.gate.state is GateState.STRICT
    assert not world.gate.may_answer(held)
    world.now_s += PATIENCE_S - 1
    assert not world.gate.may_answer(held)
    world.ship()
    assert world.gate.may_answer(held)
    assert world.gate.state is GateState.STRICT


def test_one_node_waits_for_itself_alone() -> None:
    world = World(nodes=1)
    assert world.gate.may_answer(world.begin(0))
    assert world.gate.state is GateState.STRICT


def test_patience_ends_and_nothing_is_held_until_the_peers_are_back() -> None:
    world = World()
    held = world.begin(0)
    world.now_s += PATIENCE_S
    assert world.gate.may_answer(held)
    assert world.gate.state is GateState.DEGRADED
    for n in range(1, 5):
        assert world.gate.may_answer(world.begin(n)), "a query does not wait again and again"
    world.at_peer = 1  # offsets/0 came: the peers are back, and far behind
    assert world.gate.state is GateState.CATCHING_UP
    assert world.gate.may_answer(world.begin(5))
    world.ship()
    held = world.begin(6)
    assert world.gate.state is GateState.STRICT
    assert not world.gate.may_answer(held)
    world.ship()
    assert world.gate.may_answer(held)


def test_what_was_given_up_on_may_be_removed_before_it_is_there() -> None:
    """After a long time without peers it is none of the batches that are kept."""
    world = World()
    held = world.begin(0)
    world.now_s += PATIENCE_S
    assert world.gate.may_answer(held)
    for n in range(1, 5):
        world.begin(n)
    world.published = world.published[-2:]
    assert world.gate.state is GateState.DEGRADED
    world.ship()
    assert world.gate.state is GateState.STRICT


def test_what_was_there_before_does_not_use_up_patience() -> None:
    world = World(before=["offsets/7", "commits/7"])
    assert world.gate.state is GateState.CATCHING_UP
    assert world.gate.may_answer(world.begin(8))
    assert world.gate.state is GateState.CATCHING_UP
    world.ship()
    assert world.gate.state is GateState.STRICT


def test_becoming_degraded_lets_all_answers_go() -> None:
    world = World()
    first, second = world.begin(0), world.begin(1)
    world.now_s += PATIENCE_S
    assert world.gate.may_answer(second)
    assert world.gate.may_answer(first)


@pytest.mark.parametrize("nodes", [1, 2])
@given(steps=st.lists(st.sampled_from(["batch", "ship", "ship one", "wait", "wait long"]), max_size=60))
def test_never_answered_too_early_nor_too_late(nodes: int, steps: list[str]) -> None:
    """What is answered by a strict gate is on all nodes, and nothing is held for longer than patience."""
    world = World(nodes)
    held: Held | None = None
    since_s, n = 0.0, 0
    for step in steps:
        match step:
            case "batch" if held is None:
                held, since_s, n = world.begin(n), world.now_s, n + 1
            case "ship":
                world.ship()
            case "ship one":
                world.at_peer = min(world.at_peer + 1, len(world.published))
            case "wait":
                world.now_s += 1.0
            case "wait long":
                world.now_s += PATIENCE_S
        if held is None:
            continue
        was_held = held.until_s is not None
        may = world.gate.may_answer(held)
        assert may or world.now_s - since_s < PATIENCE_S
        if may and was_held and world.gate.state is GateState.STRICT:
            assert world.copies(held.needs) >= nodes
        if world.copies(held.needs) >= nodes:
            assert may
        if may:
            held = None
    world.ship()
    assert world.gate.state is GateState.STRICT, "it is strict again when all copies are there"
