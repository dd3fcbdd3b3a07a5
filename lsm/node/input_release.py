"""Releasing inputs on one node, as its safe point and its sources' policies (nosync.lsm.manifests.input_policy)
say.

Invariants
- Nothing goes that the safe point has not passed, on this node or as peers told it.
- Of what one node keeps (`disk`) nothing goes from here before the node that is to keep it said that it holds it.
- Up to where inputs went is written down before they go: no layer says that they need not be there.
"""

from __future__ import annotations

import itertools
from pathlib import Path

from nosync.lsm.manifests.branches import MAIN
from nosync.lsm.manifests.input_policy import (
    NOTHING,
    Releasable,
    inputs_to_release,
    policies,
    releasable_until,
)
from nosync.lsm.manifests.manifest import DISK, WAITS_FOR_REMOTE
from nosync.lsm.manifests.released_inputs import read_released, write_released
from nosync.lsm.manifests.remembered import SAFE_META
from nosync.lsm.manifests.timelines import Timelines
from nosync.lsm.model.layer import LayerId
from nosync.lsm.model.timestamp import Epoch, pack
from nosync.lsm.node.announcer import Announcer
from nosync.lsm.node.durable_layers import DurableLayers
from nosync.lsm.node.garbage import Garbage
from nosync.lsm.node.remotes import Remotes
from nosync.lsm.node.safe_point import SafePoint
from nosync.lsm.platform.env import Env
from nosync.lsm.trace.directory import LayerDirectory

_AGAIN_S, _LOOK_FOR_SAFE_S = 2.0, 0.5


class InputRelease:
    """Releases the inputs of one node."""

    def __init__(
        self,
        directory: LayerDirectory,
        layers: DurableLayers,
        timelines: Timelines,
        safe_points: SafePoint,
        announcer: Announcer,
        garbage: Garbage,
        remotes: Remotes,
        *,
        replicated: bool,
    ) -> None:
        self._directory, self._env, self._layers, self._timelines = directory, directory.env, layers, timelines
        self._safe_points, self._announcer, self._garbage = safe_points, announcer, garbage
        self._remotes, self._waits_for_others = remotes, replicated
        # By main's timeline: a rewind or a promotion makes another one main, with inputs of its own.
        self._done: dict[str, Epoch] = {}
        self._tried: dict[str, Epoch] = {}
        self._again_s = 0.0

    def wait(self) -> bool:
        """Returns whether there are inputs that go when they are safe."""
        last, done = self._timelines.last_sealed(), self._done.get(self._line, NOTHING)
        return last is not None and last > done and bool(policies(self._timelines.manifest(last)))

    @property
    def _line(self) -> str:
        return self._timelines.timeline(MAIN).id

    def idle_at_most_s(self, idle_s: float) -> float:
        """Returns how long nothing needs to be done, given how long nothing is due: nothing wakes a node when its peers, or
        an object store, have their copies.
        """
        return min(idle_s, _LOOK_FOR_SAFE_S) if self._waits_for_others and self.wait() else idle_s

    def release(self) -> None:
        """Drops what may go by now."""
        if not self.wait():
            return
        until, now_s, line = releasable_until(self._timelines, self._safe_now()), self._env.monotonic_s(), self._line
        tried = self._tried.get(line, NOTHING)
        if until <= self._done.get(line, NOTHING) or (until == tried and now_s < self._again_s):
            return
        # Not less than before: a branch may have been made since, and what was released is gone.
        if until > tried and until > self._went().get(line, NOTHING):
            self._remember(line, until)
        self._tried[line], self._again_s = until, now_s + _AGAIN_S
        found = inputs_to_release(self._directory, self._timelines, until)
        is_done = [self._release(one, until) for one in found]
        if all(is_done):
            self._done[line] = until

    def _safe_now(self) -> int | None:
        """Returns up to where nothing needs inputs: the safe point, and the remotely safe epoch where a flow asks for it."""
        safe, last = self._safe_points.point(), self._timelines.last_sealed()
        manifest = None if last is None else self._timelines.manifest(last)
        if safe is not None and manifest is not None and manifest.meta.get(WAITS_FOR_REMOTE):
            return min(safe, self._remotes.safe_point())
        return safe

    def _release(self, what: Releasable, until: Epoch) -> bool:
        """Returns whether all of it went that is to go. What the one node that keeps it does not have yet stays here."""
        peers, ids, gone, end = self._announcer.peers, what.layers, what.layers, pack(until + 1)
        if what.policy == DISK:
            if peers.is_first_replica(what.trace):
                return True
            ids = sorted(ids, key=lambda id: id.description.upper)
            gone = list(itertools.takewhile(self._is_kept_elsewhere, ids))
            if len(gone) < len(ids):
                end = ids[len(gone)].description.lower
        if what.since < end:
            peers.inputs_released(what.trace, what.since, end)
        self._garbage.forget(gone)
        return len(gone) == len(ids)

    def _is_kept_elsewhere(self, id: LayerId) -> bool:
        record = self._layers.of(id.trace).get(id.description)
        return record is not None and self._announcer.peers.has_earlier_replica(record)

    def _went(self) -> dict[str, Epoch]:
        return read_released(self._directory.root, self._env)

    def _remember(self, line: str, until: Epoch) -> None:
        write_released(self._directory.root, {**self._went(), line: until}, line, self._env)

    def take_back(self, until: Epoch) -> None:
        """Epochs after this one were discarded, for others that are not safe yet: their inputs are needed."""
        line = self._line
        for known in (self._done, self._tried):
            known[line] = min(known.get(line, NOTHING), until)
        if self._went().get(line, NOTHING) > until:
            self._remember(line, until)


def announced_safe_points(root: Path, env: Env) -> dict[str, str]:
    """Returns, for a catalog that is made anew, the safe points up to which inputs were released; nothing where none
    were.
    """
    return {SAFE_META + line: str(safe) for line, safe in read_released(root, env).items()}
