"""The durable layers of one node: the catalog, the records that are known from it, and the lock over both.

Invariants
- A record is here only after its layer was read back and matched its digest, and file and directory were synced.
- Whoever listens is told of an edit inside the lock, in the order of the edits: what comes late would be of what is
  gone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from nosync.lsm.errors import CatalogError, StorageError
from nosync.lsm.manifests.catalog import Catalog, set_aside
from nosync.lsm.manifests.remembered import KEY_GROUPS_META, STORE_ID_META
from nosync.lsm.model.layer import Description, LayerId, Record, TraceId
from nosync.lsm.node.announcer import Announcer
from nosync.lsm.node.ownership import Ownership
from nosync.lsm.platform.env import Env, storage_errors
from nosync.lsm.platform.layout import CATALOG
from nosync.lsm.platform.store_marker import Marker

log = logging.getLogger("nosync")

INCARNATION_META = "incarnation"


class DurableLayers:
    """Holds what every part of the node stands on. `lock` guards the records and the catalog; it may be taken again."""

    def __init__(self, catalog: Catalog, records: Sequence[Record], ownership: Ownership, announcer: Announcer) -> None:
        self.lock = threading.RLock()
        self._catalog, self._ownership, self._announcer = catalog, ownership, announcer
        self._records: dict[TraceId, dict[Description, Record]] = {}
        for record in records:
            self._records.setdefault(record.id.trace, {})[record.id.description] = record

    def of(self, trace: TraceId) -> Mapping[Description, Record]:
        """Returns the records of a trace. To be looked at with the lock held."""
        return self._records.get(trace, {})

    def holds(self, id: LayerId) -> bool:
        """Returns whether there is a record of this very layer."""
        return id.description in self._records.get(id.trace, {})

    def ids(self) -> set[LayerId]:
        """Returns every durable layer."""
        return {record.id for record in self.records()}

    def records(self) -> list[Record]:
        """Returns every durable layer, with its digest and size."""
        with self.lock:
            return [record for records in self._records.values() for record in records.values()]

    def traces(self) -> list[TraceId]:
        """Returns the traces of which there are durable layers."""
        with self.lock:
            return [trace for trace, records in self._records.items() if records]

    def by_trace(self, traces: Iterable[TraceId] | None = None) -> dict[TraceId, list[Description]]:
        """Returns, by trace, the time ranges of its durable layers. One that lost all of them is still listed."""
        with self.lock:
            wanted = self._records if traces is None else traces
            return {trace: list(self._records[trace]) for trace in wanted if trace in self._records}

    def covering(self, id: LayerId) -> list[LayerId]:
        """Returns the durable layers of other names that cover this one."""
        with self.lock:
            others = [d for d in self.of(id.trace) if d != id.description]
        return [LayerId(id.trace, d) for d in others if d.covers(id.description)]

    def apply(self, add: Sequence[Record], remove: Sequence[LayerId]) -> None:
        """Makes one edit of the catalog, and tells the listener of it."""
        self._ownership.check()
        with self.lock:
            self._catalog.apply(add, remove)
            for id in remove:
                self._records[id.trace].pop(id.description, None)
            for record in add:
                self._records.setdefault(record.id.trace, {})[record.id.description] = record
            self._announcer.layers(add, remove)

    def drop(self, ids: Sequence[LayerId]) -> None:
        """Takes the records away of layers that are lost or not needed. The caller tells the listener, and why."""
        self._ownership.check()
        with self.lock:
            self._catalog.apply(remove=[id for id in ids if self.holds(id)])
            for id in ids:
                self._records.get(id.trace, {}).pop(id.description, None)


def open_catalog(root: Path, marker: Marker, env: Env, announced: Mapping[str, str]) -> tuple[Catalog, list[Record]]:
    """Opens the catalog of a store, and returns its records with it. A damaged one is set aside, and a new one begun.

    `announced`: what a new catalog has to say of the inputs that an earlier incarnation of the directory released.
    """
    path = root / CATALOG
    try:
        catalog = _catalog_in(path, env)
        try:
            owner, records = catalog.meta(STORE_ID_META), catalog.records()
            if owner == marker.store_id:
                if catalog.meta(KEY_GROUPS_META) is None:  # an earlier version wrote it
                    catalog.remember({KEY_GROUPS_META: str(marker.key_groups)})
                return catalog, records
        except (CatalogError, StorageError):
            catalog.close()
            raise
        if owner is None and not records:
            return _begun(catalog, marker, env, announced), []
        catalog.close()
        raise CatalogError(f"{path} belongs to store {owner}, not to {marker.store_id}")
    except CatalogError as error:
        aside = set_aside(path, env.token())
        log.warning("the catalog is rebuilt from the layer files: %s (the old one is kept as %s)", error, aside)
    return _begun(_catalog_in(path, env), marker, env, announced), []


def _catalog_in(path: Path, env: Env) -> Catalog:
    """The directory is made first: RocksDB gives what it makes to everybody, which there matters to nobody."""
    with storage_errors("make", path):
        env.make_dirs(path)
    return Catalog(path)


def _begun(catalog: Catalog, marker: Marker, env: Env, announced: Mapping[str, str]) -> Catalog:
    """A catalog that is new: another incarnation of the directory, which may have released inputs before."""
    fields = {STORE_ID_META: marker.store_id, KEY_GROUPS_META: str(marker.key_groups)}
    catalog.apply(meta={**fields, INCARNATION_META: env.token(), **announced})
    return catalog
