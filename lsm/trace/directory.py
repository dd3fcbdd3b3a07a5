"""A data directory as any process may see it: list layers, open traces, publish. No catalog, no lock.
What it is called there: nosync.lsm.platform.layout.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

import pyarrow as pa

from nosync.lsm.columnar.hashing import Hasher, hash32
from nosync.lsm.errors import (
    CompactedError,
    CorruptionError,
    HoleError,
    NotAStoreError,
    NotAvailableError,
    UnknownStageError,
)
from nosync.lsm.layers.reader import LayerReader
from nosync.lsm.layers.writer import LayerRows, Published, publish_rows
from nosync.lsm.model.history import Part, View
from nosync.lsm.model.layer import Description, Digest, LayerId, Shard, TraceId, parse_file_name
from nosync.lsm.model.timestamp import Time, pack, show
from nosync.lsm.platform.env import Env, storage_error, storage_errors
from nosync.lsm.platform.layout import LAYERS, MARKER
from nosync.lsm.platform.nearest import did_you_mean, named_stages
from nosync.lsm.platform.verified import is_verified_here
from nosync.lsm.trace.cover import choose_cover, overlaps
from nosync.lsm.trace.presence import is_there
from nosync.lsm.trace.trace import Trace

MAX_OPEN_LAYERS = 2048
_RELISTS = 5


class LayerDirectory:
    """The layers of one data directory. Cheap to make; keeps the layers it opened, which are immutable."""

    def __init__(self, root: Path, key_groups: int, env: Env | None = None, hasher: Hasher = hash32) -> None:
        self.root = root
        self._layers = root / LAYERS
        self.key_groups = key_groups
        self.env = env or Env()
        self.hasher = hasher
        self._is_validated = False
        self._open: dict[LayerId, LayerReader] = {}
        self._written: dict[LayerId, Published] = {}
        self._lock = threading.Lock()

    # --- what is there ---------------------------------------------------------------------------------------------

    def stages(self) -> list[str]:
        return sorted(self._list(PurePosixPath()))

    def traces(self, stage: str | None = None) -> list[TraceId]:
        """Returns every trace that has a directory, in order."""
        found = []
        for name in self.stages() if stage is None else [stage]:
            for fingerprint in self._list(PurePosixPath(name)):
                found += self.traces_of(name, fingerprint)
        return sorted(found)

    def traces_of(self, stage: str, fingerprint: str) -> list[TraceId]:
        """Returns the traces of a stage that have a fingerprint."""
        found = []
        for shard in self._list(PurePosixPath(stage, fingerprint)):
            try:
                found.append(TraceId(stage, fingerprint, Shard.parse(shard)))
            except ValueError:
                continue  # not a name that a store writes: scrub reports it
        return sorted(found)

    def descriptions(self, trace: TraceId) -> list[Description]:
        """Returns what the names in a trace's directory say, in no order."""
        names = self._list(trace.directory)
        return [d for name in names if (d := parse_file_name(name)) is not None]

    def holds(self, id: LayerId) -> bool:
        """Returns whether a layer is there, or a merged one that stands for it."""
        return is_there(id, self.descriptions(id.trace))

    def has_file(self, id: LayerId) -> bool:
        """Returns whether a file of this very name is there. Raises StorageError."""
        path = self.path_of(id)
        try:
            self.env.size_bytes(path)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise storage_error("look at", path, error) from error
        return True

    def fetch(self, id: LayerId) -> bool:
        """Asks peers for a layer that is not here. Returns whether it came: a directory alone has no peers."""
        return False

    def fetch_rounds(self, traces: Iterable[TraceId], t: int) -> None:
        """Asks peers for what they recorded of an epoch's rounds."""

    def layer_ids(self) -> list[LayerId]:
        return [LayerId(trace, d) for trace in self.traces() for d in sorted(self.descriptions(trace))]

    def path_of(self, id: LayerId) -> Path:
        return self._layers / id.path

    def _list(self, relative: PurePosixPath) -> list[str]:
        directory = self._layers / relative
        with storage_errors("list", directory):
            return self.env.list_dir(directory)

    # --- reading ----------------------------------------------------------------------------------------------------

    @property
    def is_validated(self) -> bool:
        """Returns whether this host's node looked at all that is here; else readers do, block by block
        (nosync.lsm.platform.verified).
        """
        self._is_validated = self._is_validated or is_verified_here(self.root)
        return self._is_validated

    def reader(self, id: LayerId) -> LayerReader:
        """Raises FileNotFoundError when the layer is gone, CorruptionError when its bytes are not its own."""
        with self._lock:
            reader = self._open.pop(id, None)
        # What was discarded, or released and recorded anew, has the same name.
        if reader is None or self.env.identity(reader.path) != reader.identity:
            reader = LayerReader.open(self.path_of(id), self.env, id, is_validated=self.is_validated)
            if reader.info.key_groups != self.key_groups:
                raise CorruptionError(
                    f"{self.path_of(id)}: was written with {reader.info.key_groups} key groups, and {self.root / MARKER} says "
                    f"{self.key_groups}: one of the two files is damaged, or of another store"
                )
        with self._lock:
            self._open[id] = reader  # the most recently used come last
            while len(self._open) > MAX_OPEN_LAYERS:
                del self._open[next(iter(self._open))]
        return reader

    def reader_of_any(self, trace: TraceId) -> LayerReader:
        """Returns any layer of the trace, for what all of them say. Raises HoleError where none is left."""
        for d in self.descriptions(trace):
            try:
                return self.reader(LayerId(trace, d))
            except FileNotFoundError:
                continue
        raise HoleError(
            f"{trace}: no layer of it is left; recover() recomputes them",
            stage=trace.stage, shard=str(trace.shard), lower="?", upper="?",
        )  # fmt: skip

    def forget(self, id: LayerId) -> None:
        """Drops an open layer, whose file was deleted or moved. Arrays taken from it stay valid."""
        with self._lock:
            self._open.pop(id, None)

    def trace(self, id: TraceId, *, until: Time, as_of: Time, origin: Time | None = None) -> Trace:
        """Returns the trace's layers from its beginning to `until`, usable for reads as of `as_of` and later.

        Raises HoleError, CompactedError or NotAvailableError as `choose_cover`.
        """
        return self.open_view(View(id, origin), until=until, as_of=as_of)

    def open_view(self, view: View, *, until: Time, as_of: Time) -> Trace:
        """Opens what `trace` opens, for a shard whose state begins in older traces.

        A merge may delete files between listing and opening; then the directory is listed again, and the merged
        layer that replaced them is found.
        """
        until = min(until, view.upper)
        seen: list[list[Description]] = []
        for _ in range(_RELISTS):
            try:
                readers: list[LayerReader] = []
                ends: dict[LayerId, Time] = {}
                begins: dict[LayerId, Time] = {}
                available = self.descriptions(view.id)
                for part in [*view.base, Part(view.id, view.origin, view.upper)]:
                    exact = Time(min(as_of, part.upper - 1))
                    listed = available if part.trace == view.id else None
                    opened = self._open_part(part.trace, part.lower, min(part.upper, until), exact, listed)
                    readers += opened
                    # A merge may have joined what belongs to the state with what came after, on another branch.
                    ends |= {r.id: part.upper for r in opened if r.id.description.upper > part.upper}
                    begins |= overlaps([r.id for r in opened])
                schema, key = (None, ()) if readers else self._shape_of_first(view.id, available)
                trace = Trace(view.id, readers, self.key_groups, schema, ends, begins, until, key)
            except FileNotFoundError:
                continue
            except (HoleError, CompactedError, NotAvailableError):
                # A long listing is read in parts, between which a merged layer may come and its inputs go.
                if sorted(available) in seen:
                    raise
                seen.append(sorted(available))
                continue
            there = set(available)
            for gone in [o for o in list(self._open) if o.trace == view.id and o.description not in there]:
                self.forget(gone)
            return trace
        raise NotAStoreError(
            f"{self.root}: the files of {view.id} vanish while they are listed; is something else deleting them?"
        )

    def open_rounds(self, view: View, epoch: int, rounds: int, before: Trace | None = None) -> Trace:
        """Returns a shard's state in the middle of an epoch: `before`, by default that as of the one before, and the
        first `rounds` rounds of this one.

        Raises HoleError for a round that is not there.
        """
        begin = pack(epoch)
        if before is None:
            before = self.open_view(view, until=begin, as_of=Time(begin - 1))
        of_rounds = [Description(pack(epoch, i), pack(epoch, i + 1)) for i in range(rounds)]
        try:
            readers = [self.reader(LayerId(view.id, d)) for d in of_rounds]
        except FileNotFoundError as error:
            raise HoleError(
                f"{view.id}: a round of the loop at {epoch} is missing: {error.filename}; run the epoch again",
                stage=view.id.stage, shard=str(view.id.shard), lower=show(begin), upper=show(pack(epoch, rounds)),
            ) from error  # fmt: skip
        ends = {layer.id: min(begin, before.ends.get(layer.id, begin)) for layer in before.layers}
        layers = [*before.layers, *readers]
        return Trace(view.id, layers, self.key_groups, before.schema, ends, before.begins, key=before.key)

    def layer_at(self, id: TraceId, time: Time) -> Trace:
        """Returns the one layer of a trace that holds a time, as a trace: all that is needed of a log. Raises
        HoleError.
        """
        for _ in range(_RELISTS):
            covering = [d for d in self.descriptions(id) if d.lower <= time < d.upper]
            if not covering:
                raise HoleError(
                    f"{id}: its layer at {show(time)} is missing; recover() recomputes it",
                    stage=id.stage, shard=str(id.shard), lower=show(time), upper=show(Time(time + 1)),
                )  # fmt: skip
            try:
                return Trace(
                    id, [self.reader(LayerId(id, min(covering, key=lambda d: d.upper - d.lower)))], self.key_groups
                )
            except FileNotFoundError:
                continue
        raise NotAStoreError(f"{self.root}: the files of {id} vanish while they are listed")

    def _open_part(
        self,
        id: TraceId,
        origin: Time | None,
        until: Time,
        as_of: Time,
        available: Sequence[Description] | None = None,
    ) -> list[LayerReader]:
        if available is None:
            available = self.descriptions(id)
        return [self.reader(LayerId(id, d)) for d in choose_cover(id, available, until, as_of, origin)]

    def _shape_of_first(
        self, id: TraceId, available: Sequence[Description]
    ) -> tuple[pa.Schema | None, tuple[str, ...]]:
        """Returns the schema and key that a trace begins with: what it has before, when it is empty."""
        if not available:
            return None, ()
        first = min(available)
        reader = self.reader(LayerId(id, first))
        return reader.schema_until(Time(first.lower + 1)), reader.info.key

    def check_stage(self, stage: str) -> None:
        """Raises UnknownStageError for a stage of which nothing was recorded."""
        if not self.traces(stage):
            raise UnknownStageError(
                f"no stage {stage!r} in {self.root}; recorded stages: {named_stages(self.stages())}"
                f"{did_you_mean(stage, self.stages())}"
            )

    def fingerprint_of(self, stage: str) -> str:
        """Returns the only fingerprint that a stage was recorded with. Raises UnknownStageError for none or several."""
        self.check_stage(stage)
        fingerprints = sorted({trace.fingerprint for trace in self.traces(stage)})
        if len(fingerprints) == 1:
            return fingerprints[0]
        raise UnknownStageError(
            f"stage {stage!r} was recorded with several fingerprints ({', '.join(fingerprints)}): read a sealed timestamp"
        )

    # --- writing ----------------------------------------------------------------------------------------------------

    def recorded(self, id: LayerId) -> Published:
        """Returns what stands under the name of a layer."""
        reader = self.reader(id)
        return Published(id, reader.digest, reader.info.rows, reader.size_bytes, existed=True)

    def publish(self, id: LayerId, rows: LayerRows, expected: Digest | None = None) -> Published:
        """See nosync.lsm.layers.writer.publish_rows."""
        published = publish_rows(self.root, id, rows, self.key_groups, self.env, expected)
        with self._lock:
            self._written[id] = published
            while len(self._written) > MAX_OPEN_LAYERS:
                del self._written[next(iter(self._written))]
        return published

    def contents_of(self, id: LayerId) -> tuple[Digest, int]:
        """Returns the digest of a layer and how many rows it has: what was written here a moment ago is not opened for
        that.

        Raises as `reader` does.
        """
        with self._lock:
            written = self._written.pop(id, None)
        if written is not None and self.env.identity(self.path_of(id)) == written.identity:
            return written.digest, written.rows
        reader = self.reader(id)
        return reader.digest, reader.info.rows
