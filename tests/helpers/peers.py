"""Peers of a node, as far as it hears of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from nosync.lsm.manifests.manifest import Entry
from nosync.lsm.model.layer import LayerId, Record, TraceId
from nosync.lsm.model.timestamp import Epoch, Time
from nosync.lsm.platform.opaque import OpaqueRecord


class Peers:
    """Says how many copies there are."""

    def __init__(self, layers: int, files: int) -> None:
        self.layers, self.files = layers, files
        self.announced: list[str] = []

    def held(self, added: Sequence[Record], gone: Sequence[LayerId], *, dropped: bool = False) -> None:
        self.announced += [str(record.id) for record in added]

    def held_files(self, paths: Sequence[PurePosixPath]) -> None:
        self.announced += [str(path) for path in paths]

    def dropped_files(self, paths: Sequence[PurePosixPath]) -> None:
        assert all(path.parts[0] == "times" for path in paths), "nothing else is dropped here"

    def held_opaque(self, added: Sequence[OpaqueRecord]) -> None:
        self.announced += [str(record.path) for record in added]

    def gone_opaque(self, paths: Sequence[PurePosixPath], *, dropped: bool) -> None:
        self.gone = [(str(path), dropped) for path in paths]

    def versions_discarded(self, digests: Mapping[str, str], before: Time) -> None:
        """Nothing."""

    def lost_files(self, paths: Sequence[PurePosixPath], layers: Sequence[LayerId] = ()) -> None:
        self.lost = [str(path) for path in paths]

    def safe_elsewhere(self, line: str) -> Epoch:
        return Epoch(-1)

    def inputs_released(self, trace: TraceId, since: Time, until: Time) -> None:
        raise AssertionError("nothing is discarded here")

    def is_first_replica(self, trace: TraceId) -> bool:
        return True

    def has_earlier_replica(self, record: Record) -> bool:
        return False

    def copies(self, entry: Entry) -> int:
        return self.layers

    def copies_of_file(self, path: PurePosixPath) -> int:
        return self.files
