"""The sealed epochs of a timeline: archives of old manifests, the newer manifests one by one, and those of its parent.

Invariants
- An epoch is found in one place: what an archive stands for is not kept beside it.
- What is returned never changes, whether it comes from a file of its own or from an archive.
- Old epochs cost no memory: an archive is its head, until one of its epochs is asked for.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from nosync.lsm.errors import CorruptionError, StorageError
from nosync.lsm.manifests.archive import Archive, Details, Run, parse_name
from nosync.lsm.manifests.manifest import Manifest
from nosync.lsm.model.timestamp import MAX_EPOCH, Epoch, is_number
from nosync.lsm.platform.env import Env
from nosync.lsm.platform.json_file import read_if_there
from nosync.lsm.platform.layout import MANIFESTS

_DETAILS_IN_MEMORY = 4
_RELISTS = 5


class ManifestLog(Mapping[Epoch, Manifest]):
    """Holds the manifests of one timeline, in order of epochs. One thread changes it; others may look meanwhile."""

    def __init__(
        self, timeline: str, root: Path, env: Env, parent: ManifestLog | None = None, at: Epoch | None = None
    ) -> None:
        """`parent`: of the timeline that this one begins in, after epoch `at`."""
        self.timeline, self._root, self._env = timeline, root, env
        self._at = Epoch(-1) if at is None else at
        self._before: tuple[tuple[ManifestLog, Epoch], ...] = () if parent is None else parent.until(self._at)
        """The timelines that it comes from, oldest first, and up to which epoch it has theirs; each time a later one.
        """
        self._own: tuple[tuple[Archive, ...], dict[Epoch, Manifest]] = (), {}
        self._details: OrderedDict[Archive, Details] = OrderedDict()

    def until(self, at: Epoch) -> tuple[tuple[ManifestLog, Epoch], ...]:
        """Returns the timelines that the epochs up to `at` are of, this one included, each with the last of them."""
        kept = bisect.bisect_left(self._before, at, key=lambda before: before[1])
        timeline = self._before[kept][0] if kept < len(self._before) else self
        return (*self._before[:kept], (timeline, at))

    # --- looking ----------------------------------------------------------------------------------------------------

    def __getitem__(self, t: int) -> Manifest:
        timeline = self._timeline_at(t)
        archives, singles = timeline._own
        found = singles.get(Epoch(t))
        if found is not None:
            return found
        archive = archive_of(archives, t)
        if archive is None:
            raise KeyError(t)
        return timeline._detail(archive, t)

    def __contains__(self, t: object) -> bool:
        if not isinstance(t, int):
            return False
        archives, singles = self._timeline_at(t)._own
        return t in singles or archive_of(archives, t) is not None

    def timeline_at(self, t: int) -> str:
        """Returns the timeline that an epoch belongs to, or would belong to."""
        return self._timeline_at(t).timeline

    def _timeline_at(self, t: int) -> ManifestLog:
        """Returns the log of the timeline that an epoch belongs to, or would belong to."""
        at = bisect.bisect_left(self._before, t, key=lambda before: before[1])
        return self._before[at][0] if at < len(self._before) else self

    def __iter__(self) -> Iterator[Epoch]:
        for timeline, until in self._before:
            for t in timeline.own():
                if t > until:
                    break
                yield t
        yield from self.own()

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return self.first is not None

    def own(self) -> Iterator[Epoch]:
        """Yields the epochs that are not the parent's, in order."""
        for piece in self._pieces_of_own():
            yield from (Epoch(t) for t in (piece.epochs if isinstance(piece, Archive) else (piece.t,)))

    @property
    def first(self) -> Epoch | None:
        for timeline, until in self._before:
            first = timeline._first_own
            if first is not None and first <= until:
                return first
        return self._first_own

    @property
    def _first_own(self) -> Epoch | None:
        archives, singles = self._own
        begins = [archives[0].first] if archives else []
        oldest = _end_of(singles)
        return min([*begins, *([] if oldest is None else [oldest])], default=None)

    @property
    def last(self) -> Epoch | None:
        own = self.last_own
        if own is not None or not self._before:
            return own
        if self._at in self:
            return self._at
        for timeline, until in reversed(self._before):
            last = max((t for t in timeline.own() if t <= until), default=None)
            if last is not None:
                return last
        return None

    @property
    def last_own(self) -> Epoch | None:
        archives, singles = self._own
        ends = [archives[-1].last] if archives else []
        newest = _end_of(singles, newest=True)
        return max([*ends, *([] if newest is None else [newest])], default=None)

    def singles(self) -> list[Epoch]:
        """Returns the epochs that have a file of their own, in order."""
        return list(self._own[1])

    def archives(self) -> tuple[Archive, ...]:
        return self._own[0]

    def archive_at(self, t: int) -> Archive | None:
        """Returns the archive that holds an epoch of this timeline itself."""
        return archive_of(self._own[0], t)

    def pieces(self, after: int = -1) -> Iterator[Run | Manifest]:
        """Yields all of it in order, old epochs as runs. What ends by epoch `after` is left out."""
        for timeline, until in self._before:
            if until > after:
                yield from timeline._pieces_until(after, until)
        yield from self.own_pieces(after)

    def _pieces_until(self, after: int, until: Epoch) -> Iterator[Run | Manifest]:
        """Yields what `own_pieces` yields, of epochs up to `until`."""
        for piece in self.own_pieces(after):
            if (piece.first if isinstance(piece, Run) else piece.t) > until:
                return
            yield piece.until(until) if isinstance(piece, Run) else piece

    def own_pieces(self, after: int = -1) -> Iterator[Run | Manifest]:
        """Yields what `pieces` yields, without the epochs of the timeline's parents."""
        for own in self._pieces_of_own(after):
            if isinstance(own, Archive):
                yield from (run for run in own.runs if run.last > after)
            else:
                yield own

    def gap(self, safe: int | None) -> int | None:
        """Returns the first epoch beyond `safe` (None: of all) whose manifest is not there, and later ones are: one
        that was lost.
        """
        reached = self.first if safe is None else safe + 1
        if reached is None:
            return None
        for piece in self.pieces(reached - 1):
            first, last = (piece.first, piece.last) if isinstance(piece, Run) else (piece.t, piece.t)
            if first > reached:
                return reached
            reached = max(reached, last + 1)
        return None

    def of_run(self, run: Run) -> Iterator[Manifest]:
        """Yields the manifests of a run, one by one."""
        return (self[t] for t in range(run.first, run.last + 1))

    def _pieces_of_own(self, after: int = -1) -> list[Archive | Manifest]:
        archives, singles = self._own
        pieces: list[tuple[Epoch, Archive | Manifest]] = [(a.first, a) for a in archives if a.last > after]
        pieces += [(t, manifest) for t, manifest in list(singles.items()) if t > after]
        return [piece for _, piece in sorted(pieces, key=lambda piece: piece[0])]

    def _detail(self, archive: Archive, t: int) -> Manifest:
        details = self._details.get(archive)
        if details is None:
            try:
                details = Details(archive, self._root, self._env)
            except FileNotFoundError:
                return self._single_again(archive, t)
            self._details[archive] = details
            while len(self._details) > _DETAILS_IN_MEMORY:
                self._details.popitem(last=False)
        return details.manifest(t)

    def _single_again(self, archive: Archive, t: int) -> Manifest:
        """The timeline was cut inside an archive, whose epochs before the cut have files of their own again."""
        try:
            return read_manifest(self._root, self.timeline, t, self._env)
        except FileNotFoundError:
            raise StorageError(
                f"{self._root / archive.path}: is gone, and with it epoch {t}: its branch was deleted; open the store again"
            ) from None

    # --- changing ---------------------------------------------------------------------------------------------------

    def load(self, archives: tuple[Archive, ...], manifests: Iterable[Manifest]) -> None:
        """Takes over all that the timeline has of its own, in order."""
        self._own = archives, {manifest.t: manifest for manifest in manifests}

    def add(self, manifest: Manifest) -> None:
        """Adds one more epoch, with a file of its own."""
        archives, singles = self._own
        if singles and manifest.t < next(reversed(singles)):
            singles = dict(sorted([*singles.items(), (manifest.t, manifest)]))
            self._own = archives, singles
        else:
            singles[manifest.t] = manifest

    def add_archive(self, archive: Archive) -> None:
        """An archive stands for its epochs from now on."""
        archives, singles = self._own
        kept = {t: m for t, m in list(singles.items()) if t not in archive}
        self._own = outermost([*archives, archive]), kept

    def remove(self, gone: Iterable[Epoch], archives: Iterable[Archive] = ()) -> None:
        """Removes epochs with files of their own, or whole archives."""
        there, singles = self._own
        without, dropped = set(gone), set(archives)
        self._own = (
            tuple(archive for archive in there if archive not in dropped),
            {t: m for t, m in list(singles.items()) if t not in without},
        )


