"""What a pin costs, and that what is remembered of pins is what stands in the directory."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

import nosync
from nosync.lsm.facts.pins import Pin, Pins
from nosync.lsm.model.timestamp import Epoch
from nosync.lsm.platform.env import Env


class Counting(Env):
    """Counts what asks the disk for a file of the registers."""

    def __init__(self) -> None:
        self.read_pins = 0

    def read(self, path: Path) -> bytes:
        self.read_pins += path.parent.name == "pins"
        return super().read(path)


def filled(root: Path, env: Env) -> nosync.Store:
    store = nosync.open(root, env=env, settings=nosync.StoreSettings(background=False), retain=1)
    store.append("counts", t=0, rows=pa.table({"k": [1]}), key=["k"])
    store.seal(0)
    return store


def test_a_pin_reads_as_much_whether_there_are_none_or_hundreds(tmp_path: Path) -> None:
    env = Counting()
    with filled(tmp_path / "s", env) as store:
        costs = []
        for i in range(200):
            before = env.read_pins
            store.pin(f"p{i}", 0)
            assert store.pins()[f"p{i}"] == 0
            costs.append(env.read_pins - before)
        for i in range(100):
            before = env.read_pins
            store.unpin(f"p{i}")
            costs.append(env.read_pins - before)
        assert max(costs) <= 1
        with nosync.open(tmp_path / "s", read_only=True, env=env) as reader:
            assert len(reader.pins()) == 100
            before = env.read_pins
            assert len(reader.pins()) == 100
            assert env.read_pins == before
            store.pin("late", 0)
            assert reader.pins()["late"] == 0


def test_what_others_pin_and_unpin_is_seen(tmp_path: Path) -> None:
    """By name, each as the directory has it now; a damaged one is told of, and counts as soon as it is whole."""
    with filled(tmp_path / "s", Env()):
        pass
    ours, theirs = Pins(tmp_path / "s", Env()), Pins(tmp_path / "s", Env())
    assert ours.by_name() == {}
    theirs.publish(Pin(Epoch(3), "a"))
    assert ours.by_name() == {"a": Pin(Epoch(3), "a")}
    with pytest.raises(nosync.InvalidInputError, match="already holds timestamp 3"):
        ours.publish(Pin(Epoch(4), "a"))
    ours.delete("a")
    assert theirs.by_name() == {}
    theirs.publish(Pin(Epoch(5), "a"))
    assert ours.by_name() == {"a": Pin(Epoch(5), "a")}
    (path,) = theirs.publish(Pin(Epoch(6), "b"))
    whole = (tmp_path / "s" / path).read_bytes()
    (tmp_path / "s" / path).write_bytes(b"{")
    with pytest.raises(nosync.CorruptionError, match=path.name):
        ours.by_name()
    (tmp_path / "s" / path).write_bytes(whole)
    assert ours.by_name()["b"].t == 6
