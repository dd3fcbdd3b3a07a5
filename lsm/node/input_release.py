"""Letting go of inputs on one node, as its safe point and its sources' policies (nosync.lsm.manifests.input_policy)
say.

Invariants
- Nothing goes that the safe point has not passed, on this node or as peers told it.
- Of what one node keeps (`disk`) nothing goes from here before the node that is to keep it said that it holds it.
- Up to where inputs went is written down before they go: no layer says that they need not be there.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from nosync.lsm.errors import CorruptionError, StorageError
from nosync.lsm.manifests.branches import MAIN
from nosync.lsm.manifests.input_policy import NOTHING, inputs_to_release, policies, releasable_until
from nosync.lsm.manifests.manifest import DISK
from nosync.lsm.manifests.remembered import SAFE_META
from nosync.lsm.manifests.timelines import Timelines
from nosync.lsm.model.layer import Description, LayerId, Record, TraceId, check_name
from nosync.lsm.model.timestamp import Epoch, pack
from nosync.lsm.node.api import DurabilityListener
from nosync.lsm.platform.env import Env, storage_errors
from nosync.lsm.platform.json_file import read_small, replace_small, whole_number
from nosync.lsm.platform.parsing import parsed
from nosync.lsm.trace.directory import LayerDirectory

log = logging.getLogger("nosync")

RELEASED = "let-go.json"
"""In the directory: the main timeline's safe point when inputs were last let go of. The catalog has it too, and may be
lost.
"""
_AGAIN_S = 2.0


class Owner(Protocol):
    """What it needs of its node."""

    directory: LayerDirectory
    listener: DurabilityListener | None
    is_replicated: bool
    """It has peers; until there is a listener nothing is known of them."""

    @property
    def timelines(self) -> Timelines:
        """The manifests."""

    def safe_point(self, branch: str = MAIN) -> Epoch | None:
        """The safe point of a branch."""

    def records_of(self, trace: TraceId) -> Mapping[Description, Record]:
        """The durable layers of a trace."""

    def forget(self, ids: Sequence[LayerId]) -> None:
        """Layers that nothing needs any more go."""


class InputRelease:
    """Of one node."""

    def __init__(self, owner: Owner) -> None:
        self._owner, self._env = owner, owner.directory.env
        self._done = self._tried = NOTHING
        self._again_s = 0.0

    def wait(self) -> bool:
        """Whether there are inputs that go when they are safe."""
        timelines = self._owner.timelines
        last = timelines.last_sealed()
        return last is not None and last > self._done and bool(policies(timelines.manifest(last)))

    def release(self) -> None:
        """Drops what may go by now."""
        if not self.wait():
            return
        until, now_s = releasable_until(self._owner.timelines, self._owner.safe_point()), self._env.monotonic_s()
        if until <= self._done or (until == self._tried and now_s < self._again_s):
            return
        if until > self._tried:
            self._remember(until)
        self._tried, self._again_s = until, now_s + _AGAIN_S
        found = inputs_to_release(self._owner.directory, self._owner.timelines, until)
        is_done = [self._release(policy, trace, ids, until) for policy, trace, ids in found]
        if all(is_done):
            self._done = until

    def _release(self, policy: str, trace: TraceId, ids: list[LayerId], until: Epoch) -> bool:
        """Whether all of it went that is to go. What the one node that keeps it does not have yet stays here meanwhile."""
        listener, gone, end = self._owner.listener, ids, pack(until + 1)
        if policy == DISK:
            if listener is None:  # nobody knows whether another node keeps it, yet
                return not self._owner.is_replicated
            if listener.is_first_replica(trace):
                return True
            ids = sorted(ids, key=lambda id: id.description.upper)
            gone = list(itertools.takewhile(self._is_kept_elsewhere, ids))
            if len(gone) < len(ids):
                end = ids[len(gone)].description.lower
        if listener is not None:
            listener.inputs_released(trace, end)
        self._owner.forget(gone)
        return len(gone) == len(ids)

    def _is_kept_elsewhere(self, id: LayerId) -> bool:
        record, listener = self._owner.records_of(id.trace).get(id.description), self._owner.listener
        return record is not None and listener is not None and listener.has_earlier_replica(record)

    def _remember(self, until: Epoch) -> None:
        root = self._owner.directory.root
        replace_small(
            root, root / RELEASED, {"line": self._owner.timelines.timeline(MAIN).id, "safe": until}, self._env
        )

    def take_back(self, until: Epoch) -> None:
        """Epochs after this one were given up, for others that are not safe yet: their inputs are needed."""
        self._done, self._tried = min(self._done, until), min(self._tried, until)
        root = self._owner.directory.root
        if any(int(safe) > until for safe in announced_safe_points(root, self._env).values()):
            if until > NOTHING:
                self._remember(until)
            else:
                with storage_errors("remove", root / RELEASED):
                    self._env.unlink(root / RELEASED)
                    self._env.sync_dir(root)


def announced_safe_points(root: Path, env: Env) -> dict[str, str]:
    """For a catalog that is made anew, the safe point up to which inputs were let go of; nothing where none were."""
    path = root / RELEASED
    try:
        fields = read_small(path, env)
        with parsed("what inputs were let go of", str(path)):
            return {SAFE_META + check_name(fields["line"], "timeline name"): str(whole_number(fields["safe"], "safe"))}
    except (CorruptionError, StorageError) as error:
        if path.exists():
            log.warning("%s", error)
        return {}
