"""Copies a store into a bucket, a pack at a time. It has no thread and no clock: `level` runs it, and so do backups.

Invariants
- What waits is what this node has and the bucket lacks, so it is bounded by the store: nothing is queued. In memory is
  one pack at most.
- A file goes into a pack after every byte of it was compared with its digest.
- Up to where the bucket is whole is found from what its log says, never from what this node has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath

from nosync.lsm.manifests.released_inputs import Released
from nosync.lsm.model.layer import Record
from nosync.replication.protocol.file_names import FileName, FileVersion, parse_name
from nosync.replication.protocol.inventory import Inventory
from nosync.replication.remote.checkpoint_copies import CheckpointCopies
from nosync.replication.remote.files import NodeFiles
from nosync.replication.remote.history import check_no_other
from nosync.replication.remote.log import LogWriter
from nosync.replication.remote.others import OtherNodes, Together, furthest
from nosync.replication.remote.pack import Contents, PackBuilder, Placed, Reached, Step
from nosync.replication.remote.reach import Reach, exact_from
from nosync.replication.remote.selection import not_needed, shrinking, uncovered
from nosync.replication.remote.settings import RemoteSettings
from nosync.replication.remote.source import Source, opaque_files

_PACKS_PER_INDEX = 256
_MOST_IN_VAIN = 5


class Uploader:
    """Copies from one source into one log."""

    def __init__(
        self, source: Source, writer: LogWriter, settings: RemoteSettings, others: OtherNodes | None = None
    ) -> None:
        """`others`: nodes whose copies count, too."""
        self._others = others
        self._source, self.writer, self._settings = source, writer, settings
        self._root, self._env = source.directory.root, source.directory.env
        self._files = NodeFiles(self._root, self._env)
        self._checkpoints = CheckpointCopies(self._root, self._env, self._files.read_digest)
        self._reach = Reach(source.timelines, self._files.digest_of_small)
        self._builder = PackBuilder()
        self._waiting: dict[FileName, FileVersion | None] = {}  # what goes next; of small files no version is known yet
        self._large: dict[FileName, FileVersion] = {}  # what goes as objects of its own
        self._large_put: list[Placed] = []
        self._dropped: list[str] = []
        self._lost: set[str] = set()  # what the log says is held, and is gone
        self._needs_index = False  # for readers cannot follow the log
        self._moving: set[FileName] = set()  # what is held, and goes again so that its pack can be deleted
        self._looks_at_all = True
        self._may_say_more = True
        """Whether something came since it was found that no more is whole than is said."""

    @property
    def damaged(self) -> dict[str, str]:
        """Returns files that are not copied because they are damaged here, and why."""
        return self._files.damaged

    @property
    def away(self) -> dict[str, str]:
        """Returns files that are not copied yet because the bucket they are in does not give them, and why."""
        return self._files.away

    @property
    def waiting_bytes(self) -> int:
        """Returns how many bytes are known to wait."""
        # As lists: whoever asks for the status is another thread.
        versions = [*list(self._large.values()), *(one for one in list(self._waiting.values()) if one is not None)]
        return len(self._builder.body) + sum(version.size_bytes for version in versions)

    @property
    def is_full(self) -> bool:
        """Returns whether a pack is full, so that it is put without waiting for more."""
        return len(self._builder.body) >= self._settings.flush_bytes

    @property
    def has_something(self) -> bool:
        """Returns whether there is anything to put."""
        gathered = (self._builder.versions, self._large, self._large_put, self._lost, self._waiting, self._needs_index)
        return any(gathered) or self.writer.is_pending or (self._others is None and self._can_say_more())

    def look_at_all(self) -> None:
        """Everything is compared with the next call of `gather`, and not only what is new."""
        self._looks_at_all = True

    # --- what goes ----------------------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Takes what became durable into the pack that is put next, as far as there is room."""
        if self.is_full:
            return
        new = self._source.new()
        looks_at_all, self._looks_at_all = self._looks_at_all or new is None, False
        self._may_say_more = self._may_say_more or looks_at_all or bool(new and (new.layers or new.small_files))
        layers = _versions(self._source.layers()) if looks_at_all or new is None else self._mine(new.layers)
        self._take_checkpoints(looks_at_all=looks_at_all)
        small = self._source.small_files() if looks_at_all else new.small_files if new else ()
        names = [name for path in small if (name := parse_name(str(path))) is not None]
        held = self.writer.contents.inventory
        candidates = {**layers, **{name: one for name, one in self._waiting.items() if one is not None}}
        for other in self._inventories[1:]:
            candidates = {name: one for name, one in candidates.items() if not other.holds(name, one.digest)}
        wanted = {one.name: one for one in uncovered(candidates.values(), held, self._going())}
        if looks_at_all:
            wanted |= {one.name: one for one in shrinking(layers.values(), held, layers.__contains__)}
            self._find_dropped(layers)
            self._forget_discarded()
            self._files.forget_gone()
        wanted |= self._moved()
        going = {version.name for version in self._going()}
        files = [name for name in (*names, *self._waiting) if name.layer is None and self._is_lacking(name)]
        self._waiting = {name: one for name, one in {**dict.fromkeys(files), **wanted}.items() if name not in going}
        self._fill()

    def _mine(self, records: Sequence[Record]) -> dict[FileName, FileVersion]:
        """Returns the new layers that this node puts. Those that are another's are looked for when all are: that one may
        have gone.
        """
        if self._others is None:
            return _versions(records)
        return _versions(record for record in records if not self._source.is_for_another(record))

    def _going(self) -> list[FileVersion]:
        """Returns what is gathered already."""
        placed = [placed.version for placed in self._large_put]
        return [*(version for version, _ in self._builder.versions), *self._large.values(), *placed]

    def _is_lacking(self, name: FileName) -> bool:
        """Returns whether the bucket lacks a small file, or has another one under its name: a node that was lost may have
        begun an epoch that this one did anew. Raises RemoteTakenError where it had that epoch whole.
        """
        if name.is_opaque:
            mine, *theirs = (one.get(name) for one in self._inventories)
            return self._checkpoints.is_lacking(name, mine, [one for one in theirs if one is not None])
        if not any(name in one for one in self._inventories):
            return not any(one.has_archived(name) for one in self._inventories)
        digest = self._files.digest_of_small(PurePosixPath(name))
        if digest is None:  # it is gone
            return False
        if self._others is not None:
            check_no_other(self.writer.bucket_url, name, digest, self._others.contents, self._root)
        mine, *theirs = (one.get(name) for one in self._inventories)
        told = theirs if mine is None else [mine]
        return any(one is not None and one.digest != digest for one in told)

    @property
    def _inventories(self) -> list[Inventory]:
        """Returns what this node holds in the bucket, and then what others do."""
        return [self.writer.contents.inventory, *(self._others.inventories if self._others is not None else ())]

    def move(self, names: Iterable[FileName]) -> None:
        """Has these files put again, which are held and still here, in a pack with others."""
        self._moving.update(names)

    def _moved(self) -> dict[FileName, FileVersion]:
        held, names = self.writer.contents.inventory, self._moving
        self._moving = set()
        found = {name: version for name in names if (version := held.get(name)) is not None}
        return {name: version for name, version in found.items() if self._env.exists(self._root / name)}

    def lose(self, names: Iterable[str], *, is_log_whole: bool) -> None:
        """These files are held no more, for objects are gone: nothing that needs them is safe until they are put again.
        Nothing may be pending. `is_log_whole`: whether readers can follow the log.
        """
        self._needs_index = self._needs_index or not is_log_whole
        self._lost.update(names)
        if not self._lost:
            return
        contents = self.writer.contents
        contents.lose(self._lost)
        self._reach.forget()
        contents.reached = Reached()
        self.writer.acknowledged = contents.reached = self._reached((), ())
        self.look_at_all()

    @property
    def of_others(self) -> Mapping[str, Contents]:
        """Returns what other nodes hold, by node."""
        return {} if self._others is None else self._others.contents

    @property
    def going_objects(self) -> set[str]:
        """Returns the objects of large files that are put, and that no pack names yet."""
        return {placed.place.object for placed in self._large_put}

    def _fill(self) -> None:
        """Takes of what waits as much as there is room for, in the order in which it is best put."""
        for name in sorted(self._waiting, key=lambda name: (name.order, name)):
            version = self._waiting[name]
            if version is not None and version.size_bytes >= self._settings.large_bytes:
                self._large[name] = version
            elif self.is_full:
                return
            else:
                self._take(name)
            del self._waiting[name]

    def _find_dropped(self, layers: dict[FileName, FileVersion]) -> None:
        """Finds what the bucket needs no more. Nothing is dropped while something here is known to be wrong."""
        if not self._source.is_whole():
            return
        small = {str(path) for path in (*self._source.small_files(), *opaque_files(self._source))}
        here = {str(name): version for name, version in layers.items()}
        held, safe = self.writer.contents.inventory, self._source.safe_point()
        others = self._others.reached if self._others is not None else ()
        exact = exact_from(self._source.timelines, furthest([self.writer.acknowledged, *others]))
        self._dropped = not_needed(held, here, small, self._source.timelines, safe, exact)

    def _forget_discarded(self) -> None:
        """Drops what an operator discarded here for another node's contents: those go in its place."""
        for name, digest in self._source.discarded().items():
            held = self.writer.contents.inventory.get(name)
            self._files.forget(PurePosixPath(name))
            if held is not None and held.digest == digest and held.name.layer is None:
                self._moving.add(held.name)

    def _take_checkpoints(self, *, looks_at_all: bool) -> None:
        going = {version.name for version in self._going()}
        names = self._checkpoints.names(looks_at_all=looks_at_all)
        self._waiting |= {name: None for name in names if name not in going and self._is_lacking(name)}

    def _take(self, name: FileName) -> None:
        data = self._files.read(name)
        if data is None:
            self._looks_at_all = True  # it was merged or archived: what stands for it goes
            return
        version = self._files.checked(name, data)
        if version is None:
            return
        if name.layer is None:
            self._files.note(version)
        if version.size_bytes >= self._settings.large_bytes:
            self._large[name] = version
        else:
            self._builder.add(version, data.to_pybytes())

    # --- putting it ---------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Puts what was gathered, as one pack, and an index where many packs came since the last one.

        Raises RemoteError, of which UnavailableError may pass: what was gathered is kept, and put with the next call.
        """
        self.writer.settle()
        if self._others is not None:
            self._others.look()
            for version, _ in self._builder.versions:
                check_no_other(self.writer.bucket_url, version.name, version.digest, self._others.contents, self._root)
        self._put_large()
        writer = self.writer
        # The place of an index that is damaged is taken.
        has_no_place = self._needs_index and writer.index_at == writer.contents.at
        if self._builder.versions or self._large_put or self._lost or has_no_place or self._can_say_more():
            self._write_pack()
        if self._needs_index or writer.contents.at.number - writer.index_at.number >= _PACKS_PER_INDEX:
            writer.write_index()
            self._needs_index = False

    def _can_say_more(self) -> bool:
        """Returns whether more is whole than anybody said: because of what other nodes put since, or because a copy of the
        directory was made while the store went on.
        """
        if self._others is None and not self._may_say_more:
            return False
        others = () if self._others is None else self._others.reached
        said = furthest([self.writer.contents.reached, *others])
        found = self._reached((), ())
        self._may_say_more = any(t > said.epochs.get(timeline, -1) for timeline, t in found.epochs.items())
        return self._may_say_more

    def _put_large(self) -> None:
        """Puts large files, and leaves the rest of them for the next time after as much as a pack has."""
        end_bytes = self.writer.sent_bytes + self._settings.flush_bytes
        for name, version in list(self._large.items()):
            most_bytes = end_bytes - self.writer.sent_bytes
            if most_bytes <= 0:
                return
            data = self._files.read(name)
            has_begun = self.writer.has_begun(version)
            if data is not None and (has_begun or self._files.checked(name, data) == version):
                view = memoryview(data).cast("B")
                placed = self.writer.put_large(version, view, self._settings.large_bytes, most_bytes)
                if placed is None:
                    return
                # Its parts may be hours apart.
                if not has_begun or self._files.checked(name, data) == version:
                    self._large_put.append(placed)
            else:
                self._looks_at_all = self._looks_at_all or data is None  # merged away: what stands for it goes
                self.writer.give_up_parts()
            del self._large[name]

    def _write_pack(self) -> None:
        builder, large, dropped = self._builder, self._large_put, [*{*self._dropped, *self._lost}]
        self._builder, self._large_put, self._dropped, self._lost = PackBuilder(), [], [], set()
        added = [*builder.placed(self.writer.next_pack()), *large]
        names = {placed.version.name for placed in added}
        dropped = sorted(name for name in dropped if name not in names)
        held = self.writer.contents.inventory
        if any((before := held.get(one.version.name)) is not None and before != one.version for one in added):
            self._reach.forget()
        reached = self._reached(added, dropped)
        at, incarnation = self.writer.contents.at.next, self.writer.claim.incarnation
        self._may_say_more = True
        self.writer.write(builder, Step(at, added, dropped, reached, incarnation))

    def _reached(self, added: Sequence[Placed], dropped: Sequence[str]) -> Reached:
        """Returns up to where the bucket is whole once this is there."""
        contents = self.writer.contents
        with contents.as_if(added, dropped):
            held = Together(self._inventories) if self._others is not None else contents.inventory
            released = Released.of(self._root, self._env, self._source.timelines, self._source.safe_point())
            return self._reach.of(held, contents.reached, released)

    def push_all(self) -> None:
        """Puts everything that this node has and the bucket lacks, but for what goes faster than it is put. Raises RemoteError
        where that does not succeed.
        """
        self.look_at_all()
        in_vain = 0
        while in_vain < _MOST_IN_VAIN:  # files may vanish while they are listed
            sent_bytes = self.writer.sent_bytes
            self.gather()
            if not self.has_something:
                return
            self.flush()
            in_vain = 0 if self.writer.sent_bytes > sent_bytes else in_vain + 1


def _versions(records: Iterable[Record]) -> dict[FileName, FileVersion]:
    found = {}
    for record in records:
        if not record.id.description.is_of_rounds:
            name = FileName.of_layer(record.id)
            found[name] = FileVersion(name, record.digest, record.size_bytes)
    return found
