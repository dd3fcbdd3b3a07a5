"""Pins: a named epoch that holds `since` at or below it, on every node (a savepoint, in Flink's words)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from nosync.lsm.errors import CorruptionError, InvalidInputError
from nosync.lsm.facts.or_set import Element, add_element, elements, read_element, remove
from nosync.lsm.model.layer import check_name
from nosync.lsm.model.timestamp import Epoch, pack
from nosync.lsm.platform.env import Env
from nosync.lsm.platform.layout import PINS
from nosync.lsm.platform.parsing import parsed


@dataclass(frozen=True, order=True)
class Pin:
    """A named epoch whose state stays readable: `since` does not pass it."""

    t: Epoch
    name: str


def pin_of(fields: Mapping[str, Any]) -> Pin:
    """Raises KeyError, TypeError or ValueError where they are not those of a pin."""
    pack(fields["t"])
    return Pin(Epoch(fields["t"]), check_name(fields["name"], "pin name"))


def check_pinnable(t: int, oldest: int, last: int | None) -> None:
    """Raises InvalidInputError for an epoch that no pin can keep. `oldest`: the first whose history is kept."""
    pack(t)
    if last is None or not oldest <= t <= last:
        possible = "there is none yet" if last is None else f"{oldest} to {last} now"
        raise InvalidInputError(f"cannot pin {t}: a pin needs a sealed timestamp whose history is kept, {possible}")


class Pins:
    """The pins of a data directory. What a file says never changes, so each is read once, however many there are."""

    def __init__(self, root: Path, env: Env) -> None:
        self._root, self._env = root, env
        self._read: dict[PurePosixPath, Pin] = {}

    def by_name(self) -> dict[str, Pin]:
        """Returns where two nodes gave a name to two epochs at once, the earlier one counts: it keeps what both need.

        Raises CorruptionError for a file that is damaged when it is first read.
        """
        pins: dict[str, Pin] = {}
        for pin, _ in self._known():
            pins[pin.name] = min(pin, pins.get(pin.name, pin))
        return pins

    def publish(self, pin: Pin) -> list[PurePosixPath]:
        """Publishes a pin, durably, and returns the files that came. Raises InvalidInputError where the name holds
        another epoch.
        """
        check_name(pin.name, "pin name")
        recorded = self.by_name().get(pin.name)
        if recorded is None:
            element = add_element(self._root, PurePosixPath(PINS), pin.name, {"name": pin.name, "t": pin.t}, self._env)
            return [element.path]
        if recorded != pin:
            raise InvalidInputError(
                f"pin {pin.name!r} already holds timestamp {recorded.t}: unpin it first or use another name"
            )
        return []

    def delete(self, name: str) -> list[PurePosixPath]:
        """Takes a pin back, and returns the files that say so, which are durable then."""
        return [remove(self._root, element, self._env) for pin, element in self._known() if pin.name == name]

    def _known(self) -> list[tuple[Pin, Element]]:
        listed = elements(self._root, PurePosixPath(PINS), self._env)
        read = {element.path: self._read.get(element.path) or self._pin_of(element) for element in listed}
        self._read = read
        return [(read[element.path], element) for element in listed]

    def _pin_of(self, element: Element) -> Pin:
        try:
            fields = read_element(self._root, element, self._env)
            with parsed("a pin", str(self._root / element.path)):
                return pin_of(fields)
        except CorruptionError as error:
            raise CorruptionError(
                f"{error}; all history is kept until it is removed, or put back from a backup"
            ) from error
