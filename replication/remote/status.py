"""What is in a bucket, for people: what is whole, what there is of it, and what it costs about."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from nosync.lsm.facts.pins import pin_of
from nosync.lsm.manifests.branches import MAIN, Refs
from nosync.lsm.platform.env import Env
from nosync.lsm.platform.json_file import unseal_json
from nosync.lsm.platform.layout import BRANCHES, PINS
from nosync.lsm.platform.parsing import parsed
from nosync.replication.protocol.file_names import FileName
from nosync.replication.remote.bucket import Bucket
from nosync.replication.remote.fetch import Fetcher, fetch_all
from nosync.replication.remote.names import NODES
from nosync.replication.remote.pack import Placed
from nosync.replication.remote.patient import PatientBucket
from nosync.replication.remote.presence import described_gone, find_gone
from nosync.replication.remote.reach import newest_safe
from nosync.replication.remote.view import RemoteView, read_view

_DOLLARS_PER_GB_MONTH = 0.023
"""The list price of S3 Standard; other stores and classes cost other sums, of the same order."""


@dataclass(frozen=True)
class NodeCopies:
    """What one node has in a bucket."""

    claim: int
    """How often a process began to write there."""
    packs: int
    """Written under the newest claim."""
    files: int
    bytes: int


@dataclass(frozen=True)
class BucketStatus:
    """Says what a bucket has of a store."""

    url: str
    store_id: str
    key_groups: int
    branches: dict[str, int | None]
    """By name, main included, the newest epoch that is remotely safe."""
    pins: dict[str, int]
    nodes: dict[str, NodeCopies]
    used_bytes: int
    """Of files that are held."""
    stored_bytes: int
    """Of all objects: with what waits to be deleted, and what describes it."""
    objects: int
    dollars_a_month: float
    """About, for keeping them in S3 Standard."""
    checkpoints: list[str] = field(default_factory=list)
    problems: tuple[str, ...] = ()
    """Damaged objects: what was put after them is not seen. Objects that are gone, or shorter than they were."""


def bucket_status(bucket: Bucket) -> BucketStatus:
    """Reads what a bucket has. Raises RemoteError, CorruptionError."""
    bucket = PatientBucket(bucket, Env())
    view = read_view(bucket)
    listed = bucket.list(f"{NODES}/")
    stored = sum(one.size_bytes for one in listed)
    sizes = {one.name: one.size_bytes for one in listed}
    gone: dict[str, list[FileName]] = {}
    for contents in view.nodes.values():
        gone |= find_gone(bucket, contents, sizes)
    texts = _small_files(bucket, view, gone)
    nodes = {
        node: NodeCopies(
            contents.at.claim, contents.at.number, len(contents.places),
            sum(version.size_bytes for version in contents.inventory),
        )
        for node, contents in view.nodes.items()
    }  # fmt: skip
    checkpoints = {name.placed.partition("/")[2] for name in view.files if name.is_opaque and name.placed}
    return BucketStatus(
        bucket.url, view.marker.store_id, view.marker.key_groups, _branches(view, texts), _pins(texts), nodes,
        sum(placed.version.size_bytes for placed in view.files.values()), stored, len(listed),
        round(stored / 1e9 * _DOLLARS_PER_GB_MONTH, 4), sorted(checkpoints),
        (*view.problems, *described_gone(bucket.url, gone)),
    )  # fmt: skip


def _small_files(bucket: Bucket, view: RemoteView, gone: Collection[str]) -> dict[FileName, bytes]:
    """Returns the log of branches and the pins, as far as they are not in objects that are gone."""
    found: dict[FileName, bytes] = {}
    small = [placed for name, placed in view.files.items() if name.startswith((f"{BRANCHES}/", f"{PINS}/"))]
    wanted = [placed for placed in small if placed.place.object not in gone]

    def take(placed: Placed, data: object) -> None:
        found[placed.version.name] = bytes(data)  # type: ignore[call-overload]

    fetch_all(Fetcher(bucket), [placed for placed in wanted if view.is_seen(placed.version.name)], take)
    return found


def _branches(view: RemoteView, texts: dict[FileName, bytes]) -> dict[str, int | None]:
    refs = Refs()
    entries = {name.entry: text for name, text in texts.items() if name.entry is not None}
    for n in range(1, view.reached.entries + 1):
        if n not in entries:
            break
        with parsed("an entry of the log of branches", f"{BRANCHES}/{n}.json"):
            refs = refs.after(unseal_json(entries[n], f"{BRANCHES}/{n}.json")[0])
    found = {name: newest_safe(refs, timeline, view.reached) for name, timeline in refs.names.items()}
    return {MAIN: found.pop(MAIN), **dict(sorted(found.items()))}


def _pins(texts: dict[FileName, bytes]) -> dict[str, int]:
    gone = {name.replace(".gone.json", ".json") for name in texts if name.endswith(".gone.json")}
    pins: dict[str, int] = {}
    for name, text in texts.items():
        if name.startswith(f"{PINS}/") and name not in gone and not name.endswith(".gone.json"):
            with parsed("a pin", name):
                pin = pin_of(unseal_json(text, name)[0])
            pins[pin.name] = min(pin.t, pins.get(pin.name, pin.t))
    return dict(sorted(pins.items()))