def _end_of(singles: dict[Epoch, Manifest], *, newest: bool = False) -> Epoch | None:
    """Returns the first or the last key of a dictionary to which another thread may add one at this moment."""
    while True:
        try:
            return next(reversed(singles) if newest else iter(singles), None)
        except RuntimeError:
            continue


def archive_of(archives: Sequence[Archive], t: int) -> Archive | None:
    """Returns the archive that an epoch is in; None where it is in none."""
    at = bisect.bisect_left(archives, t, key=lambda archive: archive.last)
    return archives[at] if at < len(archives) and t in archives[at] else None


def outermost(archives: Iterable[Archive]) -> tuple[Archive, ...]:
    """Returns the archives in order, without those that another one stands for."""
    kept: list[Archive] = []
    for archive in sorted(archives, key=lambda archive: (archive.first, -archive.last)):
        if not kept or archive.last > kept[-1].last:
            kept.append(archive)
    return tuple(kept)


def list_timeline(root: Path, timeline: str, env: Env) -> tuple[set[str], set[Epoch]]:
    """Returns the names of a timeline's archives, and the epochs that have files of their own."""
    names = env.list_dir(root / MANIFESTS / timeline)
    archives = {name for name in names if parse_name(name)}
    stems = [name.removesuffix(".json") for name in names if name.endswith(".json")]
    return archives, {Epoch(int(stem)) for stem in stems if is_number(stem) and int(stem) <= MAX_EPOCH}


