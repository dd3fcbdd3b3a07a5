"""The files that a node asked its peers for, or began to take, and does not have yet: by name, by session and by trace.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nosync.lsm.model.layer import Description
from nosync.replication.protocol.file_names import FileName, FileVersion
from nosync.replication.protocol.messages import SessionId


@dataclass(frozen=True)
class Fetch:
    """One file that is to come."""

    held: FileVersion
    session: SessionId
    since_s: float


class Fetches(Mapping[FileName, Fetch]):
    """The files that are to come, by name. Each comes from one peer."""

    def __init__(self) -> None:
        self._by_name: dict[FileName, Fetch] = {}
        self._sizes: dict[SessionId, dict[FileName, int]] = {}
        self._layers: dict[str, dict[Description, FileName]] = {}

    def __getitem__(self, name: FileName) -> Fetch:
        return self._by_name[name]

    def __iter__(self) -> Iterator[FileName]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def begin(self, held: FileVersion, session: SessionId, now_s: float) -> None:
        assert held.name not in self._by_name, "a file is fetched from one peer at a time"
        self._by_name[held.name] = Fetch(held, session, now_s)
        self._sizes.setdefault(session, {})[held.name] = held.size_bytes
        layer = held.name.layer
        if layer is not None:
            self._layers.setdefault(held.name.place, {})[layer.description] = held.name

    def end(self, name: FileName) -> None:
        """It came, or is not waited for any more. Ending twice is fine."""
        fetch = self._by_name.pop(name, None)
        if fetch is None:
            return
        sizes = self._sizes[fetch.session]
        del sizes[name]
        if not sizes:
            del self._sizes[fetch.session]
        layer, trace = fetch.held.name.layer, fetch.held.name.place
        if layer is not None:
            layers = self._layers[trace]
            del layers[layer.description]
            if not layers:
                del self._layers[trace]

    def of_session(self, session: SessionId) -> Mapping[FileName, int]:
        """Returns what comes from a peer: its names and sizes."""
        return self._sizes.get(session, {})

    def layers(self, trace: str) -> Mapping[Description, FileName]:
        """Returns by description the names of the layers of a trace that are to come."""
        return self._layers.get(trace, {})
