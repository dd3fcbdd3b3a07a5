"""What a store and its layers look like from outside: plain records, ready for JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nosync.lsm.manifests.branches import MAIN
from nosync.lsm.platform.notebook import facts_html, rows_html


@dataclass(frozen=True)
class StageProgress:
    """Says how far a stage is on the way from sealed to safe, in epochs. None: not even the first one."""

    stage: str
    complete: int | None
    """The newest sealed epoch."""
    durable: int | None
    """Up to here everything is durable on this node."""
    replicated: int | None
    """Up to here everything is on as many nodes as the stage asks for."""
    waiting_layers: int
    """Sealed, and not on as many nodes yet."""
    waiting_bytes: int
    """Of those, the bytes of the layers that are durable here."""


@dataclass(frozen=True)
class LayerStatus:
    """Describes one layer file as `layers()` lists it. `lower` and `upper` are epochs (text such as "7.3" inside a
    loop).
    """

    stage: str
    fingerprint: str
    shard: int
    shards: int
    """How many shards the stage had when this was written; 0: the caller placed the keys."""
    lower: int | str
    upper: int | str
    since: int | str
    rows: int
    tombstones: int
    bytes: int
    digest: str
    level: str
    """`disk`: durable and acknowledged; `memory`: published, not yet acknowledged by the node; `remote`: still in the
    object store that the directory is restored from, so its rows are not counted; `corrupt`: it cannot be read.
    """
    tree_level: int
    """Position in the LSM tree by size: 0 below 1024 rows, one more for each factor of 4."""
    path: str


@dataclass(frozen=True)
class BranchInfo:
    """Says what a branch is made of. Sizes are in bytes, of layer files as they are on disk now."""

    name: str
    timeline: str
    lineage: tuple[str, ...]
    """From which branch, as it is called now, and at which epoch, it and its ancestors were branched; its own parent
    first.
    """
    at: int | None
    epoch: int | None
    """Its newest epoch."""
    changed: tuple[str, ...]
    """The stages whose code is another one than the parent's."""
    own_layers: int
    own_bytes: int
    """Of layers that no other branch has; deleting the branch frees them."""
    shared_layers: int
    shared_bytes: int


@dataclass(frozen=True)
class InputStatus:
    """Says how far one of several inputs of a window has come in event time."""

    watermark: str | None
    """In UTC, as ISO 8601 has it; None: it has had no row with a time."""
    epochs_without_rows: int
    idle: bool
    """Whether the window does not wait for it (`idle_after=`)."""


@dataclass(frozen=True)
class WindowStatus:
    """Says where the watermark of a window is after the newest epoch."""

    watermark: str | None
    """In UTC, as ISO 8601 has it; None: there is none yet, so nothing is late."""
    inputs: Mapping[str, InputStatus]
    """Empty where there is one, or where the fastest of all counts (`policy="max"`)."""
    held_back_by: tuple[str, ...]
    """The inputs that others are ahead of, and that the window waits for."""

    def text(self) -> str:
        """Returns it in one line, for people."""
        held = f", held back by {', '.join(self.held_back_by)}" if self.held_back_by else ""
        return (self.watermark or "none yet") + held


@dataclass(frozen=True)
class RemoteStatus:
    """Says how far the copies of a store in an object store are. Epochs are those of the main branch."""

    url: str
    """Without credentials."""
    safe_point: int | None
    """The newest epoch that is remotely safe: all that it needs is there. None: not even the first one."""
    lag_epochs: int
    """Sealed epochs after it."""
    lag_s: float
    """For how long the first of them has been sealed."""
    waiting_bytes: int
    """Known to wait to be put."""
    sent_bytes: int
    """Put by this process, with what describes them."""
    packs: int
    """How many packs that were."""
    problem: str = ""
    """What keeps copies from being made; empty where all is well."""

    def text(self) -> str:
        """Returns it in one line, for people."""
        safe = "no epoch yet" if self.safe_point is None else f"epoch {self.safe_point}"
        lag = f", {self.lag_epochs} epochs and {self.lag_s:.1f} s behind" if self.lag_epochs else ""
        return f"{self.url}: {safe}{lag}{f'; {self.problem}' if self.problem else ''}"


@dataclass(frozen=True)
class StoreStatus:
    """Sums a store up. Timestamps are epochs, None where there is none yet."""

    path: str
    key_groups: int
    safe_point: int | None
    last_sealed: int | None
    since: int
    stages: Mapping[str, Mapping[str, int]]
    """Per stage: shards, layers, rows (entries, superseded ones included), bytes, upper (first epoch not recorded), and
    copies (for how many the newest epoch waits to be safe).
    """
    pins: Mapping[str, int]
    missing: int | None
    """Layers that manifests list and no file holds; None: the directory cannot be looked at."""
    problems: Mapping[str, str]
    branches: Mapping[str, int | None] = field(default_factory=dict)
    """By name, main included, the newest epoch of each branch."""
    sealed_at: str | None = None
    """When the last epoch was sealed, by the clock of who sealed it; of an earlier version's, when its file came to this
    node (ISO 8601, UTC).
    """
    branches_sealed_at: Mapping[str, str] = field(default_factory=dict)
    """By branch when its newest epoch was sealed, where that was recorded."""
    safe_point_sealed_at: str | None = None
    windows: Mapping[str, WindowStatus] = field(default_factory=dict)
    """By window with a watermark; filled in by `Job.status()` and `nosync status`."""
    remotes: tuple[RemoteStatus, ...] = ()
    """The copies in object stores, as the process said last that makes them."""
    lazy_layers: int = 0
    """Layers of a store restored with `--lazy` that are still in the object store."""
    lazy_bytes: int = 0
    """Of them, the bytes."""

    def _repr_html_(self) -> str:
        names = ("safe_point", "last_sealed", "since", "missing", "key_groups")
        facts = {name.replace("_", " "): getattr(self, name) for name in names}
        facts |= {"last sealed at": self.sealed_at} if self.sealed_at else {}
        facts |= {f"branch {name}": t for name, t in self.branches.items() if name != MAIN}
        facts |= {f"pin {name}": t for name, t in self.pins.items()}
        facts |= {f"remotely safe {i}": one.text() for i, one in enumerate(self.remotes, 1)}
        facts |= {"still in the object store": f"{self.lazy_layers} layers"} if self.lazy_layers else {}
        facts |= {f"watermark of {name}": one.text() for name, one in self.windows.items()}
        facts |= {f"problem: {where}": what for where, what in self.problems.items()}
        rows = [(n, s["shards"], s["layers"], s["rows"], s["bytes"], s["upper"] - 1) for n, s in self.stages.items()]
        columns = ["stage", "shards", "layers", "entries", "bytes", "recorded up to"]
        return facts_html(f"store {self.path}", facts, rows_html(columns, rows))
