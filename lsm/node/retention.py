"""How long history is kept: `retain=` says it, and pins, which may hold any epoch."""

from __future__ import annotations

from collections.abc import MutableMapping

from nosync.lsm.errors import CompactedError, CorruptionError
from nosync.lsm.facts.pins import Pin, Pins
from nosync.lsm.manifests.timelines import Timelines
from nosync.lsm.model.timestamp import ZERO, Time, epoch_of, pack
from nosync.lsm.node.durable_layers import DurableLayers
from nosync.lsm.node.metadata_sync import MetadataSync
from nosync.lsm.trace.directory import LayerDirectory

_PROBLEM = "pins"


class Retention:
    """The pins of one directory, and the compaction frontier. `retain`: so many epochs are kept; None: all."""

    def __init__(
        self,
        directory: LayerDirectory,
        retain: int | None,
        layers: DurableLayers,
        timelines: Timelines,
        small: MetadataSync,
        problems: MutableMapping[str, str],
    ) -> None:
        self._files, self._retain = Pins(directory.root, directory.env), retain
        self._layers, self._timelines, self._small, self._problems = layers, timelines, small, problems
        self._pins: dict[str, Pin] = {}
        self._are_known = True

    def since(self) -> Time:
        """Returns the compaction frontier: reads as of this time and later are exact."""
        with self._layers.lock:
            newest = self._timelines.newest()
            if self._retain is None or not newest or not self._are_known:
                return ZERO
            held = [min(newest) - self._retain, *(pin.t for pin in self._pins.values())]
            return pack(max(0, min(held)))

    def check_kept(self, t: int) -> None:
        """Raises CompactedError where the history of an epoch was merged away, so that nothing can begin there."""
        merged = max((id.description.since for id in self._layers.ids()), default=ZERO)
        since = max(self.since(), merged)  # a branch moves the frontier back, and brings nothing back
        if pack(t) < since:
            raise CompactedError(
                f"the history before {epoch_of(since)} was merged away, and {t} lies before it: nothing can begin there"
            )

    def pins(self) -> dict[str, Pin]:
        """Returns the pins by name."""
        with self._layers.lock:
            return dict(self._pins)

    def pin(self, pin: Pin) -> None:
        """Keeps the state as of an epoch readable."""
        with self._layers.lock:
            self._small.note(self._files.publish(pin))
            self.read_pins()

    def unpin(self, name: str) -> None:
        """Takes a pin back."""
        with self._layers.lock:
            self._small.note(self._files.delete(name))
            self.read_pins()

    def read_pins(self) -> None:
        """Reads the pins as they are now. A damaged one may hold any epoch: then nothing of history is released."""
        try:
            self._pins = self._files.by_name()
            self._are_known = True
            self._problems.pop(_PROBLEM, None)
        except CorruptionError as error:
            self._are_known = False
            self._problems[_PROBLEM] = str(error)
