"""Which layers are put into a bucket, and which of it are not needed any more. Pure.

Invariants
- A layer is put where the bucket holds nothing that covers its time range. Of layers that cover the same the narrowest
  are taken: what was merged since it was written does not go twice.
- A merged layer that covers only what is there goes where it takes much off: it has a third of the bytes of what it
  stands for, or stands for many small files. So at most half a byte more is sent for each byte of change.
- A file of a kept checkpoint that is not here is dropped where the checkpoint is: a node that lost its disk, and is filled
  by peers that do not keep it, has none of it.
- A layer that is not here is dropped when another one in the bucket stands for it, or when no sealed epoch needs it. A
  layer that was merged past the epoch up to which the bucket is whole stands for nothing yet: that epoch is read of its
  parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePosixPath

from nosync.lsm.manifests.branches import MAIN
from nosync.lsm.manifests.input_policy import policies, releasable_until
from nosync.lsm.manifests.timelines import Timelines
from nosync.lsm.model.layer import Description, LayerId
from nosync.lsm.model.timestamp import Time, pack
from nosync.lsm.platform.layout import MANIFESTS, PINS
from nosync.lsm.platform.opaque import checkpoint_of
from nosync.replication.protocol.file_names import FileName, FileVersion
from nosync.replication.protocol.inventory import Inventory, covers

SHRINKS_TO = 3
"""A merged layer goes where it has at most one so-many-th of the bytes that it takes the place of."""
MANY_FILES, SMALL_FILE_BYTES = 64, 1 << 20
"""Or where it takes the place of so many files, each smaller than this."""


def uncovered(
    candidates: Iterable[FileVersion], held: Inventory, going: Iterable[FileVersion] = ()
) -> list[FileVersion]:
    """Returns the layers among these that the bucket lacks: those that cover time which nothing there covers, and those
    whose name stands for other contents there. In the order in which they are best put. `going`: what is on its way.
    """
    found: list[FileVersion] = []
    reached: dict[str, list[Description]] = {}
    for version in going:
        if version.name.layer is not None:
            of_trace = reached.setdefault(version.name.place, list(held.layers(version.name.place)))
            of_trace.append(version.name.layer.description)
    for version in sorted(candidates, key=_narrowest_first):
        name = version.name
        layer = name.layer
        if layer is None or layer.description.is_of_rounds:
            continue
        known = held.get(name)
        if known is not None and known.digest == version.digest:
            continue
        of_trace = reached.setdefault(name.place, list(held.layers(name.place)))
        if known is None and covers(of_trace, layer.description):
            continue
        of_trace.append(layer.description)
        found.append(version)
    return sorted(found, key=_in_order)


def shrinking(records: Iterable[FileVersion], held: Inventory, is_here: Callable[[str], bool]) -> list[FileVersion]:
    """Returns merged layers that take the place of much that is in the bucket, and that this node has no more."""
    found = []
    for version in records:
        layer = version.name.layer
        if layer is None or layer.is_fresh or version.name in held:
            continue
        replaced = [
            other
            for d, name in held.layers(version.name.place).items()
            if layer.description.covers(d) and not is_here(name) and (other := held.get(name)) is not None
        ]
        total = sum(other.size_bytes for other in replaced)
        small = sum(1 for other in replaced if other.size_bytes < SMALL_FILE_BYTES)
        if (replaced and total >= SHRINKS_TO * version.size_bytes) or small >= MANY_FILES:
            found.append(version)
    return sorted(found, key=_in_order)


def _narrowest_first(version: FileVersion) -> tuple[int, str]:
    layer = version.name.layer
    return (0 if layer is None else layer.description.upper - layer.description.lower), version.name


def _in_order(version: FileVersion) -> tuple[int, str]:
    return version.name.order, version.name


def not_needed(
    held: Inventory,
    layers: Mapping[str, FileVersion],
    small: set[str],
    timelines: Timelines,
    released: int | None,
    exact: Time,
) -> list[str]:
    """Returns what is in the bucket and need not be: `layers` and `small` are what this node has, which is whole.

    `released`: the safe point of the main timeline, up to which inputs may be gone. `exact`: as of then and later the
    states are read of the bucket.
    """
    ended = _Ended(timelines, released)
    checkpoints = {checkpoint_of(name) for name in small}
    found = []
    for version in held:
        name = version.name
        if name in layers or name in small:
            continue
        if name.layer is not None:
            replaced = _is_replaced(name.layer, held.layers(name.place), layers, exact)
            if replaced or ended.is_layer_unneeded(name.layer):
                found.append(str(name))
        elif name.span is not None:
            if held.has_archived(name) or ended.is_manifest_unneeded(name):
                found.append(str(name))
        elif name.is_opaque:
            if checkpoint_of(name) in checkpoints:
                found.append(str(name))
        elif name.entry is None and not name.startswith(f"{PINS}/"):
            found.append(str(name))  # instances and deliveries that others stand for
    return found


def _is_replaced(
    layer: LayerId, beside: Mapping[Description, FileName], layers: Mapping[str, FileVersion], exact: Time
) -> bool:
    """Returns whether another layer in the bucket stands for one that is not here. Of two that stand for each other the
    one that is here stays.
    """
    d = layer.description
    return any(
        other != d
        and other.covers(d)
        and other.since <= max(exact, d.since)
        and (not d.covers(other) or name in layers or other > d)
        for other, name in beside.items()
    )


class _Ended:
    """What no branch needs, as the timelines of this node say."""

    def __init__(self, timelines: Timelines, released: int | None) -> None:
        self._timelines = timelines
        self._kept = timelines.refs.kept_until()
        until = releasable_until(timelines, released)
        last = timelines.manifest(until) if until >= 0 else None
        self._inputs, self._inputs_end = set(policies(last)), pack(until + 1) if until >= 0 else 0
        self._main = timelines.histories(MAIN)

    def is_layer_unneeded(self, layer: LayerId) -> bool:
        trace = layer.trace
        if trace.stage in self._inputs and layer.description.upper <= self._inputs_end:
            return trace.fingerprint in {span.fingerprint for span in self._main.get(trace.stage, ())}
        return self._timelines.sealed_until(trace) <= layer.description.lower

    def is_manifest_unneeded(self, name: FileName) -> bool:
        span = name.span
        assert span is not None, "it is a manifest"
        timeline = PurePosixPath(span.timeline).relative_to(MANIFESTS).name
        if timeline not in self._kept:
            return True
        end = self._kept[timeline]
        return end is not None and span.first > end
