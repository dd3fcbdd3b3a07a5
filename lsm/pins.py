"""Pins: a named epoch that holds `since` at or below it, on every node (a savepoint, in Flink's words)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from nosync.lsm.directory import PINS
from nosync.lsm.env import Env
from nosync.lsm.errors import InvalidInputError
from nosync.lsm.layer import check_name
from nosync.lsm.parsing import parsed
from nosync.lsm.registers import Fact, add_fact, facts, read_fact, take_back
from nosync.lsm.timestamp import Epoch, pack


@dataclass(frozen=True, order=True)
class Pin:
    """A named epoch whose state stays readable: `since` does not pass it."""

    t: Epoch
    name: str


def _known(root: Path, env: Env) -> list[tuple[Pin, Fact]]:
    found = []
    for fact in facts(root, PurePosixPath(PINS), env):
        fields = read_fact(root, fact, env)
        with parsed("a pin", str(root / fact.path)):
            found.append((pin_of(fields), fact))
    return found


def pin_of(fields: Mapping[str, Any]) -> Pin:
    """Raises KeyError, TypeError or ValueError where they are not those of a pin."""
    pack(fields["t"])
    return Pin(Epoch(fields["t"]), check_name(fields["name"], "pin name"))


def publish_pin(root: Path, pin: Pin, env: Env) -> None:
    """Durable when this returns. Raises InvalidInputError where the name already holds another epoch."""
    check_name(pin.name, "pin name")
    recorded = read_pins(root, env).get(pin.name)
    if recorded is None:
        add_fact(root, PurePosixPath(PINS), pin.name, {"name": pin.name, "t": pin.t}, env)
    elif recorded != pin:
        raise InvalidInputError(
            f"pin {pin.name!r} already holds timestamp {recorded.t}: unpin it first or use another name"
        )


def read_pins(root: Path, env: Env) -> dict[str, Pin]:
    """By name. Where two nodes gave a name to two epochs at once, the earlier one counts: it keeps what both need."""
    pins: dict[str, Pin] = {}
    for pin, _ in _known(root, env):
        pins[pin.name] = min(pin, pins.get(pin.name, pin))
    return pins


def delete_pin(root: Path, name: str, env: Env) -> None:
    for pin, fact in _known(root, env):
        if pin.name == name:
            take_back(root, fact, env)
