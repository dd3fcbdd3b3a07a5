"""Sealing, as one process does it: manifests of epochs, in order. Files only: no catalog, no lock.

The node of a directory has a sealer, and so has a job whose directory belongs to a daemon: sealing an epoch is linking a
file, and waits for nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nosync.lsm.errors import CorruptionError, DeterminismError, HoleError, OutOfOrderError
from nosync.lsm.manifests.branches import MAIN
from nosync.lsm.manifests.lost_ends import epochs_text, lost_begin, lost_end
from nosync.lsm.manifests.manifest import Content, Entry, Manifest, check_same, publish_manifest
from nosync.lsm.manifests.remembered import Recall, recalled
from nosync.lsm.manifests.timelines import Timelines
from nosync.lsm.model.layer import Digest, LayerId, TraceId
from nosync.lsm.model.timestamp import Epoch, Time, epoch_of, round_of
from nosync.lsm.trace.directory import LayerDirectory


class Sealer:
    """Manifests and timelines of one data directory."""

    def __init__(self, directory: LayerDirectory, copies: int, recall: Recall | None = None) -> None:
        """`copies`: how many an epoch asks for of each stage of which nothing is said.

        `recall`: says what is remembered of the timelines (default: the catalog of the directory is looked into).
        """
        self.directory = directory
        self.copies = copies
        self.timelines = Timelines(directory.root, directory.env, recall or (lambda: recalled(directory.root)))

    def origin(self, trace: TraceId) -> Time | None:
        """Returns where a trace first begins, as far as manifests say."""
        return min(self.timelines.origins(trace), default=None)

    def seal(
        self,
        t: int,
        ids: Sequence[LayerId],
        branch: str,
        meta: Mapping[str, Any] | None,
        copies: Mapping[str, int] | None,
        contents: Mapping[LayerId, Content] | None = None,
        on_conflict: Callable[[list[LayerId]], None] = lambda ids: None,
        before_new: Callable[[str], None] = lambda timeline: None,
    ) -> tuple[Manifest, bool]:
        """Publishes the manifest of epoch `t` with these layers, which must exist; and whether it is a new one.

        `copies`: by stage, how many durable copies the safe point waits for, where that is not the sealer's own number.
        `contents`: of layers whose writers said what is in them; the files of the others are looked into.
        `before_new`: is called with the timeline just before the manifest of an epoch is published that was not sealed.

        Raises OutOfOrderError unless `t` is the next one to be sealed or sealed already, DeterminismError when it was
        sealed with other layers, of which `on_conflict` is told before.
        """
        self.timelines.check_branches()
        self.check_sealable(t, branch)
        sealed, before = self.timelines.manifest(t, branch), self.timelines.manifest(t - 1, branch)
        timeline = self.timelines.manifests(branch).timeline_at(t)  # of what is lost before the fork the parent
        origins = {entry.id.trace: entry.origin for entry in before.entries} if before else {}
        known = self._sealed_elsewhere(t, sealed)
        required = copies or {}
        entries = [
            replace(self._entry(id, known, origins, contents or {}), copies=required.get(id.trace.stage, self.copies))
            for id in sorted(ids)
        ]
        manifest = Manifest(timeline, Epoch(t), tuple(entries), dict(meta or {}))
        try:
            if sealed is not None and self.timelines.of_timeline(sealed.timeline).archive_at(t) is not None:
                check_same(sealed, manifest)
                return sealed, False
            if sealed is None:
                before_new(timeline)
            manifest, identity = publish_manifest(self.directory.root, manifest, self.directory.env)
        except DeterminismError:
            expected = {e.id: e.digest for e in sealed.entries} if sealed else {}
            on_conflict([e.id for e in entries if expected.get(e.id, e.digest) != e.digest])
            raise
        if sealed is None:
            self.timelines.add(manifest, identity)
        return manifest, sealed is None

    def check_sealable(self, t: int, branch: str = MAIN) -> None:
        """Raises OutOfOrderError unless epoch `t` is the branch's next one, sealed already, or one whose manifest is
        lost.

        What is lost at the end comes first, in order: after a later one it could never be sealed again.
        """
        last = self.timelines.last_sealed(branch)
        if last is not None and (t == last + 1 or self.timelines.manifest(t, branch) is not None):
            return
        expected, begin = self.timelines.expected(branch), lost_begin(self.timelines, branch)
        first = self.timelines.manifests(branch).first if begin is None else begin
        if expected is None:
            expected = begin
        if expected is None or first is None or first <= t <= expected:
            return
        lost = lost_end(self.timelines, branch)
        why = f", for the manifests of {epochs_text(lost)} are lost: seal them again, in order" if lost else ""
        raise OutOfOrderError(f"cannot seal {t}: the next timestamp of branch {branch} is {expected}{why}")

    def check_listed(self, id: LayerId, digest: Digest) -> None:
        """Raises CorruptionError where a sealed epoch lists a layer with another digest than its file has."""
        if not id.is_fresh or round_of(id.description.lower):
            return
        for entry in self._sealed_elsewhere(epoch_of(id.description.lower), None).values():
            if entry.id == id and entry.digest != digest:
                raise CorruptionError(
                    f"{id}: its file has digest {digest[:16]}, and its sealed epoch lists {entry.digest[:16]}"
                )

    def _sealed_elsewhere(self, t: int, sealed: Manifest | None) -> dict[LayerId, Entry]:
        """Returns what manifests of the epoch say of layers: the branch's, and others', whose layers it shares."""
        found: dict[LayerId, Entry] = {}
        others = [self.timelines.manifest(t, name) for name in self.timelines.refs.names]
        for manifest in [*others, sealed]:
            found |= {entry.id: entry for entry in manifest.entries} if manifest else {}
        return found

    def _entry(
        self,
        id: LayerId,
        sealed: Mapping[LayerId, Entry],
        origins: Mapping[TraceId, Time],
        contents: Mapping[LayerId, Content],
    ) -> Entry:
        """`origins`: where the traces of the epoch before begin; another trace begins here."""
        known = sealed.get(id)
        content = contents.get(id)
        if content is None:
            if known is not None and not self.directory.has_file(id):
                return known  # merged since: the manifest remembers what it was
            try:
                content = Content(*self.directory.contents_of(id))
            except FileNotFoundError:
                t = epoch_of(id.description.lower)
                raise HoleError(
                    f"{id}: was merged with others, and what the manifest of epoch {t} said of it is lost, so the epoch cannot "
                    f"be sealed again: put {t}.json back, from a backup or another node, or rewind to an epoch before it",
                    stage=id.trace.stage, shard=str(id.trace.shard), lower=str(t), upper=str(t + 1),
                ) from None  # fmt: skip
        origin = known.origin if known is not None else origins.get(id.trace)
        if origin is None:
            origin = id.description.lower
            if not id.trace.shard.count:  # appended to directly, perhaps before anything was sealed
                origin = min(d.lower for d in self.directory.descriptions(id.trace))
                origin = min(origin, self.origin(id.trace) or origin)
        return Entry(id, content.digest, content.rows, origin)
