"""Registers on several nodes that exchange files in any order: pins, marks of sinks and instances of jobs agree in the
end.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nosync.lsm.errors import FencedError, InvalidInputError
from nosync.lsm.facts.deliveries import DeliveryLog, old_deliveries
from nosync.lsm.facts.fencing import Instance, check_fence, newest_instance, old_instances, take_over
from nosync.lsm.facts.or_set import register_files
from nosync.lsm.facts.pins import Pin, Pins
from nosync.lsm.manifests.branches import Refs
from nosync.lsm.model.timestamp import Epoch
from nosync.lsm.platform.env import Env
from nosync.lsm.platform.store_marker import create_store
from nosync.replication.transport.codec import check_name
from tests.helpers.depth import examples

ENV = Env()
NODES = 3
NAMES = ("a", "b")


@contextmanager
def nodes() -> Iterator[list[Path]]:
    with tempfile.TemporaryDirectory() as directory:
        roots = [Path(directory, f"n{i}") for i in range(NODES)]
        for root in roots:
            create_store(root, 8, ENV, store_id="s")
        yield roots


def copy(source: Path, target: Path, path: PurePosixPath) -> None:
    """What replication does with a file: its name is checked, and it is there or not."""
    assert check_name(str(path)) == str(path)
    (target / path).parent.mkdir(parents=True, exist_ok=True)
    if source != target:
        shutil.copyfile(source / path, target / path)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("pin"), st.integers(0, NODES - 1), st.sampled_from(NAMES), st.integers(0, 3)),
        st.tuples(st.just("unpin"), st.integers(0, NODES - 1), st.sampled_from(NAMES), st.just(0)),
        st.tuples(st.just("copy"), st.integers(0, NODES - 1), st.integers(0, NODES - 1), st.integers(0, 20)),
    ),
    max_size=25,
)


@settings(max_examples=examples(60), deadline=None)
@given(STEPS)
def test_pins_of_several_nodes_agree_in_the_end(steps: list[tuple[str, int, object, int]]) -> None:
    """The oracle: an unpin takes back the pins that its node had been told of, and nothing else."""
    with nodes() as roots:
        said: dict[str, tuple[str, int]] = {}  # by file, what was said
        taken_back: set[str] = set()
        for kind, node, of, n in steps:
            root = roots[node]
            here = {str(p) for p in register_files(root, ENV)}
            standing = {f: pin for f, pin in said.items() if f in here and f.replace(".json", ".gone.json") not in here}
            if kind == "pin":
                held = min((t for name, t in standing.values() if name == of), default=None)
                pin = Pin(Epoch(n), str(of))
                if held is not None and held != n:
                    with pytest.raises(InvalidInputError, match=f"already holds timestamp {held}"):
                        Pins(root, ENV).publish(pin)
                    continue
                Pins(root, ENV).publish(pin)
                said |= {str(p): (pin.name, n) for p in register_files(root, ENV) if str(p) not in here}
            elif kind == "unpin":
                Pins(root, ENV).delete(str(of))
                taken_back |= {f for f, (name, _) in standing.items() if name == of}
            elif files := register_files(root, ENV):
                assert isinstance(of, int)
                copy(root, roots[of], files[n % len(files)])
        for source in roots:
            for target in roots:
                for path in register_files(source, ENV):
                    copy(source, target, path)
        expected: dict[str, int] = {}
        for file, (name, t) in said.items():
            if file not in taken_back:
                expected[name] = min(t, expected.get(name, t))
        for root in roots:
            assert {name: pin.t for name, pin in Pins(root, ENV).by_name().items()} == expected


def test_of_two_jobs_that_began_at_once_on_two_nodes_one_goes_on() -> None:
    with nodes() as (one, other, _):
        first, second = take_over(one, "main", ENV), take_over(other, "main", ENV)
        assert first.number == second.number == 1
        for root, instance in ((one, first), (other, second)):
            check_fence(root, "main", instance, ENV)  # neither knows of the other yet
        for source, target in ((one, other), (other, one)):
            for path in register_files(source, ENV):
                copy(source, target, path)
        winner, loser = max(first, second), min(first, second)
        for root in (one, other):
            check_fence(root, "main", winner, ENV)
            with pytest.raises(FencedError, match="has taken over"):
                check_fence(root, "main", loser, ENV)
        third = take_over(one, "main", ENV)
        assert third.number == 2
        assert third > winner
        check_fence(one, "main", None, ENV)
        check_fence(one, "other-line", Instance(1, "x"), ENV)


def test_a_sinks_marks_name_the_line_and_can_be_taken_back() -> None:
    rewound = Refs().after(
        {"do": "rewind", "name": "rewind-1", "line": "rewind-1", "parent": "main", "at": 0, "keep_as": "old"}
    )
    with nodes() as (one, other, _):
        marks = DeliveryLog(one, "counts", "main", Refs(), ENV)
        for t in (0, 1, 2):
            assert not marks.delivered(t)
            marks.mark(t)
        assert marks.left_after() is None, "what is lost and computed again is the same: it was given already"
        for path in register_files(one, ENV):
            copy(one, other, path)
        again = DeliveryLog(other, "counts", "rewind-1", rewound, ENV)
        assert [again.delivered(t) for t in (0, 1, 2)] == [True, False, False]
        assert (again.last(), again.left_after()) == (0, 0)
        again.mark(1)
        assert again.delivered(1)
        withdrawn = again.after(0)
        assert sorted(fact.path.parts[-2] for fact in withdrawn) == ["main", "main", "rewind-1"]
        again.take_back(withdrawn)
        assert (again.last(), again.left_after()) == (0, None)
        back = DeliveryLog(other, "counts", "main", rewound, ENV)  # the old timeline is promoted again
        assert [back.delivered(t) for t in (0, 1, 2)] == [True, False, False]
        back.mark(1)
        assert back.delivered(1)


def test_marks_of_lines_that_were_left_long_ago_say_where_they_left() -> None:
    refs = Refs().after({"do": "rewind", "name": "r", "line": "r", "parent": "main", "at": 500, "keep_as": None})
    with nodes() as (root, _, _):
        marks = DeliveryLog(root, "counts", "main", Refs(), ENV)
        for t in (1698, 1699):  # those before are old, and gone
            marks.mark(t)
        assert DeliveryLog(root, "counts", "r", refs, ENV).left_after() == 500
        further = refs.after({"do": "rewind", "name": "r2", "line": "r2", "parent": "r", "at": 40, "keep_as": None})
        assert DeliveryLog(root, "counts", "r2", further, ENV).left_after() == 40
        assert further.held_until("r2") == {"r2": None, "r": 40, "main": 40}


def test_only_what_is_long_replaced_is_old() -> None:
    with nodes() as (root, _, _):
        instances = [take_over(root, "main", ENV) for _ in range(4)]
        marks = DeliveryLog(root, "counts", "main", Refs(), ENV)
        for t in (0, 5, 1004, 1005):
            marks.mark(t)
        Pins(root, ENV).publish(Pin(Epoch(0), "first"))
        files = register_files(root, ENV)
        assert [path.name.partition("-")[0] for path in old_instances(files)] == ["1", "2"]
        assert sorted(path.name.partition("-")[0] for path in old_deliveries(files)) == ["0", "5"]
        assert newest_instance(root, "main", ENV) == instances[-1]


def test_what_was_sent_long_ago_leaves_nothing_behind() -> None:
    with nodes() as (root, _, _):
        marks = DeliveryLog(root, "counts", "main", Refs(), ENV)
        for t in (0, 1, 1004):
            marks.begin_sending(t)
            if t != 1:  # of this one the job died
                marks.take_back(marks.unsent())
        old = old_deliveries(register_files(root, ENV))
        assert sorted(path.name.partition("-")[0] for path in old if path.parent.name == "_unsent") == ["0", "0"]
        assert len({path.name.endswith(".gone.json") for path in old if path.parent.name == "_unsent"}) == 2
        assert marks.last_sent() == 1004, "what one node has heard of alone, and is so old, was given since"
        marks.begin_sending(1005)
        assert marks.last_sent() == 1004
