"""Manifests: small JSON files that are published like layers, whole or absent, and never changed.

`Manifest(t)` of a line (the main line, or a branch) lists every layer that belongs to epoch `t`, empty ones included,
with its digest. `t` is complete when its manifest and all of those layers exist.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from blake3 import blake3

from nosync.lsm.directory import MANIFESTS
from nosync.lsm.env import Env, storage_errors
from nosync.lsm.errors import CorruptionError, DeterminismError, StorageError
from nosync.lsm.history import History, Span
from nosync.lsm.layer import Description, Digest, LayerId, Shard, TraceId, check_name
from nosync.lsm.timestamp import END_OF_TIME, Epoch, Time, pack, show
from nosync.lsm.writer import temporary_path

MAIN_LINE = "main"


class Content(NamedTuple):
    """What is in a layer, as its writer said."""

    digest: Digest
    rows: int


@dataclass(frozen=True, order=True)
class Entry:
    """One layer that a manifest expects; `origin` is where its trace begins, so that a lost beginning is seen."""

    id: LayerId
    digest: Digest
    rows: int
    origin: Time
    copies: int = 1
    """Durable copies that the safe point waits for: 0 for a layer that can be computed again from others."""


@dataclass(frozen=True)
class Manifest:
    line: str
    t: Epoch
    entries: tuple[Entry, ...]
    meta: Mapping[str, Any] = field(default_factory=dict)
    """What the writer wants to find again with the epoch (source offsets, the flow's stages); JSON values."""

    @property
    def name(self) -> str:
        return f"{self.t}.json"

    @property
    def path(self) -> PurePosixPath:
        """Relative to the data directory."""
        return PurePosixPath(MANIFESTS, self.line, self.name)

    def to_json(self) -> bytes:
        layers = [
            {
                "stage": e.id.trace.stage,
                "fingerprint": e.id.trace.fingerprint,
                "shard": str(e.id.trace.shard),
                "lower": e.id.description.lower,
                "upper": e.id.description.upper,
                "digest": e.digest,
                "rows": e.rows,
                "origin": e.origin,
                "copies": e.copies,
            }
            for e in self.entries
        ]
        return _sealed({"line": self.line, "t": self.t, "layers": layers, "meta": dict(self.meta)})

    @classmethod
    def from_json(cls, text: bytes, where: str) -> Manifest:
        f = _unsealed(text, where)
        entries = [
            Entry(
                LayerId(
                    TraceId(e["stage"], e["fingerprint"], Shard.parse(e["shard"])), Description(e["lower"], e["upper"])
                ),
                e["digest"],
                e["rows"],
                e["origin"],
                e.get("copies", 1),
            )
            for e in f["layers"]
        ]
        return cls(f["line"], f["t"], tuple(entries), f["meta"])


def _sealed(fields: Mapping[str, Any]) -> bytes:
    body = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return json.dumps(
        {"nosync": 1, "blake3": blake3(body.encode()).hexdigest(), "body": fields}, sort_keys=True
    ).encode()


def _unsealed(text: bytes, where: str) -> dict[str, Any]:
    try:
        outer = json.loads(text)
        body: dict[str, Any] = outer["body"]
        expected = outer["blake3"]
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptionError(f"{where}: not a whole file ({type(error).__name__}); it is torn") from error
    if blake3(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest() != expected:
        raise CorruptionError(f"{where}: does not match its digest; bits were flipped")
    return body


def _publish(root: Path, final: Path, text: bytes, env: Env) -> bool:
    """Publishes a small file, whole or not at all. False where the name is taken. Not durable until synced."""
    temporary = temporary_path(root, env)
    with storage_errors("write", final):
        try:
            with env.create(temporary) as file:
                file.write(text)
            env.make_dirs(final.parent)
            env.link(temporary, final)
        except FileExistsError:
            return False
        finally:
            env.unlink(temporary)
    return True


def publish_small(root: Path, final: Path, fields: Mapping[str, Any], env: Env) -> bool:
    """Publishes a small JSON file with its digest, whole or not at all. False where the name is taken."""
    return _publish(root, final, _sealed(fields), env)


def read_small(path: Path, env: Env) -> dict[str, Any]:
    """What `publish_small` wrote. Raises CorruptionError where it is damaged."""
    with storage_errors("read", path):
        return _unsealed(env.read(path), str(path))


def sync_published(root: Path, path: Path, env: Env) -> None:
    """Makes a small file durable that was just published. Where that fails it is withdrawn, and the error raised."""
    try:
        with storage_errors("sync", path):
            env.sync_file(path)
            for directory in path.parents:
                env.sync_dir(directory)
                if directory == root:
                    break
    except StorageError:
        with storage_errors("withdraw", path):
            env.unlink(path)
        raise


def publish_manifest(root: Path, manifest: Manifest, env: Env) -> Manifest:
    """Writes the manifest; the node makes it durable later.

    The same one again is a success; another one for the epoch is a DeterminismError.
    """
    check_name(manifest.line, "line name")
    final = root / manifest.path
    if _publish(root, final, manifest.to_json(), env):
        return manifest
    recorded = Manifest.from_json(env.read(final), str(final))
    known = {e.id: e.digest for e in recorded.entries}
    given = {e.id: e.digest for e in manifest.entries}
    for id in sorted(known.keys() | given.keys()):
        if known.get(id) != given.get(id):
            raise DeterminismError(
                f"timestamp {manifest.t} is already sealed with another set of layers: {id} is "
                f"{known.get(id, 'not in it')} there and {given.get(id, 'missing')} now; a sealed timestamp never changes",
                stage=id.trace.stage,
                shard=str(id.trace.shard),
                t=show(pack(manifest.t)),
                recorded_digest=known.get(id, ""),
                rejected_digest=given.get(id, ""),
            )
    return recorded


def read_manifests(root: Path, line: str, env: Env) -> tuple[dict[Epoch, Manifest], list[CorruptionError]]:
    """All manifests of a line, and an error for each file that is not one."""
    manifests: dict[Epoch, Manifest] = {}
    errors = []
    directory = root / MANIFESTS / line
    for name in env.list_dir(directory):
        path = directory / name
        try:
            with storage_errors("read", path):
                manifest = Manifest.from_json(env.read(path), str(path))
            if manifest.name != name or manifest.line != line:
                raise CorruptionError(f"{path}: holds the manifest of {manifest.line} {manifest.t}")
            manifests[manifest.t] = manifest
        except CorruptionError as error:
            errors.append(error)
    return dict(sorted(manifests.items())), errors


class Histories:
    """The histories of all stages of a line, learned from its manifests in order of time."""

    def __init__(self, manifests: Iterable[Manifest] = ()) -> None:
        self._spans: dict[str, list[Span]] = {}
        for manifest in manifests:
            self.add(manifest)

    def add(self, manifest: Manifest) -> None:
        seen: dict[str, tuple[str, int, Time]] = {}
        for entry in manifest.entries:
            trace = entry.id.trace
            _, _, origin = seen.get(trace.stage, (0, 0, entry.origin))
            seen[trace.stage] = (trace.fingerprint, trace.shard.count, min(origin, entry.origin))
        for stage, (fingerprint, count, origin) in seen.items():
            spans = self._spans.setdefault(stage, [])
            if spans and (spans[-1].fingerprint, spans[-1].shard_count) == (fingerprint, count):
                continue
            begins = origin
            if spans:
                begins = pack(manifest.t)
                spans[-1] = replace(spans[-1], upper=begins)
            spans.append(Span(fingerprint, count, begins))

    def of(self, stage: str) -> History:
        return tuple(self._spans.get(stage, ()))

    def until(self, t: int) -> Histories:
        """The same up to an epoch: where a branch begins."""
        end, found = pack(t + 1), Histories()
        for stage, spans in self._spans.items():
            kept = [replace(s, upper=END_OF_TIME) if s.upper >= end else s for s in spans if s.lower < end]
            if kept:
                found._spans[stage] = kept
        return found

    def all(self) -> dict[str, History]:
        return {stage: tuple(spans) for stage, spans in self._spans.items()}
