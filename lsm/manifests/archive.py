"""Archives: one file that stands for the manifests of many epochs, so that a store does not grow slow with its age.

Invariants
- An archive covers a whole, aligned group of epochs of a timeline, every one of which is safe; so all nodes that put
  the same manifests together write the same bytes, and an archive of one node stands for the manifests of another.
- Nothing is left out: the manifest of any epoch is had back from it whole.
- What it says counts, because its epochs were safe: a manifest that says otherwise is set aside, and that is said.
- It is durable before the manifests it stands for are removed. What is found twice after a crash says the same.

The head says in *runs* what is the same for many epochs: which traces they list, and where those begin. Opening a store
reads heads, and most questions about old epochs are answered by them; the rest has one line for each epoch
(docs/format.md).

(Delta Lake's log compaction does this for its commits.)
"""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Self

from nosync.lsm.errors import CorruptionError
from nosync.lsm.manifests.manifest import Entry, Manifest, checked_digest, known_policies
from nosync.lsm.model.layer import Description, LayerId, Shard, TraceId, check_name
from nosync.lsm.model.timestamp import MAX_EPOCH, Epoch, Time, end_of, is_number, pack
from nosync.lsm.platform.env import Env
from nosync.lsm.platform.json_file import (
    canonical,
    publish_text,
    read_if_there,
    seal_json,
    sync_published,
    unseal_json,
    whole_number,
)
from nosync.lsm.platform.layout import MANIFESTS
from nosync.lsm.platform.parsing import parsed

MOST_LAYERS = 50_000
"""Layers that one archive lists at most; where epochs have many, fewer of them share one."""
MOST_ARCHIVE_BYTES = 64 << 20
"""An archive has so many bytes at most, far fewer than what is read whole may have. Larger groups are not put together."""
_SMALLEST = 10
_NAME = re.compile(r"([0-9]{1,13})-([0-9]{1,13})\.json\Z")


@dataclass(frozen=True)
class Listed:
    """A trace in the manifests of a run."""

    trace: TraceId
    origin: Time
    copies: int


@dataclass(frozen=True)
class Run:
    """Consecutive epochs whose manifests list one layer each of the same traces."""

    timeline: str
    first: Epoch
    last: Epoch
    listed: tuple[Listed, ...]
    policies: Mapping[str, str]
    """By source, what is done with its layers at the safe point."""

    @property
    def begin(self) -> Time:
        return pack(self.first)

    @property
    def end(self) -> Time:
        return end_of(self.last)

    def traces(self) -> Iterator[tuple[TraceId, Time]]:
        """Returns each trace with the time at which it begins."""
        return ((listed.trace, listed.origin) for listed in self.listed)

    def required(self) -> Run:
        """Returns the run with only those layers that the safe point waits for."""
        return replace(self, listed=tuple(listed for listed in self.listed if listed.copies))

    def until(self, t: int) -> Run:
        """Returns the same run up to an epoch."""
        return self if self.last <= t else replace(self, last=Epoch(t))


@dataclass(frozen=True)
class Archive:
    """The manifests of epochs `first` to `last` of a timeline. Only `runs` are in memory."""

    timeline: str
    first: Epoch
    last: Epoch
    runs: tuple[Run, ...] = field(compare=False)

    @property
    def name(self) -> str:
        return f"{self.first}-{self.last}.json"

    @property
    def path(self) -> PurePosixPath:
        """Returns the path relative to the data directory."""
        return PurePosixPath(MANIFESTS, self.timeline, self.name)

    def __contains__(self, t: int) -> bool:
        return self.first <= t <= self.last

    @property
    def epochs(self) -> range:
        return range(self.first, self.last + 1)

    @classmethod
    def read(cls, root: Path, timeline: str, name: str, env: Env) -> Self:
        """Raises CorruptionError where it is damaged anywhere, FileNotFoundError where it is gone."""
        path = root / MANIFESTS / timeline / name
        return cls.parse(read_if_there(path, env), timeline, name, str(path))

    @classmethod
    def parse(cls, text: bytes, timeline: str, name: str, where: str) -> Self:
        """Returns the archive that a file's bytes are. Raises CorruptionError where they are damaged."""
        head, rest = unseal_json(text, where)
        with parsed("an archive of manifests", where):
            found = cls(head["line"], head["first"], head["last"], tuple(_runs(head)))
        count = rest.count(b"\n")
        if (found.timeline, found.name) != (timeline, name) or count != len(found.epochs):
            raise CorruptionError(f"{where}: holds {count} epochs of {found.timeline}, {found.first} to {found.last}")
        return found


class Details:
    """The lines of one archive: what its head does not say."""

    def __init__(self, archive: Archive, root: Path, env: Env) -> None:
        self._where = str(root / archive.path)
        self._begin(archive, read_if_there(root / archive.path, env))

    def _begin(self, archive: Archive, text: bytes) -> None:
        _, rest = unseal_json(text, self._where)
        self._archive = archive
        self._lines = rest.split(b"\n")
        self._begins = [run.first for run in archive.runs]

    @classmethod
    def parse(cls, archive: Archive, text: bytes, where: str) -> Self:
        """Returns the details that a file's bytes have."""
        found = cls.__new__(cls)
        found._where = where
        found._begin(archive, text)
        return found

    def manifest(self, t: int) -> Manifest:
        """Returns the manifest of an epoch of the archive. Raises CorruptionError where its line is not one."""
        run = self._archive.runs[bisect.bisect_right(self._begins, t) - 1]
        with parsed(f"an archive of manifests, at epoch {t}", self._where):
            line = json.loads(self._lines[t - self._archive.first])
            entries = [
                Entry(
                    LayerId(listed.trace, Description.of_epoch(t)),
                    checked_digest(digest),
                    whole_number(rows, "rows"),
                    listed.origin,
                    listed.copies,
                )
                for listed, digest, rows in zip(run.listed, line["digests"], line["rows"], strict=True)
            ]
            if not isinstance(line["meta"], dict):
                raise TypeError("meta has no fields")
            return Manifest(self._archive.timeline, Epoch(t), tuple(entries), line["meta"])


