"""What a layer is called and what it says about itself.

Invariants
- A trace id names a stage, its fingerprint and one shard; a layer id adds a description.
- Description `(lower, upper, since)`: the layer holds every change of its trace with
  `lower <= time < upper`, and reads as of `t` that use it are exact for every `t >= since`.
  (Differential dataflow's batch description; a fresh layer has `since == 0`.)
- The path of a layer is a function of its id and nothing else, and its id can be read back from it.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import NewType

from nosync.lsm.errors import InvalidInputError
from nosync.lsm.model.timestamp import ZERO, Time, epoch_of, pack, parse, round_of, show

Digest = NewType("Digest", str)
"""Hexadecimal BLAKE3-256 of a layer (see docs/format.md)."""

_NAME = re.compile(r"[a-z0-9_][a-z0-9_-]{0,63}\Z")
SUFFIX = ".layer"


def check_name(name: str, what: str) -> str:
    """Names become directories and travel between nodes, so they are restricted. Returns `name`."""
    if not isinstance(name, str) or not _NAME.match(name):
        raise InvalidInputError(
            f"{what} {name!r} is not a valid name: use 1 to 64 of the characters a-z 0-9 _ - (not starting with -)"
        )
    return name


@dataclass(frozen=True, order=True)
class Description:
    """A layer's time range `[lower, upper)` and logical compaction frontier `since`."""

    lower: Time
    upper: Time
    since: Time = ZERO

    def __post_init__(self) -> None:
        if not 0 <= self.lower < self.upper or not self.since >= 0:
            raise InvalidInputError(f"a layer cannot cover [{self.lower}, {self.upper}) with since {self.since}")

    @classmethod
    def of_epoch(cls, t: int) -> Description:
        return cls(pack(t), pack(t + 1))

    @property
    def is_of_rounds(self) -> bool:
        """Returns whether it begins or ends inside an epoch: rounds of a loop, for which the layer of their epoch will
        stand.
        """
        return round_of(self.lower) > 0 or round_of(self.upper) > 0

    def covers(self, other: Description) -> bool:
        """Returns whether a layer of this time range stands for one of the other."""
        return self.lower <= other.lower and other.upper <= self.upper

    def __str__(self) -> str:
        return f"[{show(self.lower)}, {show(self.upper)}) since {show(self.since)}"


def of_round(t: int, round: int) -> Description:
    """Returns the time range of one round of a loop inside epoch `t`."""
    return Description(pack(t, round), pack(t, round + 1))


@dataclass(frozen=True, order=True)
class Shard:
    """Shard `index` of `count`: the key groups `[first_group, end_group)` of `key_groups`.

    `count == 0` means that the caller places keys itself (as with Kafka's partitions); such a shard may hold any key
    group.
    """

    index: int
    count: int = 0

    def __post_init__(self) -> None:
        if (
            isinstance(self.index, bool)
            or not isinstance(self.index, int)
            or self.index < 0
            or self.count < 0
            or (self.count and self.index >= self.count)
        ):
            raise InvalidInputError(f"shard {self.index!r} of {self.count!r} does not exist: shards count from 0")

    def groups(self, key_groups: int) -> range:
        if not self.count:
            return range(key_groups)
        # The first group whose shard number, floor(group * count / key_groups), is index.
        first = -(-self.index * key_groups // self.count)
        return range(first, -(-(self.index + 1) * key_groups // self.count))

    def __str__(self) -> str:
        return f"{self.index}of{self.count}" if self.count else str(self.index)

    @classmethod
    def parse(cls, text: str) -> Shard:
        index, _, count = text.partition("of")
        return cls(int(index), int(count or 0))


@dataclass(frozen=True, order=True)
class TraceId:
    stage: str
    fingerprint: str
    shard: Shard

    def __post_init__(self) -> None:
        check_name(self.stage, "stage name")
        check_name(self.fingerprint, "fingerprint")

    @property
    def directory(self) -> PurePosixPath:
        return _directory(self)

    def __str__(self) -> str:
        return f"stage {self.stage} shard {self.shard}"


@dataclass(frozen=True, order=True)
class LayerId:
    trace: TraceId
    description: Description

    @property
    def file_name(self) -> str:
        d = self.description
        return f"{show(d.lower)}-{show(d.upper)}-{show(d.since)}{SUFFIX}"

    @property
    def path(self) -> PurePosixPath:
        """Returns the path relative to the `layers/` directory of a store."""
        return _path(self)

    @property
    def is_fresh(self) -> bool:
        """Returns whether a task wrote the layer, and not a merge: it covers one epoch (or one round) and nothing was
        compacted.
        """
        d = self.description
        return d.since == 0 and (d.upper == d.lower + 1 or d.upper == pack(epoch_of(d.lower) + 1))

    def __str__(self) -> str:
        d = self.description
        when = show(d.lower) if self.is_fresh else f"[{show(d.lower)}, {show(d.upper)})"
        return f"{self.trace} timestamp {when}"


@functools.lru_cache(maxsize=1 << 15)  # the same names are listed again and again, and in every shard
def parse_file_name(name: str) -> Description | None:
    """Returns the description in a file's name, or None where it is not a layer's name."""
    if not name.endswith(SUFFIX):
        return None
    parts = name[: -len(SUFFIX)].split("-")
    if len(parts) != 3:
        return None
    try:
        return Description(*(parse(part) for part in parts))
    except ValueError:
        return None


# Putting a path together takes longer than looking it up, and what is new is asked for its path again and again.
@functools.lru_cache(maxsize=1 << 12)
def _directory(trace: TraceId) -> PurePosixPath:
    return PurePosixPath(trace.stage, trace.fingerprint, str(trace.shard))


@functools.lru_cache(maxsize=1 << 12)
def _path(id: LayerId) -> PurePosixPath:
    return _directory(id.trace) / id.file_name


def parse_path(path: PurePosixPath) -> LayerId | None:
    """Returns the layer id of a path relative to `layers/`, or None."""
    if len(path.parts) != 4:
        return None
    stage, fingerprint, shard_text, name = path.parts
    description = parse_file_name(name)
    if description is None:
        return None
    try:
        shard = Shard.parse(shard_text)
        layer = LayerId(TraceId(stage, fingerprint, shard), description)
    except ValueError:
        return None
    return layer if layer.path == path else None


@dataclass(frozen=True)
class Record:
    """A durable layer: its id, digest, and size."""

    id: LayerId
    digest: Digest
    rows: int
    size_bytes: int
