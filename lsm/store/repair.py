"""Mending the small files without which a store does not open: the marker, and the log of branches.

Invariants
- What is to be done is said before anything is. A plan is made and carried out with the directory's lock held.
- Nothing is deleted: what is in the way goes to quarantine.
- What the catalog remembers is written again as it was. Where it remembers nothing, only what follows from files is
  done.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from nosync.lsm.errors import CorruptionError, NosyncError, NotAStoreError
from nosync.lsm.layers.reader import LayerReader
from nosync.lsm.manifests.archive import epochs_of
from nosync.lsm.manifests.branches import MAIN, Refs, check_entry
from nosync.lsm.manifests.remembered import (
    KEY_GROUPS_META,
    STORE_ID_META,
    Remembered,
    catalog_metas,
    timelines_without_entry,
)
from nosync.lsm.model.layer import parse_path
from nosync.lsm.model.timestamp import is_number
from nosync.lsm.platform.env import Env, storage_errors
from nosync.lsm.platform.json_file import publish_small, read_small, sync_published
from nosync.lsm.platform.layout import BRANCHES, LAYERS, MANIFESTS, MARKER, PLACE_FILE, QUARANTINE, STUBS_FROM
from nosync.lsm.platform.lock import DirectoryLock
from nosync.lsm.platform.parsing import parsed
from nosync.lsm.platform.store_marker import (
    Marker,
    check_is_restored,
    looks_like_store,
    make_subdirectories,
    read_marker,
    write_marker,
)

_LAYERS_ASKED = 50
_SAID = ("do", "name", "parent", "at", "keep_as", "changed", "anew", "replaced")


@dataclass(frozen=True)
class RepairStep:
    """`path`: what is written, or goes to quarantine, relative to the data directory."""

    path: str
    what: str


@dataclass
class RepairPlan:
    """Says what can be done, and what cannot, with why."""

    steps: list[RepairStep] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


class Repair:
    """Repairs one directory, which nobody else may have open meanwhile. Use as a context manager.

    Raises StoreLockedError where it is open, NotAStoreError where it was never a store.
    """

    def __init__(self, root: Path, env: Env | None = None) -> None:
        self._root, self._env = root, env or Env()
        check_is_restored(root)
        if not (root / MARKER).exists() and not looks_like_store(root, self._env):
            raise NotAStoreError(f"{root} is not a nosync store: there is nothing in it to repair one from")
        self._lock = DirectoryLock(root)
        self.plan = RepairPlan()
        self._moved: list[PurePosixPath] = []
        self._marker: Marker | None = None
        self._entries: dict[int, dict[str, Any]] = {}
        try:
            metas = catalog_metas(root)
            self._plan_marker(metas.get(STORE_ID_META), metas.get(KEY_GROUPS_META))
            self._plan_log(Remembered(metas))
        except BaseException:
            self._lock.release()
            raise

    def __enter__(self) -> Repair:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    # --- the marker -------------------------------------------------------------------------------------------------

    def _plan_marker(self, store_id: str | None, key_groups: str | None) -> None:
        try:
            read_marker(self._root, self._env)
            return
        except NotAStoreError:  # a newer format is no damage
            pass
        found = (
            {int(key_groups)} if key_groups is not None else set(itertools.islice(self._key_groups(), _LAYERS_ASKED))
        )
        if len(found) != 1:
            self.plan.left.append(
                f"{MARKER}: neither the catalog nor a layer says how many key groups the store has"
                if not found
                else f"{MARKER}: layers differ in how many key groups there are ({sorted(found)}): some are another store's"
            )
            return
        if store_id is None and (self._root / PLACE_FILE).exists():
            self.plan.left.append(
                f"{MARKER}: the catalog does not say which store this is, and its peers know: start the daemon with an empty "
                "directory, and it is filled"
            )
            return
        self._marker = Marker(store_id or self._env.token(), *found)
        whose = f"store_id {store_id}" if store_id is not None else "a new store_id, for no catalog says what it was,"
        what = f"write it again, with {whose} and key_groups {self._marker.key_groups}"
        self._plan_move(PurePosixPath(MARKER))
        self.plan.steps.append(RepairStep(MARKER, what))

    def _key_groups(self) -> Iterator[int]:
        """Returns the number of key groups that layers say; those that are damaged say nothing."""
        for path in (self._root / LAYERS).rglob("*.layer"):
            id = parse_path(PurePosixPath(path.relative_to(self._root / LAYERS)))
            try:
                yield LayerReader.open(path, self._env, id).info.key_groups if id is not None else 0
            except (NosyncError, FileNotFoundError):
                continue

    # --- the log of branches ------------------------------------------------------------------------------------------

    def _plan_log(self, remembered: Remembered) -> None:
        """Plans entry by entry, in order: what one says depends on those before it."""
        there, bad = self._read_log()
        refs = Refs()
        end = max([*there, *bad, *remembered.entries], default=0)
        while self._rewound_at(end + 1) is not None:
            end += 1
        for n in range(1, end + 1):
            if n in there:
                entry: dict[str, Any] | None = there[n]
            else:
                entry = json.loads(remembered.entries[n]) if n in remembered.entries else self._rewind_of(n, refs)
            if entry is None and not self._leave_out(n, bad, last=n >= max([*there, *remembered.entries], default=0)):
                return
            if entry is None:
                continue
            try:
                refs = refs.after(entry)
            except (KeyError, TypeError, ValueError) as error:
                self.plan.left.append(f"{BRANCHES}/{n}.json: cannot follow the entries before it ({error})")
                return
            if n not in there:
                whence = "as the catalog remembers it" if n in remembered.entries else "as manifests show it"
                self._plan_entry(n, entry, whence, n in bad)
        for timeline in (
            timelines_without_entry(self._root, refs, self._env) if not (self._root / PLACE_FILE).exists() else ()
        ):
            self._plan_move(PurePosixPath(MANIFESTS, timeline), "no entry of the log says where this branch begins")

    def _read_log(self) -> tuple[dict[int, dict[str, Any]], set[int]]:
        """Returns the entries that are whole, and the numbers of those that are not."""
        there: dict[int, dict[str, Any]] = {}
        bad: set[int] = set()
        names = self._env.list_dir(self._root / BRANCHES)
        for n in sorted(int(name[:-5]) for name in names if name.endswith(".json") and is_number(name[:-5])):
            path = self._root / BRANCHES / f"{n}.json"
            try:
                entry = read_small(path, self._env)
                with parsed("an entry of the log of branches", str(path)):
                    check_entry(entry)
                there[n] = entry
            except CorruptionError:
                bad.add(n)
        return there, bad

    def _rewound_at(self, n: int) -> int | None:
        """Returns the first epoch of timeline `rewind-<n>`, which the n-th entry made; None where there is no such
        timeline.
        """
        names = self._env.list_dir(self._root / MANIFESTS / f"rewind-{n}")
        return min((span[0] for name in names if (span := epochs_of(name)) is not None), default=None)

    def _rewind_of(self, n: int, refs: Refs) -> dict[str, Any] | None:
        """Returns the entry that made timeline `rewind-<n>`, as its manifests show it. What was main then is kept, as
        it is by default.
        """
        first, timeline = self._rewound_at(n), f"rewind-{n}"
        if first is None or first < 1 or timeline in refs.timelines:
            return None
        kept = f"before-{timeline}"
        return {
            "do": "rewind",
            "name": timeline,
            "line": timeline,
            "parent": refs.names[MAIN],
            "at": first - 1,
            "keep_as": kept,
        }

    def _leave_out(self, n: int, bad: set[int], *, last: bool) -> bool:
        """Returns whether the log may do without an entry of which nothing is known: where nothing comes after it."""
        path = PurePosixPath(BRANCHES, f"{n}.json")
        if (self._root / PLACE_FILE).exists():
            self._plan_move(path, "peers send it again")
            return False
        if not last:
            self.plan.left.append(
                f"{BRANCHES}/{n}.json: nothing says what was in it, and later entries depend on it: put it back from a backup"
            )
            return False
        if n in bad:
            self._plan_move(
                PurePosixPath(BRANCHES, f"{n}.json"),
                "nothing says what was in it: branches are as the entries before it say",
            )
        return True

    def _plan_entry(self, n: int, entry: dict[str, Any], whence: str, is_bad: bool) -> None:
        path = PurePosixPath(BRANCHES, f"{n}.json")
        if is_bad:
            self._plan_move(path)
        self._entries[n] = entry
        said = ", ".join(f"{name} {entry[name]}" for name in _SAID if entry.get(name))
        self.plan.steps.append(RepairStep(str(path), f"write it again, {whence}: {said}"))

    # --- doing it ---------------------------------------------------------------------------------------------------

    def _plan_move(self, path: PurePosixPath, why: str = "damaged") -> None:
        if (self._root / path).exists():
            self._moved.append(path)
            self.plan.steps.append(RepairStep(str(path), f"move it to {QUARANTINE}/ ({why})"))

    def carry_out(self) -> None:
        """Does what the plan says. Durable when this returns; after a crash another repair goes on."""
        root = self._root
        with storage_errors("repair", root):
            make_subdirectories(root, self._env)
            for path in self._moved:
                self._env.replace(root / path, root / QUARANTINE / f"{'.'.join(path.parts)}.{self._env.token()}")
                self._env.sync_dir((root / path).parent)
            self._env.sync_dir(root / QUARANTINE)
            if self._marker is not None:
                write_marker(root, self._marker, self._env, has_stubs=(root / STUBS_FROM).exists())
        for n, entry in self._entries.items():
            final = root / BRANCHES / f"{n}.json"
            publish_small(root, final, entry, self._env)
            sync_published(root, final, self._env)
