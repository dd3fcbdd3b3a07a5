"""Manifests: small JSON files that are published like layers, whole or absent, and never changed.

`Manifest(t)` of a timeline (the main timeline, or a branch) lists every layer that belongs to epoch `t`, empty ones
included, with its digest. `t` is complete when its manifest and all of those layers exist.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from nosync.lsm.errors import DeterminismError
from nosync.lsm.model.history import History, Span
from nosync.lsm.model.layer import Description, Digest, LayerId, Shard, TraceId, check_name
from nosync.lsm.model.timestamp import END_OF_TIME, Epoch, Time, end_of, pack, show
from nosync.lsm.platform.env import Env, Identity
from nosync.lsm.platform.json_file import publish_text, read_if_there, seal_json, unseal_json, whole_number
from nosync.lsm.platform.layout import MANIFESTS
from nosync.lsm.platform.parsing import parsed

MAIN_TIMELINE = "main"
AT_SAFE_POINT = "at_safe_point"
KEEP, DISK, DROP = "keep", "disk", "drop"
RELEASING = (DISK, DROP)
MOST_LAYERS = 1 << 17
"""Layers that one epoch lists at most: so many stages times shards."""
"""In `meta`: by source, what is done with its layers at the safe point, where they are not kept."""
WAITS_FOR_REMOTE = "remote"
"""In `meta`: inputs are released only when the epochs computed from them are in an object store, too."""
SUMS = "sums"
"""In `meta`: by stage, the columns whose values may be added up over its rows: counts and sums."""


class Content(NamedTuple):
    """Says what is in a layer, as its writer said it."""

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


def known_policies(found: object) -> dict[str, str]:
    """Returns by source what is done with its layers. A word that this version does not know releases nothing."""
    return {s: p for s, p in found.items() if p in RELEASING} if isinstance(found, dict) else {}


@dataclass(frozen=True)
class Manifest:
    timeline: str
    t: Epoch
    entries: tuple[Entry, ...]
    meta: Mapping[str, Any] = field(default_factory=dict)
    """What the writer wants to find again with the epoch (source offsets, the flow's stages); JSON values."""

    @property
    def name(self) -> str:
        return f"{self.t}.json"

    @property
    def path(self) -> PurePosixPath:
        """Returns the path relative to the data directory."""
        return PurePosixPath(MANIFESTS, self.timeline, self.name)

    @property
    def policies(self) -> Mapping[str, str]:
        """Returns by source what is done with its layers at the safe point. Sources whose layers are kept are left out
        (see `input_policy`).
        """
        return known_policies(self.meta.get(AT_SAFE_POINT, {}))

    @property
    def unknown_policies(self) -> Mapping[str, str]:
        """Returns by source the policy that this version does not know and so does not carry out: it keeps the layers."""
        found = self.meta.get(AT_SAFE_POINT, {})
        known = (KEEP, *RELEASING)
        return {str(s): str(p) for s, p in found.items() if p not in known} if isinstance(found, dict) else {}

    @property
    def shard_count(self) -> int | None:
        """Returns how many shards the epoch was sealed with; None where nothing is recorded of it."""
        return self.entries[0].id.trace.shard.count if self.entries else None

    def sums(self, stage: str) -> list[str]:
        """Returns the columns of a stage that may be added up; none where the manifest's version did not say so."""
        found = self.meta.get(SUMS, {})
        return list(found.get(stage, [])) if isinstance(found, dict) else []

    @property
    def begin(self) -> Time:
        return pack(self.t)

    @property
    def end(self) -> Time:
        return end_of(self.t)

    def traces(self) -> Iterator[tuple[TraceId, Time]]:
        """Yields the traces of its layers, each with where it begins."""
        return ((entry.id.trace, entry.origin) for entry in self.entries)

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
        return seal_json({"line": self.timeline, "t": self.t, "layers": layers, "meta": dict(self.meta)})

    @classmethod
    def from_json(cls, text: bytes, where: str) -> Manifest:
        f, _ = unseal_json(text, where)
        with parsed("a manifest", where):
            pack(f["t"])
            if not isinstance(f["meta"], dict):
                raise TypeError("meta has no fields")
            if len(f["layers"]) > MOST_LAYERS:
                raise ValueError(f"it lists {len(f['layers']):,} layers, expected at most {MOST_LAYERS:,}")
            return cls(check_name(f["line"], "timeline name"), f["t"], tuple(map(_entry, f["layers"])), f["meta"])


def _entry(fields: Mapping[str, Any]) -> Entry:
    lower, upper, origin = (Time(whole_number(fields[name], name)) for name in ("lower", "upper", "origin"))
    trace = TraceId(fields["stage"], fields["fingerprint"], Shard.parse(fields["shard"]))
    return Entry(
        LayerId(trace, Description(lower, upper)),
        checked_digest(fields["digest"]),
        whole_number(fields["rows"], "rows"),
        origin,
        whole_number(fields.get("copies", 1), "copies"),
    )


def checked_digest(value: object) -> Digest:
    """Raises TypeError for what is no text."""
    if not isinstance(value, str):
        raise TypeError(f"digest {value!r} is not a text")
    return Digest(value)


def publish_manifest(root: Path, manifest: Manifest, env: Env) -> tuple[Manifest, Identity | None]:
    """Writes the manifest, and says which file that is, unless there was one; the node makes it durable later.

    The same one again is a success; another one for the epoch is a DeterminismError.
    """
    check_name(manifest.timeline, "timeline name")
    final = root / manifest.path
    if (identity := publish_text(root, final, manifest.to_json(), env)) is not None:
        return manifest, identity
    recorded = Manifest.from_json(read_if_there(final, env), str(final))
    check_same(recorded, manifest)
    return recorded, None


def check_same(recorded: Manifest, manifest: Manifest) -> None:
    """Raises DeterminismError where an epoch that was sealed is sealed again with other layers."""
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


class Histories:
    """The histories of all stages of a timeline, learned from its manifests in order of time."""

    def __init__(self) -> None:
        self._spans: dict[str, list[Span]] = {}
        self._replaced: frozenset[str] = frozenset()
        self._fork = Time(0)

    def add(self, at: Time, listed: Iterable[tuple[TraceId, Time]]) -> None:
        """Learns what manifests list from a time on: traces, and where they begin."""
        seen: dict[str, tuple[str, int, Time]] = {}
        for trace, begin in listed:
            _, _, origin = seen.get(trace.stage, (0, 0, begin))
            seen[trace.stage] = (trace.fingerprint, trace.shard.count, min(origin, begin))
        for stage, (fingerprint, count, origin) in seen.items():
            spans = self._spans.setdefault(stage, [])
            is_there = bool(spans) and spans[-1].upper == END_OF_TIME
            if is_there and (spans[-1].fingerprint, spans[-1].shard_count) == (fingerprint, count):
                continue
            begins = origin
            if spans:
                # Where it says, for the manifest of its first epoch may be lost, and what was before must not reach beyond that.
                begins = max(spans[-1].lower if is_there else spans[-1].upper, min(at, origin))
                spans[-1] = replace(spans[-1], upper=min(spans[-1].upper, begins))
            replaces = stage in self._replaced and all(span.lower < self._fork for span in spans)
            spans.append(Span(fingerprint, count, begins, replaces=replaces))
        for stage, spans in self._spans.items():
            # A stage that was dropped ends here, and may come back. Where the caller places keys, an epoch lists what it has.
            if stage not in seen and spans[-1].shard_count and spans[-1].lower < at < spans[-1].upper:
                spans[-1] = replace(spans[-1], upper=at)

    def of(self, stage: str) -> History:
        return tuple(self._spans.get(stage, ()))

    def until(self, t: int, replaced: Iterable[str] = ()) -> Histories:
        """Returns the histories up to an epoch, where a branch begins. `replaced`: stages whose layers there replace what
        was before.
        """
        end, found = pack(t + 1), Histories()
        found._replaced, found._fork = frozenset(replaced), end
        for stage, spans in self._spans.items():
            kept = [replace(s, upper=END_OF_TIME) if s.upper >= end else s for s in spans if s.lower < end]
            if kept:
                found._spans[stage] = kept
        return found

    def all(self) -> dict[str, History]:
        return {stage: tuple(spans) for stage, spans in self._spans.items()}


def digest_listed(manifest: Manifest | None, id: LayerId) -> Digest | None:
    """Returns the digest of a layer that a manifest lists; None where there is no manifest, or it does not list it."""
    return next((entry.digest for entry in manifest.entries if entry.id == id), None) if manifest else None