def _runs(head: Mapping[str, Any]) -> Iterator[Run]:
    begins = [whole_number(run["first"], "first") for run in head["runs"]]
    if not begins or begins[0] != head["first"] or sorted(set(begins)) != begins:
        raise ValueError(f"runs begin at {begins[:3]}")
    check_name(head["line"], "timeline name")
    for run, following in zip(head["runs"], [*begins[1:], head["last"] + 1], strict=True):
        listed = [
            Listed(
                TraceId(stage, fingerprint, Shard.parse(shard)),
                Time(whole_number(origin, "origin")),
                whole_number(copies, "copies"),
            )
            for stage, fingerprint, shard, origin, copies in run["traces"]
        ]
        yield Run(head["line"], run["first"], Epoch(following - 1), tuple(listed), known_policies(run["policies"]))


def parse_name(name: str) -> tuple[Epoch, Epoch] | None:
    """Returns the first and the last epoch of the archive that a file is; None where it is none."""
    match = _NAME.match(name)
    first, last = (int(match[1]), int(match[2])) if match else (0, 0)
    return (Epoch(first), Epoch(last)) if first < last <= MAX_EPOCH else None


def epochs_of(name: str) -> tuple[Epoch, Epoch] | None:
    """Returns the first and the last epoch that a file of a timeline's directory is of, twice the same for a manifest.
    None: another file.
    """
    number = name.removesuffix(".json")
    if not is_number(number):
        return parse_name(name)
    return (Epoch(int(number)), Epoch(int(number))) if int(number) <= MAX_EPOCH else None


def run_of(manifest: Manifest) -> Run | None:
    """Returns the run that an epoch begins; None where its manifest lists anything but one layer of that epoch for each
    trace.
    """
    whole = Description.of_epoch(manifest.t)
    if any(entry.id.description != whole for entry in manifest.entries):
        return None
    listed = tuple(Listed(entry.id.trace, entry.origin, entry.copies) for entry in manifest.entries)
    return Run(manifest.timeline, manifest.t, manifest.t, listed, dict(manifest.policies))


def group_to_archive(epochs: Sequence[Epoch], until: int, size: int, layers: Callable[[Epoch], int]) -> range | None:
    """Returns the oldest whole, aligned group of epochs up to `until`; None where there is none.

    `epochs`: those with a file of their own, in order. `layers(t)`: how many layers an epoch lists (`weight_of`). `size`: of
    a group.
    """
    there = set(epochs)
    first_of: dict[int, Epoch] = {}
    for t in epochs:
        if t <= until:
            first_of.setdefault(t // size * size, t)
    for base, oldest in first_of.items():  # a part of the group may be in an archive already
        step = size
        while step > _SMALLEST and layers(oldest) * step > MOST_LAYERS:
            step = max(_SMALLEST, step // 10)
        for first in range(base, base + size, step):
            group = range(first, min(first + step, base + size))
            if group[-1] <= until and there.issuperset(group):
                return group
    return None


def weight_of(manifest: Manifest) -> int:
    """Returns how many layers a manifest lists, or as many as have the bytes of what its writer noted."""
    return max(len(manifest.entries), len(canonical(dict(manifest.meta))) * MOST_LAYERS // MOST_ARCHIVE_BYTES)


def publish_archive(root: Path, manifests: Iterable[Manifest], env: Env) -> Archive | None:
    """Writes these, which follow each other, into one file. Durable when this returns; None: they cannot be put
    together.

    Raises CorruptionError where an archive of the same epochs says otherwise, StorageError where it cannot be made
    durable.
    """
    runs: list[dict[str, Any]] = []
    lines: list[str] = []
    before: Run | None = None
    for manifest in manifests:
        run = run_of(manifest)
        if run is None:
            return None
        if before is None or (run.listed, run.policies) != (before.listed, before.policies):
            traces = [[o.trace.stage, o.trace.fingerprint, str(o.trace.shard), o.origin, o.copies] for o in run.listed]
            runs.append({"first": manifest.t, "policies": run.policies, "traces": traces})
        details = {"digests": [e.digest for e in manifest.entries], "rows": [e.rows for e in manifest.entries]}
        lines.append(canonical({**details, "meta": dict(manifest.meta)}))
        before = run
    assert before is not None, "there is a manifest"
    head = {"line": before.timeline, "first": runs[0]["first"], "last": before.last, "runs": runs}
    archive = Archive(before.timeline, head["first"], head["last"], tuple(_runs(head)))
    text, final = seal_json(head, "".join(f"{line}\n" for line in lines).encode()), root / archive.path
    if len(text) > MOST_ARCHIVE_BYTES:
        return None
    if publish_text(root, final, text, env) is None and read_if_there(final, env) != text:
        raise CorruptionError(f"{final}: says other things of these epochs than their manifests do")
    sync_published(root, final, env)
    return archive
