"""The names of a store's files. A name is parsed once: by the codec where a peer says it, by the driver where this
node does.

A name is the file's path relative to the data directory. It is a text still, and equal to that text, so dictionaries
find it as fast as any text; what it says is read from its fields.
"""

from __future__ import annotations

import functools
import re
import sys
from dataclasses import dataclass
from typing import NamedTuple

from nosync.lsm.manifests import archive
from nosync.lsm.model.layer import Description, LayerId, Shard, TraceId, parse_file_name
from nosync.lsm.model.timestamp import end_of, is_number, pack
from nosync.lsm.platform.layout import BRANCHES, CHECKPOINTS, MANIFESTS
from nosync.lsm.platform.opaque import checkpoint_of

LAYERS = "layers"
EPOCHS_OF_GROUP = 1000
_LAYERS_PREFIX = f"{LAYERS}/"
_CHECKPOINTS_PREFIX = f"{CHECKPOINTS}/"
_TRACES_KEPT = 1 << 12
_LONGEST_NAME = 1000
_ID = "[a-z0-9_-]{1,64}"
_SMALL = re.compile(
    rf"(manifests/{_ID}/[0-9]{{1,13}}(-[0-9]{{1,13}})?|branches/[0-9]{{1,9}}|pins/{_ID}-[0-9a-z]{{1,64}}(\.gone)?"
    rf"|jobs/{_ID}/[0-9]{{1,13}}-[0-9a-z]{{1,64}}|times/{_ID}/[0-9]{{1,13}}(-[0-9]{{1,13}})?-[0-9a-z]{{1,64}}"
    rf"|sinks/{_ID}/{_ID}/[0-9]{{1,13}}-[0-9a-z]{{1,64}}(\.gone)?)\.json\Z"
)
_OTHERS_FIRST, _LOG_FIRST, _CHECKPOINTS_NEXT = -1, -(1 << 62), 0
"""Where the files come in the order of fetching that say nothing of an epoch, the entries of the log of branches, and
the files of kept checkpoints.
"""


class Span(NamedTuple):
    """The epochs that a manifest, or an archive of manifests, is of."""

    timeline: str
    """The directory of the timeline."""
    first: int
    last: int
    """The same as `first` for a manifest."""


class FileName(str):
    """The name of one file of a store."""

    __slots__ = ("group", "layer", "order", "place", "placed", "span")

    layer: LayerId | None
    """The layer that the file is; None for another file."""
    span: Span | None
    """The epochs that a manifest or an archive is of; None for another file."""
    place: str
    """A layer's place is the directory of its trace, relative to that of all layers; another file's is its own path.
    """
    placed: str | None
    """What the nodes that keep the file are chosen by: a layer's trace, or a checkpoint. None: all nodes keep it."""
    group: str
    """Files are compared by groups: the layers of a trace, a thousand manifests of a timeline, or another directory.
    """
    order: int
    """Files are fetched in this order: the log of branches as it was written, then small files, then the oldest
    epochs first, and each manifest after its layers.
    """

    def __new__(cls, text: str) -> FileName:
        """Parses a name. A name that is parsed already stays as it is."""
        if isinstance(text, FileName):
            return text
        directory, _, last = text.rpartition("/")
        if text.startswith(_LAYERS_PREFIX):
            place = directory[len(_LAYERS_PREFIX) :]
            return cls._of_trace(text, place, _layer(place, last))
        name = str.__new__(cls, text)
        name.layer, name.span, name.place, name.placed = None, _span(directory, last), text, None
        if text.startswith(_CHECKPOINTS_PREFIX):
            checkpoint = checkpoint_of(text)
            name.placed = None if checkpoint is None else sys.intern(_CHECKPOINTS_PREFIX + checkpoint)
            name.group, name.order = sys.intern(directory), _CHECKPOINTS_NEXT
        elif name.span is None:
            name.group, name.order = sys.intern(directory), _order_of_other(text)
        else:
            name.group = sys.intern(_group_of(directory, name.span))
            name.order = 2 * int(end_of(name.span.last)) + 1
        return name

    @classmethod
    def of_layer(cls, id: LayerId) -> FileName:
        """Returns the name of a layer, without parsing anything."""
        place = str(id.trace.directory)
        return cls._of_trace(f"{_LAYERS_PREFIX}{place}/{id.file_name}", place, id)

    @classmethod
    def _of_trace(cls, text: str, place: str, layer: LayerId | None) -> FileName:
        name = str.__new__(cls, text)
        name.layer, name.span, name.place = layer, None, sys.intern(place)
        name.placed = name.place
        name.group = sys.intern(_LAYERS_PREFIX + place)
        name.order = _OTHERS_FIRST if layer is None else 2 * int(layer.description.upper)
        return name

    @property
    def archive(self) -> tuple[str, Description] | None:
        """Returns the directory of an archive's timeline, and the time that the archive covers. None for another
        file.
        """
        span = self.span
        if span is None or span.first == span.last:
            return None
        return span.timeline, Description(pack(span.first), end_of(span.last))

    @property
    def entry(self) -> int | None:
        """Returns the number of an entry in the log of branches. None for another file."""
        return _entry(self)

    @property
    def is_opaque(self) -> bool:
        """Returns whether the file is one of a kept checkpoint, which the store does not look into."""
        return self.layer is None and self.placed is not None

    @property
    def is_register(self) -> bool:
        """Returns whether the file is no layer, no manifest and no entry of the log: any node may add such a file at
        any time. Files of checkpoints are among these.
        """
        return self.layer is None and self.span is None and self.entry is None


