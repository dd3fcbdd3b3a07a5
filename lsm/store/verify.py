"""Scrubbing: every byte of a data directory against its digests, without changing anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from nosync.lsm.errors import CorruptionError, NosyncError
from nosync.lsm.facts.or_set import register_files
from nosync.lsm.layers.reader import LayerReader
from nosync.lsm.manifests.branches import missing_entry, read_refs
from nosync.lsm.manifests.manifest_log import ManifestLog, read_manifest_log
from nosync.lsm.manifests.remembered import catalog_metas
from nosync.lsm.model.layer import SUFFIX, Digest, LayerId, parse_path
from nosync.lsm.model.timestamp import Epoch
from nosync.lsm.node.opaque_files import read_record, recorded_in
from nosync.lsm.platform.env import storage_error
from nosync.lsm.platform.json_file import read_small
from nosync.lsm.platform.layout import LAYERS, MANIFESTS
from nosync.lsm.platform.opaque import OpaqueRecord
from nosync.lsm.platform.store_marker import read_marker
from nosync.lsm.trace.directory import LayerDirectory


@dataclass(frozen=True)
class VerifyReport:
    """Says what a scrub read, with one message for each file that is not what it should be."""

    layers: int
    manifests: int
    bytes: int
    errors: tuple[str, ...]
    checkpoint_files: int = 0

    @property
    def ok(self) -> bool:
        return not self.errors


def verify_directory(
    directory: LayerDirectory,
    progress: Callable[[int, int], None] | None = None,
    metas: Mapping[str, str] | None = None,
) -> VerifyReport:
    """`progress(done, of)` is called after each file. `metas`: what a catalog says of the files of kept checkpoints, which
    alone says their digests; None: that of the directory.
    """
    env, root = directory.env, directory.root
    paths = sorted(path for path in (root / LAYERS).rglob("*") if path.suffix == SUFFIX or not path.is_dir())
    kept = [*recorded_in(catalog_metas(root) if metas is None else metas)]
    errors: list[str] = []
    size, found = 0, dict[LayerId, Digest]()

    def went(done: int) -> None:
        if progress:
            progress(done, len(paths) + len(kept))

    for done, path in enumerate(paths, 1):
        id = parse_path(PurePosixPath(path.relative_to(root / LAYERS)))
        if id is None:
            errors.append(f"{path}: not a layer's name; a store writes nothing like it: move it away")
            continue
        try:
            reader = LayerReader.open(path, env, id)
            reader.verify()
            found[id], size = reader.digest, size + reader.size_bytes
        except FileNotFoundError:
            continue  # merged away while we looked
        except NosyncError as error:
            errors.append(str(error))
        went(done)
    manifests, wrong = _verify_manifests(directory, found)
    errors += wrong
    for register in register_files(root, env):
        try:
            read_small(root / register, env)
        except NosyncError as error:
            if not isinstance(error.__cause__, FileNotFoundError):  # else it was replaced meanwhile
                errors.append(str(error))
    try:
        read_marker(root, env)
    except NosyncError as error:
        errors.append(str(error))
    whole, wrong = _verify_kept(root, kept, lambda done: went(len(paths) + done), is_own=metas is None)
    return VerifyReport(len(found), manifests, size, (*errors, *wrong), whole)


def _verify_kept(
    root: Path, kept: Sequence[OpaqueRecord], went: Callable[[int], object], *, is_own: bool
) -> tuple[int, list[str]]:
    """Returns how many files of kept checkpoints are whole, and what is wrong with others. `went(done)` is called after each.
    `is_own`: the catalog that says so is that of the directory, which has them; a copy lacks what went while it was made.
    """
    gone, errors = list[PurePosixPath](), list[str]()
    for done, record in enumerate(kept, 1):
        try:
            _check_recorded(root, record)
        except FileNotFoundError:
            gone.append(record.path)
        except NosyncError as error:
            errors.append(str(error))
        went(done)
    whole = len(kept) - len(gone) - len(errors)
    still = {record.path for record in recorded_in(catalog_metas(root))} if gone and is_own else set()
    return whole, errors + [f"{root / path}: is gone" for path in gone if path in still]  # others nobody needs by now


def _check_recorded(root: Path, record: OpaqueRecord) -> None:
    """Raises CorruptionError where a file of a kept checkpoint is not what it was, FileNotFoundError, and StorageError."""
    try:
        found = read_record(root, record.path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise storage_error("read", root / record.path, error) from error
    if found != record:
        raise CorruptionError(
            f"{root / record.path}: has digest {found.digest[:16]}, and had {record.digest[:16]} when it became durable: remove "
            "it, and peers that hold it send it again, or take it from a backup"
        )


def _verify_manifests(directory: LayerDirectory, found: Mapping[LayerId, Digest]) -> tuple[int, list[str]]:
    """Returns how many manifests there are, and what is wrong with them, or with the layers that were found of them."""
    env, root = directory.env, directory.root
    kept: Mapping[str, Epoch | None] = {}
    errors: list[str] = []
    manifests = 0
    try:
        refs = read_refs(root, env)
        kept = refs.kept_until()
        if refs.later:
            errors.append(missing_entry(root, refs))
    except NosyncError as error:
        errors.append(str(error))
    for timeline in env.list_dir(root / MANIFESTS):
        sealed = ManifestLog(timeline, root, env)
        errors += [str(error) for error in read_manifest_log(sealed, root, env)]
        manifests += len(sealed)
        if timeline in kept:
            errors += _others(sealed, kept[timeline], found)
    return manifests, errors


def _others(sealed: ManifestLog, until: Epoch | None, found: Mapping[LayerId, Digest]) -> Iterator[str]:
    """Yields what is wrong with layers that are whole, and not those that a timeline's manifests list up to an epoch."""
    for t in sealed.own():
        if until is not None and t > until:
            break
        try:
            entries = sealed[t].entries
        except NosyncError as error:  # its line in an archive, say
            yield str(error)
            continue
        for entry in entries:
            if (digest := found.get(entry.id, entry.digest)) != entry.digest:
                yield (
                    f"{entry.id}: its file has digest {digest[:16]}, and epoch {t} of {sealed.timeline} lists "
                    f"{entry.digest[:16]}: it is another store's, or of another attempt"
                )
