"""Checks that the batches of a stream's checkpoint are the epochs that follow those of the store. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nosync.lsm.errors import FlowError, InvalidInputError
from nosync.lsm.manifests.manifest import Manifest

STREAMS_FROM = "streams_from"
"""The key, in a manifest of a stream, of the epoch of its checkpoint's first batch."""
STREAM_SOURCES = "stream_sources"
"""The key, in a manifest of a stream, of its sources in the order in which its checkpoint has their offsets."""
BATCHES = "batches"
"""The key, in a manifest, of the last batch of each query, where several fill a store by turns."""


def streamed_from(manifest: Manifest | None) -> int | None:
    """Returns the epoch of the first batch of the stream that an epoch came by; None where it came by none."""
    return manifest.meta.get(STREAMS_FROM) if manifest is not None else None


def batches_of(manifest: Manifest | None) -> dict[str, int]:
    """Returns the last batch of each query that a store's epochs came by, up to this one."""
    return dict(manifest.meta.get(BATCHES, {})) if manifest is not None else {}


def came_by(manifest: Manifest | None) -> dict[str, Any]:
    """Returns what a manifest says of how its rows came."""
    return (
        {key: manifest.meta[key] for key in (STREAMS_FROM, STREAM_SOURCES, BATCHES) if key in manifest.meta}
        if manifest
        else {}
    )


def in_order_of_checkpoint(
    names: Sequence[str],
    declared: Sequence[str],
    manifest: Manifest | None,
    checkpoint: str | Path,
    begun: int | None,
    last: int | None,
) -> list[str]:
    """Returns the sources of a stream in the order in which its checkpoint has them: Spark knows them by their place alone.

    `names`: in the order in which they are given. `declared`: in that of the flow, which a new checkpoint has. `manifest`: of the
    last epoch, `last`. `begun`: the last batch of the checkpoint that was begun; None: it is a new one. Raises FlowError where
    it is of other sources.
    """
    if begun is None or manifest is None:
        return [name for name in declared if name in names]
    found = manifest.meta.get(STREAM_SOURCES)
    if not isinstance(found, list):  # of an earlier version, which went by the order in which they were given
        return list(names)
    if set(found) != set(names):
        raise FlowError(
            f"{checkpoint} has the offsets of {', '.join(found)}, and the stream is of {', '.join(names)}: other sources need "
            f"another checkpoint. Take a new one and first={(last or 0) + 1}, with sources that begin after what the store has"
        )
    return [str(name) for name in found]


def check_query(
    query: str, checkpoint: str | Path, sealed: int | None, begun: int | None, committed: int | None
) -> None:
    """Raises FlowError where a checkpoint is not that of the query whose batches the store has.

    `sealed`: the last batch that the store has; `begun` and `committed`: the last that the checkpoint says this of. A
    batch is begun, sealed by the store, and committed, in this order.
    """
    if sealed is not None and (begun is None or begun < sealed):
        raise FlowError(
            f"the store has batch {sealed} of {query}, and {checkpoint} "
            f"{'has none' if begun is None else f'only batches up to {begun}'}: rows would come twice. Use the checkpoint "
            "that this store was filled with, or a new store"
        )
    if committed is not None and committed > (-1 if sealed is None else sealed):
        raise FlowError(
            f"{checkpoint} has batches of {query} up to {committed}, and the store "
            f"{'has none' if sealed is None else f'has them up to {sealed}'}: it was rewound, or is another one, and Spark "
            "gives a query no batch again that was committed. Use the store, or the checkpoint, that belongs to it"
        )


def check_trigger(trigger: object) -> None:
    """Raises InvalidInputError for what are no arguments of writeStream.trigger()."""
    if trigger is not None and not isinstance(trigger, Mapping):
        raise InvalidInputError(
            f"trigger is {trigger!r}, expected the arguments of writeStream.trigger() as a dictionary, such as "
            "{'availableNow': True} or {'processingTime': '10 seconds'}"
        )


def check_stream(
    checkpoint: str | Path, first: int, last: int | None, before: int | None, last_batch: Callable[[], int | None]
) -> None:
    """Raises FlowError where the batches of a checkpoint would not follow the epochs that there are.

    `first`: the epoch of its first batch. `last`: the last sealed epoch, and `before` what `streamed_from` says of it.
    `last_batch`: the last batch of the checkpoint that was committed, if any was; it may be on a file system that only
    Spark reaches.
    """
    batch = last_batch()
    if last is None:
        if batch is not None:
            raise FlowError(
                f"the store has no epoch yet, and {checkpoint} has batches of a stream, whose rows it would never get: open the "
                "store that this checkpoint belongs to, or begin again with a new checkpoint"
            )
    elif batch is None:
        is_sealed_only = first == last == before  # its first batch died before it was committed
        if first != last + 1 and not is_sealed_only:
            raise FlowError(
                f"the store is at epoch {last}, but {checkpoint} is a new checkpoint, whose first batch would be epoch "
                f"{first}: use the checkpoint that this store was streamed with; or first={last + 1}, for rows that it does "
                "not have yet"
            )
    elif before is None and first != last + 1:
        raise FlowError(
            f"epoch {last} of the store was not streamed, and {checkpoint} has batches of a stream: use a new checkpoint "
            f"and first={last + 1}, for rows that the store does not have yet"
        )
    elif before not in (None, first):
        raise FlowError(
            f"the store was streamed with first={before}, and now with first={first}: the numbers of its epochs would "
            "shift. It is the same number at each start"
        )
    elif before == first and first + batch > last:
        raise FlowError(
            f"{checkpoint} has batches up to {batch}, which is epoch {first + batch}, and the store is at {last}: it was "
            "rewound, or put back from a backup, and Spark gives a stream no batch again that was committed. Use the "
            f"checkpoint as it was at that epoch; or a new one and first={last + 1}, with sources that begin after what the "
            "store has"
        )


def check_batch(batch: int, t: int, newest: int | None) -> None:
    """Raises FlowError for a batch whose epoch came by other rows since the stream began."""
    if newest is not None and t < newest:  # Spark runs only its last batch again
        raise FlowError(
            f"batch {batch} of the stream would be epoch {t}, and the store is at {newest}: by other rows than the "
            "stream's, or this is an older copy of its checkpoint, and rows would come twice. Use the checkpoint that the store "
            f"was filled with; or a new one and first={newest + 1}, with sources that begin after what the store has"
        )
