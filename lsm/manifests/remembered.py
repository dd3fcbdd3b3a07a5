"""What a directory held durably once, as its catalog says: from which to which epoch the manifests of each timeline,
and the log of branches. Files show what is there; that the end of a log is not there any more only something beside it
can show.

Invariants
- A file is remembered after it is durable, by the node, in the background: neither publishing nor sealing waits for it.
  So layers of an epoch that is being written are remembered by nobody, and are not called lost.
- What is remembered is not synced. A power cut may take the last of it, as if less had been; the next start adds it
  again.
- What is discarded on purpose is forgotten before its files go. What branches need no more is not asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from nosync.lsm.errors import CatalogError, CorruptionError, StorageError
from nosync.lsm.manifests.archive import epochs_of
from nosync.lsm.manifests.branches import Refs
from nosync.lsm.manifests.catalog import Catalog
from nosync.lsm.model.timestamp import MAX_EPOCH, Epoch, is_number
from nosync.lsm.platform.env import Env
from nosync.lsm.platform.json_file import canonical, read_small
from nosync.lsm.platform.layout import BRANCHES, CATALOG, MANIFESTS

SEALED_META, ENTRY_META, SAFE_META = "sealed/", "branches/", "safe/"
"""Catalog: by timeline, the first and the last epoch that was durable; by number, an entry of the log of branches; by
timeline, the safe point that was told, where there are peers or inputs are released.
"""
KEY_GROUPS_META, STORE_ID_META = "key_groups", "store_id"
"""Catalog: what the file NOSYNC says, should it be lost."""
END = Epoch(MAX_EPOCH + 1)
_FORGOTTEN = ""


class Kept(NamedTuple):
    """The first and the last epoch of a timeline whose manifests were durable."""

    first: Epoch
    last: Epoch

    def joined(self, other: Kept | None) -> Kept:
        return self if other is None else Kept(min(self.first, other.first), max(self.last, other.last))


class Remembered:
    """`meta`: what the catalog says. Each method that changes it returns what the catalog has to say from then on."""

    def __init__(self, meta: Mapping[str, str] | None = None) -> None:
        self._kept: dict[str, Kept] = {}
        self.earliest = END
        """The first epoch of any timeline; it is asked for often, and the timelines are many."""
        self.entries: dict[int, str] = {}
        """The log of branches, each entry as canonical JSON."""
        self.last_entry = 0
        """The number of the last one; 0 where there is none."""
        for name, value in (meta or {}).items():
            if name.startswith(SEALED_META) and value != _FORGOTTEN:
                first, last = json.loads(value)
                self._kept[name.removeprefix(SEALED_META)] = Kept(Epoch(first), Epoch(last))
            elif name.startswith(ENTRY_META) and value != _FORGOTTEN:
                self.entries[int(name.removeprefix(ENTRY_META))] = value
        for name, value in (meta or {}).items():  # of a catalog that an earlier version wrote there is this alone
            timeline, announced = name.removeprefix(SAFE_META), int(value) if name.startswith(SAFE_META) else -1
            if announced >= 0 and timeline not in self._kept:
                self._kept[timeline] = Kept(Epoch(announced), Epoch(announced))
        self._find_ends()

    def _find_ends(self) -> None:
        self.last_entry = max(self.entries, default=0)
        self.earliest = min((kept.first for kept in self._kept.values()), default=END)

    def copy(self) -> Remembered:
        """Returns a copy of what is remembered now."""
        found = Remembered()
        found._kept, found.entries = dict(self._kept), dict(self.entries)
        found._find_ends()
        return found

    def of_timeline(self, timeline: str) -> Kept | None:
        """Returns the epochs of a timeline that are remembered; None where nothing is."""
        return self._kept.get(timeline)

    def note_timeline(self, timeline: str, kept: Kept) -> dict[str, str]:
        """These manifests of a timeline were durable."""
        joined = kept.joined(self._kept.get(timeline))
        if joined == self._kept.get(timeline):
            return {}
        self._kept[timeline] = joined
        self.earliest = min(self.earliest, joined.first)
        return {SEALED_META + timeline: json.dumps(joined)}

    def note(self, root: Path, paths: Iterable[PurePosixPath], env: Env) -> dict[str, str]:
        """These small files are durable."""
        changed: dict[str, str] = {}
        found: dict[str, Kept] = {}
        for path in paths:
            if path.parts[0] == MANIFESTS and (span := epochs_of(path.name)) is not None:
                found[path.parts[1]] = Kept(*span).joined(found.get(path.parts[1]))
            elif path.parts[0] == BRANCHES and is_number(path.stem) and int(path.stem) not in self.entries:
                with suppress(CorruptionError, StorageError):  # whoever reads the log says so
                    text = canonical(read_small(root / path, env))
                    self.entries[int(path.stem)] = changed[ENTRY_META + path.stem] = text
                    self.last_entry = max(self.last_entry, int(path.stem))
        for timeline, kept in found.items():
            changed |= self.note_timeline(timeline, kept)
        return changed

    def discard(self, first: Mapping[str, Epoch], entry: int | None) -> dict[str, str]:
        """Forgets manifests from an epoch of each timeline on (`first`), and the log of branches from an entry on.
        Returns what the catalog must change.
        """
        changed = {}
        for timeline, t in first.items():
            kept = self._kept.pop(timeline, None)
            if kept is not None and kept.first < t:
                self._kept[timeline] = Kept(kept.first, min(kept.last, Epoch(t - 1)))
            left = self._kept.get(timeline)
            changed[SEALED_META + timeline] = _FORGOTTEN if left is None else json.dumps(left)
        for n in [n for n in self.entries if entry is not None and n >= entry]:
            del self.entries[n]
            changed[f"{ENTRY_META}{n}"] = _FORGOTTEN
        self._find_ends()
        return changed


Recall = Callable[[], Remembered]


def catalog_metas(root: Path) -> dict[str, str]:
    """Returns what the catalog of a directory says beside its records; nothing where none is there and whole."""
    if not (root / CATALOG).is_dir():
        return {}
    try:
        catalog = Catalog(root / CATALOG, read_only=True)
        try:
            return catalog.metas()
        finally:
            catalog.close()
    except (CatalogError, StorageError):
        return {}


def recalled(root: Path) -> Remembered:
    """Returns what is remembered of a directory, for a process that does not keep it."""
    return Remembered(catalog_metas(root))


def timelines_without_entry(root: Path, refs: Refs, env: Env) -> list[str]:
    """Returns the timelines of which there are manifests, and that no entry of the log of branches names."""
    found = [timeline for timeline in env.list_dir(root / MANIFESTS) if timeline not in refs.timelines]
    return sorted(
        timeline for timeline in found if any(epochs_of(name) for name in env.list_dir(root / MANIFESTS / timeline))
    )


def entries_lost(refs: Refs, remembered: Remembered) -> Iterator[int]:
    """Yields the entries of the log of branches that were durable once, and are not there: those in the middle, and at
    the end.
    """
    yield from (n for n in sorted(remembered.entries) if n > refs.entries and n not in refs.later)
