"""What a keep holds on to: the last batches, what is pinned, and all that these need. The rest is garbage.

Spark's own deletes touch Spark's directory alone. Files of a keep are deleted nowhere but here. Which files are garbage follows
from what is kept, so nodes that keep the same files remove the same ones, each for itself. Another process, or a peer,
may be taking files in meanwhile, in any order within a batch: what may be needed by a file that comes next is no garbage.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from nosync.checkpoints.closure import Closure
from nosync.checkpoints.generations import REWOUND, SETTINGS, directory_of, generations_of, keeps_of
from nosync.checkpoints.keep import Keep, open_generation, removed_before
from nosync.checkpoints.names import Batch, BatchFile, Form, SourceFile, StateFile, StorePart, parse
from nosync.lsm.errors import CorruptionError, InvalidInputError, NosyncError, NotAvailableError
from nosync.lsm.facts.or_set import add_element, elements, read_element, remove
from nosync.lsm.model.layer import check_name
from nosync.lsm.platform.env import Env, storage_errors
from nosync.lsm.platform.layout import CHECKPOINTS, PINS
from nosync.lsm.platform.opaque import files_below
from nosync.lsm.platform.parsing import parsed

log = logging.getLogger("nosync")

KEPT_BATCHES = 100
"""So many of the newest batches that can be gone on from are kept, if nobody says otherwise."""


@dataclass(frozen=True, order=True)
class CheckpointPin:
    """A name for a batch, which is kept as long as the name is there."""

    batch: Batch
    name: str


def pins(keep: Keep) -> list[CheckpointPin]:
    """Returns the pins of a checkpoint, by batch. Raises CorruptionError for a damaged one."""
    found = []
    for element in elements(keep.data, _directory(keep), keep.env):
        fields = read_element(keep.data, element, keep.env)
        with parsed("a pin of a checkpoint", str(keep.data / element.path)):
            batch = fields["batch"]
            if not isinstance(batch, int) or batch < 0:
                raise ValueError(f"batch {batch!r}")
            found.append(CheckpointPin(Batch(batch), check_name(fields["name"], "pin name")))
    return sorted(found)


def pin(keep: Keep, name: str, t: int | None = None) -> CheckpointPin:
    """Gives a batch a name, by default the newest that can be gone on from. Durable when this returns.

    Raises NotAvailableError where the batch cannot be gone on from, InvalidInputError where the name holds another one.
    """
    made = CheckpointPin(keep.at(t), check_name(name, "pin name"))
    for known in pins(keep):
        if known.name == name:
            if known.batch != made.batch:
                raise InvalidInputError(
                    f"pin {name!r} holds batch {known.batch}: remove it first (unpin(), --remove), or say another name"
                )
            return known
    add_element(keep.data, _directory(keep), name, {"name": name, "batch": made.batch}, keep.env)
    try:  # another process may have been removing its files, and did not see the pin
        open_generation(keep.data, keep.name, keep.env).at(made.batch)
    except NotAvailableError:
        unpin(keep, name)
        raise
    return made


def unpin(keep: Keep, name: str) -> None:
    """Takes a name back. Durable when this returns. Raises InvalidInputError where there is none."""
    named = [e for e in elements(keep.data, _directory(keep), keep.env) if e.what == check_name(name, "pin name")]
    if not named:
        known = ", ".join(pin.name for pin in pins(keep)) or "none"
        raise InvalidInputError(f"checkpoint {keep.name} has no pin {name!r} (pins: {known})")
    for element in named:
        remove(keep.data, element, keep.env)


def copy_pins(keep: Keep, target: Keep, until: Batch | None = None) -> None:
    """Gives another keep the pins of this one, by default all, else those of batches up to `until`."""
    there = {one.name for one in pins(target)}
    for one in pins(keep):
        if one.name not in there and (until is None or one.batch <= until):
            add_element(target.data, _directory(target), one.name, {"name": one.name, "batch": one.batch}, target.env)


def kept_batches(keep: Keep) -> int:
    """Returns how many of the newest batches are kept. Raises CorruptionError for a damaged setting."""
    found = [KEPT_BATCHES] if not (said := elements(keep.data, _settings(keep), keep.env)) else []
    for element in said:
        fields = read_element(keep.data, element, keep.env)
        with parsed("a setting of a checkpoint", str(keep.data / element.path)):
            if not isinstance(fields["batches"], int) or fields["batches"] < 1:
                raise ValueError(f"{fields['batches']!r} batches")
            found.append(fields["batches"])
    return max(found)


def check_kept_batches(batches: int) -> None:
    """Raises InvalidInputError for what is no number of batches to keep."""
    if isinstance(batches, bool) or not isinstance(batches, int) or batches < 1:
        raise InvalidInputError(f"{batches!r} batches cannot be kept, expected a whole number from 1 on")


def set_kept_batches(keep: Keep, batches: int) -> None:
    """Says how many of the newest batches are kept. Durable when this returns, and known to all nodes in time.

    Raises InvalidInputError for less than one. A damaged setting is replaced.
    """
    check_kept_batches(batches)
    with contextlib.suppress(CorruptionError):
        if kept_batches(keep) == batches:
            return
    before = elements(keep.data, _settings(keep), keep.env)
    add_element(keep.data, _settings(keep), "batches", {"batches": batches}, keep.env)
    for element in before:
        remove(keep.data, element, keep.env)


def garbage_of(data: Path, env: Env, only: str | None = None) -> list[PurePosixPath]:
    """Returns the files of all keeps of a directory that nobody needs, relative to it, in the order in which they go.

    `only`: of the keep of this name alone. Earlier generations go once a later one is whole. Of a keep whose pins or
    settings cannot be read nothing goes.
    """
    found: list[PurePosixPath] = []
    for name in keeps_of(data, env) if only is None else [only]:
        keep = open_generation(data, name, env)
        for generation in generations_of(data, name, env):
            if generation < keep.generation:
                found += _all_of(data, directory_of(name, generation), env)
        try:
            gone, named = set[str](), None
            while (now := elements(data, _directory(keep), env)) != named:  # again where a pin came meanwhile
                named, gone = now, garbage(keep, kept_batches(keep), {one.batch for one in pins(keep)})
        except NosyncError as error:
            log.error("checkpoint %s: nothing is removed: %s", name, error)
            continue
        directory = PurePosixPath(CHECKPOINTS, directory_of(name, keep.generation))
        found += [directory / path for path in sorted(gone, key=removed_before)]
    return found


def clean(keep: Keep) -> int:
    """Removes garbage of one keep, earlier generations included. Returns how many files went.

    Where a pin cannot be read nothing goes.
    """
    gone = garbage_of(keep.data, keep.env, keep.name)
    for path in gone:
        with storage_errors("remove", keep.data / path):
            keep.env.unlink(keep.data / path)
        if path.parts[1] == keep.root.name:
            keep.index.discard("/".join(path.parts[2:]))
    return len(gone)


def _all_of(data: Path, directory: str, env: Env) -> list[PurePosixPath]:
    """Returns all files of an earlier generation: the mark that it counts first, then commits, then the rest."""
    paths = files_below(data, PurePosixPath(CHECKPOINTS, directory), env)
    return sorted(paths, key=lambda path: (path.name != REWOUND, path.parts[2] != "commits", path))


def garbage(keep: Keep, batches: int = KEPT_BATCHES, pinned: Collection[Batch] = ()) -> set[str]:
    """Returns the files that neither the last `batches` nor pinned ones need. Nothing newer than the oldest goes.

    Pure, but for what closures read. Where fewer batches can be gone on from, or a pinned one cannot, nothing is garbage:
    a node that catches up may have the newest ones first.
    """
    found = [keep.closures.find(t) for t in keep.index.batches()]
    restorable = {one.batch: one.paths for one in found if isinstance(one, Closure)}
    kept = list(restorable)[-batches:]
    if len(kept) < batches:
        return set()
    if lost := sorted(set(pinned) - restorable.keys()):
        log.warning(
            "checkpoint %s: nothing is removed, for batch %d is pinned and cannot be gone on from: unpin it, or bring its files "
            "back",
            keep.name, lost[0],
        )  # fmt: skip
        return set()
    needed = {path for t in {*kept, *pinned} for path in restorable[t]}
    named = _named_by_snapshots(keep, kept[0])
    return {path for path in keep.index.paths() if path not in needed and _is_before(keep, path, kept[0], named)}


def _is_before(keep: Keep, path: str, oldest: Batch, named: Mapping[str, int]) -> bool:
    """Returns whether a file is of batches before the oldest that is kept: others may still be needed by later ones."""
    file = parse(path.removesuffix(".crc"))
    if isinstance(file, StateFile):
        return file.version <= oldest
    if isinstance(file, StorePart):  # of snapshots that go as well. One that none names comes before its snapshot does
        return file.path in named and named[file.path] <= oldest
    if isinstance(file, SourceFile):  # beyond what the oldest batch reads, a later one reads it
        return file.number <= keep.closures.offsets(oldest).log_ends.get(file.source, -1)
    return isinstance(file, BatchFile) and file.batch < oldest - 1


def _named_by_snapshots(keep: Keep, oldest: Batch) -> dict[str, int]:
    """Returns what snapshots name, each with the newest version that does. A damaged snapshot that goes names nothing."""
    found: dict[str, int] = {}
    for store in keep.index.stores():
        for version, files in keep.index.versions(store).items():
            for snapshot in (one for one in files if one.form is Form.ZIP):
                with contextlib.suppress(*(CorruptionError,) if version <= oldest else ()):
                    for part in keep.closures.parts(snapshot.path):
                        path = f"{store.directory}/{part.name}"
                        found[path] = max(version, found.get(path, version))
    return found


def _directory(keep: Keep) -> PurePosixPath:
    return PurePosixPath(CHECKPOINTS, directory_of(keep.name, keep.generation), PINS)


def _settings(keep: Keep) -> PurePosixPath:
    return PurePosixPath(CHECKPOINTS, directory_of(keep.name, keep.generation), SETTINGS)
