"""What small files hold, checked before a file that came from another node gets its name here.

A digest says that a file is what somebody wrote. What is published is read by every process of the store, names in it
become directories, and it is told to other nodes as durable: so it has to be what a store writes under such a name.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path, PurePosixPath

from nosync.lsm.errors import CorruptionError
from nosync.lsm.facts.or_set import is_taken_back
from nosync.lsm.facts.pins import pin_of
from nosync.lsm.facts.seal_times import check_times
from nosync.lsm.manifests.archive import Archive, Details, parse_name
from nosync.lsm.manifests.branches import check_entry
from nosync.lsm.manifests.manifest import Manifest
from nosync.lsm.manifests.manifest_log import read_manifest
from nosync.lsm.model.timestamp import Epoch
from nosync.lsm.platform.env import Env
from nosync.lsm.platform.json_file import unseal_json
from nosync.lsm.platform.layout import BRANCHES, MANIFESTS, PINS, TIMES
from nosync.lsm.platform.parsing import parsed


def check_contents(path: PurePosixPath, text: bytes) -> None:
    """`path`: relative to the data directory. Raises CorruptionError for what no store writes there."""
    kind, where = path.parts[0], str(path)
    if kind == MANIFESTS:
        _check_manifests(path, text)
        return
    fields, _ = unseal_json(text, where)
    if kind == BRANCHES:
        with parsed("an entry of the log of branches", where):
            check_entry(fields)
    elif kind == TIMES:
        check_times(fields, path)
    elif kind == PINS and not is_taken_back(path):
        with parsed("a pin", where):
            pin_of(fields)


def first_said_otherwise(root: Path, path: PurePosixPath, text: bytes, env: Env) -> Epoch | None:
    """Returns the first epoch of which an archive that came, checked, says otherwise than a manifest that stands by itself
    in this directory; None where there is none, or it is no archive.

    The archive would take the place of these manifests, and what was built upon them stay.
    """
    if path.parts[0] != MANIFESTS or not parse_name(path.name):
        return None
    archive = Archive.parse(text, path.parent.name, path.name, str(path))
    details = Details.parse(archive, text, str(path))
    for t in archive.epochs:
        single = root / path.parent / f"{t}.json"
        if env.exists(single):
            with suppress(FileNotFoundError, CorruptionError):  # it went meanwhile; or it is damaged, and says nothing
                if read_manifest(root, path.parent.name, t, env) != details.manifest(t):
                    return Epoch(t)
    return None


def _check_manifests(path: PurePosixPath, text: bytes) -> None:
    timeline, where = path.parent.name, str(path)
    if parse_name(path.name):
        archive = Archive.parse(text, timeline, path.name, where)
        details = Details.parse(archive, text, where)
        for t in archive.epochs:
            details.manifest(t)
        return
    found = Manifest.from_json(text, where)
    if found.path != path:
        raise CorruptionError(f"{where}: holds the manifest of {found.timeline} {found.t}")