@dataclass(frozen=True, order=True)
class FileVersion:
    """One file of a store, and what it holds."""

    name: FileName
    digest: str
    size_bytes: int = 0


def parse_name(text: str) -> FileName | None:
    """Returns the name, if a store writes this one so; nothing else ever becomes a path."""
    if text.startswith(f"{CHECKPOINTS}/"):
        return None if checkpoint_of(text) is None else FileName(text)
    is_small = _SMALL.match(text) is not None
    if len(text) > _LONGEST_NAME or not (is_small or text.startswith(f"{LAYERS}/")):
        return None
    try:
        name = FileName(text)
    except Exception:  # noqa: BLE001 - whatever a text does to the parser, it is no name
        return None
    if name.layer is not None:
        return name
    is_numbered = name.span is not None or not text.startswith(f"{MANIFESTS}/")
    return name if is_small and is_numbered else None


def _layer(place: str, last: str) -> LayerId | None:
    """Returns the layer of a file in the directory of a trace; None where a store would not write the file so."""
    trace, description = _trace(place), parse_file_name(last)
    if trace is None or description is None:
        return None
    id = LayerId(trace, description)
    return id if id.file_name == last else None


@functools.lru_cache(maxsize=_TRACES_KEPT)  # the layers of a trace are many, and share it
def _trace(place: str) -> TraceId | None:
    parts = place.split("/")
    if len(parts) != 3:
        return None
    try:
        trace = TraceId(parts[0], parts[1], Shard.parse(parts[2]))
    except ValueError:
        return None
    return trace if str(trace.directory) == place else None


def _span(directory: str, last: str) -> Span | None:
    if not directory.startswith(f"{MANIFESTS}/"):
        return None
    epochs = archive.epochs_of(last)
    return None if epochs is None else Span(sys.intern(directory), *epochs)


def _group_of(directory: str, span: Span) -> str:
    return f"{directory}/{span.first // EPOCHS_OF_GROUP}" if span.first == span.last else directory


def _entry(text: str) -> int | None:
    directory, _, last = text.rpartition("/")
    number = last.removesuffix(".json")
    return int(number) if directory == BRANCHES and is_number(number) else None


def _order_of_other(text: str) -> int:
    entry = _entry(text)
    return _OTHERS_FIRST if entry is None else _LOG_FIRST + entry