def read_manifest_log(sealed: ManifestLog, root: Path, env: Env) -> list[CorruptionError]:
    """Reads what a timeline has of its own into `sealed`, which is empty. Returns an error for each damaged file."""
    for _ in range(_RELISTS):
        try:
            return _read_listed(sealed, root, env)
        except FileNotFoundError:
            continue  # its node put manifests into an archive meanwhile, or cut the timeline
    raise StorageError(f"{root / MANIFESTS / sealed.timeline}: changes faster than it can be read; try again")


def _read_listed(sealed: ManifestLog, root: Path, env: Env) -> list[CorruptionError]:
    names, epochs = list_timeline(root, sealed.timeline, env)
    errors: list[CorruptionError] = []
    archives = []
    for name in sorted(names):
        try:
            archives.append(Archive.read(root, sealed.timeline, name, env))
        except CorruptionError as error:
            errors.append(error.of_file(root / MANIFESTS / sealed.timeline / name))
    outer = outermost(archives)
    manifests = []
    for t in sorted(t for t in epochs if archive_of(outer, t) is None):
        try:
            manifests.append(read_manifest(root, sealed.timeline, t, env))
        except CorruptionError as error:
            errors.append(error.of_file(root / MANIFESTS / sealed.timeline / f"{t}.json"))
    sealed.load(outer, manifests)
    return errors


def read_manifest(root: Path, timeline: str, t: int, env: Env) -> Manifest:
    """Reads a manifest that has a file of its own. Raises CorruptionError, or FileNotFoundError where it has none (any
    more).
    """
    path = root / MANIFESTS / timeline / f"{t}.json"
    manifest = Manifest.from_json(read_if_there(path, env), str(path))
    if (manifest.t, manifest.timeline) != (t, timeline):
        raise CorruptionError(f"{path}: holds the manifest of {manifest.timeline} {manifest.t}")
    return manifest
