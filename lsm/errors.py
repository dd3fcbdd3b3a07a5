"""Every error that nosync raises, under one root.

An error says what was wrong, where (stage, shard, timestamp or path), what was expected, and what to
do about it. Errors of the libraries underneath (RocksDB, Arrow, the operating system) are mapped to
these at the one module that talks to the library, so `except nosync.NosyncError` catches everything.
"""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

from nosync.lsm.visible import visible


class NosyncError(Exception):
    """Root of all errors of nosync."""

    def __str__(self) -> str:
        return visible(super().__str__(), keep="\n\t")  # messages name what others wrote


def described(error: Exception) -> str:
    """Returns what a status shows of an error that ended a piece of work in the background."""
    return str(error) if isinstance(error, NosyncError) else f"unexpected {type(error).__name__}: {error}"


class InvalidInputError(NosyncError, ValueError):
    """The caller's rows, names, timestamps or settings cannot be accepted; nothing was changed."""


class SchemaError(InvalidInputError):
    """Columns are missing, unexpected, or of another type than the stage has recorded so far."""


class OutOfOrderError(InvalidInputError):
    """A timestamp is not the next one of its trace, or is already sealed."""


class UnknownStageError(InvalidInputError):
    """No stage of that name has been recorded (or declared)."""


class NotAvailableError(NosyncError):
    """The timestamp asked for has not been recorded, or not been sealed, yet."""


class CompactedError(NosyncError):
    """The timestamp asked for lies below `since`: its history has been merged away."""


class DeterminismError(NosyncError):
    """One layer was produced twice with different contents; the first one stays.

    Attributes: `stage`, `shard`, `t`, `recorded_digest`, `rejected_digest`.
    """

    def __init__(
        self, message: str, *, stage: str, shard: str, t: str, recorded_digest: str, rejected_digest: str
    ) -> None:
        super().__init__(message)
        self.stage = stage
        self.shard = shard
        self.t = t
        self.recorded_digest = recorded_digest
        self.rejected_digest = rejected_digest


class CorruptionError(NosyncError):
    """Stored bytes do not match their digest, or are not a layer at all. Names the file."""

    path: Path | None = None
    """The file, where whoever caught this has to move it aside."""

    def of_file(self, path: Path) -> CorruptionError:
        """Returns the same error, which knows its file."""
        self.path = path
        return self


class HoleError(NosyncError):
    """A trace lacks layers that a read needs. Attributes: `stage`, `shard`, `lower`, `upper` (text)."""

    def __init__(self, message: str, *, stage: str, shard: str, lower: str, upper: str) -> None:
        super().__init__(message)
        self.stage = stage
        self.shard = shard
        self.lower = lower
        self.upper = upper


class LostEpochError(NosyncError):
    """Epochs that were sealed are not there any more: their manifests are lost, and with them which layers they are."""


class StorageError(NosyncError):
    """The file system refused (disk full, read-only, I/O error). What was acked is kept."""


class StoreLockedError(NosyncError):
    """Another process is the node of this data directory."""


class ReplicationError(NosyncError):
    """Nodes cannot work together as they are configured, or a daemon does not answer."""


class RefusedError(ReplicationError):
    """A daemon answered, and says no. The connection to it is well."""


class BusyError(RefusedError):
    """A daemon answers many such calls at the moment, and did nothing of this one."""


class RemoteError(NosyncError):
    """An object store refused, cannot be reached, or has something else than copies of this store."""


class NodeLostError(NosyncError):
    """A host fell silent while an epoch ran, and the epoch was cancelled. Run it again: what was recorded is used."""


class FencedError(NosyncError):
    """A newer instance of the job has taken over; this one may not write any more."""


class FormatVersionError(NosyncError):
    """Written by a newer version of nosync than this one reads."""


class NotAStoreError(NosyncError):
    """The directory is not a nosync store, or none is there."""


class CatalogError(NosyncError):
    """RocksDB reported an error. The catalog can be rebuilt from the layer files."""


class StageError(NosyncError):
    """A stage's function raised, or returned something that cannot be recorded.

    Attributes: `stage`, `shard`, `t`.
    """

    def __init__(self, message: str, *, stage: str, shard: str, t: str) -> None:
        super().__init__(message)
        self.stage = stage
        self.shard = shard
        self.t = t


class WideRowError(NosyncError):
    """A row of an epoch is wider than Spark was told. The job runs such an epoch again and does not raise this."""


class ScanError(NosyncError):
    """Python cannot read a source's files itself, or evaluate an expression. The job leaves it to Spark and does not raise
    this. `stage`: whose expressions they are, if any are.
    """

    def __init__(self, message: str, *, stage: str = "") -> None:
        super().__init__(message)
        self.stage = stage


class FlowError(NosyncError, ValueError):
    """A dataflow is put together wrongly, or is not the one this store was written with."""


class UnknownOperatorError(FlowError, AttributeError):
    """A stage or a dataflow has no operator of that name. It is an AttributeError too, which `hasattr` asks for."""


# --- across the process boundary: Spark carries an exception of a task to the driver as text only ---------------------

_MARK = re.compile(r"nosync-failure:([A-Za-z0-9+/=]+):end")


def encode_failure(error: NosyncError) -> str:
    """Returns a text that `decode_failure` finds inside whatever Spark wraps around it."""
    fields = {name: value for name, value in vars(error).items() if isinstance(value, str)}
    text = json.dumps({"kind": type(error).__name__, "message": str(error), "fields": fields})
    return f"{error}\nnosync-failure:{base64.b64encode(text.encode()).decode()}:end"


def decode_failure(text: str) -> NosyncError | None:
    """Returns the error that a task raised, or None where the text holds none."""
    found = _MARK.search(text)
    if found is None:
        return None
    failure = json.loads(base64.b64decode(found[1]))
    kind: type[NosyncError] = globals().get(failure["kind"], NosyncError)
    return kind(failure["message"], **failure["fields"])
