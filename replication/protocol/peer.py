"""What a node knows of another one: its session, what it holds, and what is on its way."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from nosync.lsm.model.timestamp import pack
from nosync.lsm.platform.layout import MANIFESTS
from nosync.replication.protocol.divergence import Divergence
from nosync.replication.protocol.file_names import FileName, FileVersion
from nosync.replication.protocol.inventory import Inventory
from nosync.replication.protocol.messages import Change, Effect, Send, SessionId
from nosync.replication.protocol.placement import NodeId

HEARTBEAT_S = 0.6
SUSPECT_AFTER_S = 1.5
"""A peer that says nothing for so long, two heartbeats and a half, is not counted on."""
AWAY_PATIENCE_S = 5.0
"""How long a daemon may be away, say to be restarted, until the tasks on its host are taken elsewhere."""
_RUNS_KEPT = 64
SMALLEST_WINDOW_BYTES = 4 << 20
WINDOW_S = 2.0
"""At most what comes in this time is asked for at once: on a slow link what is asked for would be merged before it
came.
"""


@dataclass
class Peer:
    """Holds what a node knows of another one."""

    node: NodeId
    incarnation: str | None = None
    session: SessionId | None = None
    holds: Inventory = field(default_factory=Inventory)
    seq: int = -1
    """Its last statement that counted; -1: none yet in this session."""
    said: int = 0
    """The number of our last statement to it in this session."""
    unsaid: dict[FileName, FileVersion | None] = field(default_factory=dict)
    """What is held since then, and what is not any more (None)."""
    heard_s: float = float("-inf")
    asked_s: float | None = None
    """When its inventory was asked for, and has not come yet."""
    unknown: set[str] = field(default_factory=set)
    """Groups of files whose summary came, and whose names were asked for."""
    todo: dict[str, list[FileVersion]] = field(default_factory=dict)
    """What it holds and we should keep, and do not have, by trace (layers) or by itself (other files)."""
    not_safe: dict[str, list[FileVersion]] = field(default_factory=dict)
    """Of that what begins after the safe point, as it was when `todo` was made."""
    todo_files: int = 0
    """How many these are."""
    queue: list[FileVersion] = field(default_factory=list)
    """Of many, in which order they are asked for, the next one last; put in order now and then."""
    queued_s: float = float("-inf")
    dirty: set[str] = field(default_factory=set)
    """Traces and other files that changed here or there, or in who keeps them, since `todo` was made."""
    arrived_bytes: int = 0
    """Pieces of files since the last heartbeat."""
    rate_bytes_s: float = SMALLEST_WINDOW_BYTES / WINDOW_S
    """How fast files come from it, while any do."""
    piece_s: float = float("-inf")
    """When the last piece of a file came."""
    fell_silent: bool = False
    """Its last session ended because nothing came any more: it, its host or the network may be gone, and nobody said
    so.
    """
    unwanted: dict[FileName, float] = field(default_factory=dict)
    """What was dropped here, and is not to come back from this peer: until it drops it too (inf), or a time."""
    pushed: dict[FileName, tuple[int, float]] = field(default_factory=dict)
    """What is on its way to it unasked: bytes, and since when."""
    push_again_s: float = float("-inf")
    """Until then nothing goes to it unasked."""
    conflicts: dict[str, dict[FileName, tuple[str, str]]] = field(default_factory=dict)
    """Files of other contents there than here, by trace or by themselves: our digest and theirs."""
    found_diverged: Divergence | None = None
    """What of its files they make another history, until they change."""
    is_known: bool = False
    """All that it holds was said in this session."""
    refused: str = ""
    """Why it is not talked to."""
    process: str = ""
    """The run of its daemon that is talked to."""
    ended: deque[str] = field(default_factory=lambda: deque(maxlen=_RUNS_KEPT))
    """Runs of its daemon in the place of which another one came."""
    twin: str = ""
    """What to say of another daemon that calls itself the same, and still runs."""
    twin_s: float = float("-inf")
    """When that was heard of last."""
    safe: dict[str, int] = field(default_factory=dict)
    """By timeline, the safe point that it told in this session."""
    differs_from: dict[str, int] = field(default_factory=dict)
    """By timeline, the first epoch of which an archive of its says otherwise than the manifests here."""

    def is_of_another_history(self, name: FileName) -> bool:
        """Returns whether a file that it holds is of another history than ours, or may be."""
        for timeline, t in self.differs_from.items():
            span = name.span
            if name.layer is not None and name.layer.description.upper > pack(t):
                return True
            if span is not None and span.timeline == f"{MANIFESTS}/{timeline}" and span.last >= t:
                return True
        if not self.conflicts:
            return False
        if self.found_diverged is None:
            self.found_diverged = Divergence(self.all_conflicts())
        return self.found_diverged.has(name)

    def conflict_at(self, place: str, found: Mapping[FileName, tuple[str, str]]) -> None:
        """These are all conflicts of one trace, or of one other file."""
        before = self.conflicts.pop(place, {})
        if found:
            self.conflicts[place] = dict(found)
        if before.keys() != found.keys():
            self.found_diverged = None

    def all_conflicts(self) -> dict[FileName, tuple[str, str]]:
        """Returns the conflicts by file."""
        return {name: digests for files in self.conflicts.values() for name, digests in files.items()}

    def touched(self, names: Iterable[FileName]) -> None:
        """Files changed there, or are not on their way to it any more."""
        for name in names:
            self.dirty.add(name.place)
            self.pushed.pop(name, None)

    def void(self) -> None:
        """Forgets all that the peer said of what it holds."""
        self.touched(held.name for held in self.holds)
        self.holds, self.todo, self.not_safe, self.unwanted = Inventory(), {}, {}, {}
        self.conflicts, self.found_diverged, self.differs_from = {}, None, {}
        self.todo_files, self.queue = 0, []

    def measure_rate(self, seconds: float) -> None:
        """Measures the rate of what came in the last `seconds`, if anything did."""
        if self.arrived_bytes:
            self.rate_bytes_s = (self.rate_bytes_s + self.arrived_bytes / seconds) / 2
            self.arrived_bytes = 0

    def say(self) -> list[Effect]:
        """Tells it what it was not told yet."""
        assert self.session is not None, "only of a session that lasts"
        if not self.unsaid:
            return []
        unsaid, self.unsaid = self.unsaid, {}
        self.said += 1
        added = tuple(held for held in unsaid.values() if held is not None)
        gone = tuple(name for name, held in unsaid.items() if held is None)
        return [Send(self.session, Change(self.said, added, gone))]

    def has_dropped(self, names: Iterable[FileName]) -> None:
        """It does not hold these: if it does again, they are other ones."""
        for name in names:
            if self.unwanted.get(name) == float("inf"):
                del self.unwanted[name]

    def is_up(self, now_s: float) -> bool:
        return self.session is not None and now_s - self.heard_s <= SUSPECT_AFTER_S
