"""Replaying a branch: computing the layers that it does not share with its parent, from the recorded inputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from nosync.flow.bound_flow import Step
from nosync.job.epoch_layout import EpochLayout
from nosync.job.flow_versions import FlowVersions
from nosync.job.position import Position
from nosync.job.sealing import Sealing
from nosync.job.stream_checks import came_by
from nosync.lsm.errors import FlowError, InvalidInputError, NotAvailableError
from nosync.lsm.manifests.input_policy import policies
from nosync.lsm.manifests.manifest import DROP, Manifest
from nosync.lsm.model.timestamp import Epoch, epoch_of
from nosync.lsm.node.api import StoreBackend
from nosync.lsm.platform.notebook import facts_html, rows_html
from nosync.lsm.trace.directory import LayerDirectory
from nosync.runtime.epoch_batches import ScheduledEpoch

if TYPE_CHECKING:
    from nosync.spark.runner import Runner

Progress = Callable[[int, int], None]
"""Called with (epochs done, epochs in all)."""


@dataclass(frozen=True)
class ReplayPlan:
    """Says what a replay will do: the epochs, and by stage how many layers are to be computed and how many are shared."""

    branch: str
    first: int
    last: int
    computed: Mapping[str, int]
    shared: Mapping[str, int]

    @property
    def epochs(self) -> int:
        return max(0, self.last - self.first + 1)

    def __str__(self) -> str:
        if not self.epochs:
            return f"branch {self.branch}: nothing to replay"
        stages = ", ".join(f"{name} ({n})" for name, n in self.computed.items()) or "nothing"
        return (
            f"branch {self.branch}: replays {self.epochs} {'epoch' if self.epochs == 1 else 'epochs'}, "
            f"{self.first} to {self.last}\n"
            f"  computes  {stages}\n"
            f"  shares    {sum(self.shared.values())} layers of {len(self.shared)} stages"
        )

    def _repr_html_(self) -> str:
        counts = [(n, self.computed.get(n, 0), self.shared.get(n, 0)) for n in {**self.computed, **self.shared}]
        table = rows_html(["stage", "layers to compute", "layers shared"], counts)
        return facts_html(
            f"replay of {self.branch}", {"epochs": self.epochs, "from": self.first, "to": self.last}, table
        )


@dataclass(frozen=True)
class ReplayReport:
    """Says what a replay did."""

    branch: str
    first: int
    last: int
    layers_computed: int
    layers_shared: int
    seconds: float

    def _repr_html_(self) -> str:
        return facts_html(f"replay of {self.branch}", {f.name: getattr(self, f.name) for f in fields(self)})

    def __str__(self) -> str:
        epochs = max(0, self.last - self.first + 1)
        return (
            f"branch {self.branch}: {epochs} {'epoch' if epochs == 1 else 'epochs'} replayed in {self.seconds:.1f} s, "
            f"{self.layers_computed} layers computed, {self.layers_shared} shared"
        )


class ReplayPlanner:
    """Says what a replay of a branch computes, and changes nothing."""

    def __init__(
        self,
        node: StoreBackend,
        directory: LayerDirectory,
        position: Position,
        versions: FlowVersions,
        layout: EpochLayout,
    ) -> None:
        self._node, self._directory = node, directory
        self._position, self._versions, self._layout = position, versions, layout

    def epochs(self, to: int | None) -> tuple[int, int]:
        """Returns the first and the last epoch of a replay up to `to` (None: all that the parent has).

        Raises FlowError or NotAvailableError where there is nothing to replay.
        """
        if to is not None and (isinstance(to, bool) or not isinstance(to, int) or to < 0):
            raise InvalidInputError(f"replay({to!r}): expected the number of an epoch")
        branch = self._position.branch
        timeline = self._node.timelines.timeline(branch)
        if timeline.parent is None:
            raise FlowError("the main timeline has no recorded future to replay; branch() first")
        if self._versions.has_own_inputs():
            raise FlowError(f"branch {branch} has inputs of its own since it was advanced: nothing is left to replay")
        parents = self._node.timelines.of_timeline(timeline.parent)
        last_sealed = self._position.last_sealed()
        assert last_sealed is not None, "a branch begins at a sealed epoch"
        if to is not None and to not in parents and to > last_sealed:
            raise NotAvailableError(
                f"cannot replay branch {branch} to {to}: inputs are recorded up to {max(parents, default=last_sealed)}"
            )
        self._check_inputs_kept(parents.get(Epoch(last_sealed + 1)))
        return last_sealed + 1, max(parents, default=last_sealed) if to is None else to

    def plan(self, to: int | None) -> ReplayPlan:
        """Returns what a replay computes and what it shares. Raises as `epochs`."""
        first, last = self.epochs(to)
        computed: dict[str, int] = {}
        shared: dict[str, int] = {}
        for t in range(first, last + 1):
            flow = self._versions.at(t)
            shards = self._layout.shards_at(flow, t)
            recorded = self._layout.recorded_stages(flow, t)
            for stage in flow.recorded:
                of = shared if stage.name in recorded else computed
                of[stage.name] = of.get(stage.name, 0) + shards
        return ReplayPlan(self._position.branch, first, last, computed, shared)

    def _check_inputs_kept(self, manifest: Manifest | None) -> None:
        for entry in manifest.entries if manifest else ():
            gone = not self._directory.holds(entry.id)
            policy = policies(manifest).get(entry.id.trace.stage)
            if gone and policy == DROP:
                raise NotAvailableError(
                    f"cannot replay branch {self._position.branch} from {epoch_of(entry.id.description.lower)}: the rows of "
                    f"source {entry.id.trace.stage} were released when they were safe (at_safe_point={policy!r})"
                )


class Replay:
    """Replays a branch."""

    def __init__(
        self,
        planner: ReplayPlanner,
        position: Position,
        versions: FlowVersions,
        layout: EpochLayout,
        sealing: Sealing,
        runner: Runner,
    ) -> None:
        self._planner, self._position, self._versions, self._layout = planner, position, versions, layout
        self._sealing, self._runner = sealing, runner

    def plan(self, to: int | None) -> ReplayPlan:
        """Returns what `run` will compute and what it will share."""
        return self._planner.plan(to)

    def run(self, to: int | None, progress: Progress | None) -> ReplayReport:
        """Computes the branch's epochs up to `to`, and seals each of them."""
        started = time.perf_counter()
        self._position.check_open()
        first, last = self._planner.epochs(to)
        computed, shared = 0, 0
        epochs = (self._scheduled(t) for t in range(first, last + 1))
        branch, instance = self._position.branch, self._position.instance
        for one, reports in self._runner.run_all(epochs, lambda _: {}, branch, instance, everything=True):
            t = one.step.t
            self._sealing.seal(one.flow, t, reports, came_by(self._versions.manifest(t)))
            ran = sum(report.computed for report in reports.values())
            computed += ran
            shared += len(one.flow.recorded) * one.shards - ran
            if progress:
                progress(t - first + 1, last - first + 1)
        return ReplayReport(branch, first, last, computed, shared, time.perf_counter() - started)

    def _scheduled(self, t: int) -> ScheduledEpoch:
        flow = self._versions.at(t)
        shards, recorded = self._layout.shards_at(flow, t), self._layout.recorded_stages(flow, t)
        return ScheduledEpoch(Step(t, {}, frozenset()), flow, shards, self._layout.rows_at(t), recorded)
