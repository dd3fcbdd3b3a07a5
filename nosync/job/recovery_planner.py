"""The recovery planner: which layers to compute so that the wanted ones exist, and nothing more. Pure.

`plan` is demand-driven: a layer that is recorded is not computed, and a layer that nobody needs is not even looked at.
To compute stage C, shard s at t, a task needs
- C's own layers of shard s before t (its state), if C is keyed;
- the changes at t of C's inputs: of the same shard if the rows stay in it, of every shard if they come by key. A stage
  that is not recorded has the changes of what it is computed from. The changes of a recorded keyed layer are its rows
  and what they replaced, so they need that shard's layers before t too, and history at t that was not merged away. A
  stage that begins anew at t needs all rows that are there, so all layers of its inputs up to t, and its own before,
  log or not. What is missing of these is computed as well, and so on down to the sources, whose rows must be recorded
  or given again. Layers that exist at later timestamps stay: the stages are functions, so they are still right.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from nosync.flow.bound_flow import BoundFlow, Step
from nosync.flow.bound_stage import LATE, WATERMARK, BoundStage, part_of
from nosync.flow.kinds import SOURCE
from nosync.lsm.manifests.lost_ends import lost_manifests
from nosync.lsm.model.history import History, Part, Span, span_at, view_at
from nosync.lsm.model.layer import Description, TraceId
from nosync.lsm.model.timestamp import ZERO, Time, end_of, epoch_of, pack
from nosync.lsm.node.api import StoreBackend
from nosync.lsm.trace.presence import live


@dataclass(frozen=True, order=True)
class Cell:
    """The layer of one stage and shard at one epoch."""

    t: int
    stage: str
    shard: int

    def __str__(self) -> str:
        return f"stage {self.stage} shard {self.shard} timestamp {self.t}"


@dataclass(frozen=True)
class RecoveryPlan:
    """Steps in the order to run them, and the wanted cells that cannot be had, each with the reason."""

    steps: tuple[Step, ...]
    impossible: Mapping[Cell, str]


class RecordedCells:
    """Knows which cells are recorded, from the descriptions of the layers of each trace."""

    def __init__(self, layers: Callable[[TraceId], Sequence[Description]], frontier: Time = ZERO) -> None:
        """`frontier`: the compaction frontier. What merged layers replaced up to there is about to go, and does not
        count.
        """
        self._list, self._frontier = layers, frontier
        self._layers: dict[TraceId, Sequence[Description]] = {}

    def _of(self, trace: TraceId) -> Sequence[Description]:
        if trace not in self._layers:
            # The rounds of a loop stay for a moment after their epoch: they are neither its layer nor what reads find.
            self._layers[trace] = [d for d in live(self._list(trace), self._frontier) if not d.is_of_rounds]
        return self._layers[trace]

    def layer_at(self, trace: TraceId, t: int) -> Description | None:
        """Returns the layer that covers the epoch and was compacted least."""
        time = pack(t)
        covering = [d for d in self._of(trace) if d.lower <= time < d.upper]
        return min(covering, key=lambda d: d.since, default=None)

    def missing_between(self, trace: TraceId, origin: int, t: int) -> list[int]:
        """Returns the epochs in `[origin, t)` that no layer of the trace covers."""
        covered: set[int] = set()
        for d in self._of(trace):
            covered.update(range(max(origin, epoch_of(d.lower)), min(t, epoch_of(Time(d.upper - 1)) + 1)))
        return [e for e in range(origin, t) if e not in covered]


def plan(
    flow: BoundFlow,
    inventory: RecordedCells,
    wanted: Iterable[Cell],
    *,
    histories: Mapping[str, History],
    can_replay: Callable[[str, int], bool],
    flow_at: Callable[[int], BoundFlow] | None = None,
) -> RecoveryPlan:
    """Returns what to compute so that every wanted cell is recorded.

    `histories`: by stage, which traces its layers are in. `can_replay(source, t)`: whether the rows of a source at an
    epoch can be given again. `flow_at(t)`: the flow with the inputs of epoch `t`, and where they were placed (default:
    always `flow`). The work done is proportional to what is missing, not to the state.
    """
    # Of each epoch many cells are looked at.
    planner = _Planner(flow, inventory, histories, can_replay, functools.cache(flow_at or (lambda _: flow)))
    impossible = {}
    for cell in sorted(set(wanted)):
        reason = planner.require(cell)
        if reason:
            impossible[cell] = reason
    return RecoveryPlan(planner.steps(), impossible)


class _Planner:
    def __init__(
        self,
        flow: BoundFlow,
        inventory: RecordedCells,
        histories: Mapping[str, History],
        can_replay: Callable[[str, int], bool],
        flow_at: Callable[[int], BoundFlow],
    ) -> None:
        self._flow_at = flow_at
        self._flow, self._inventory = flow, inventory
        self._histories, self._can_replay = histories, can_replay
        self._decided: dict[Cell, str] = {}  # cells to compute ("") or that cannot be (the reason)

    def require(self, wanted: Cell) -> str:
        """Plans the cell and all that it needs. Returns the reason if that is impossible. Iterative: histories are
        long.
        """
        stack: list[tuple[Cell, bool]] = [(wanted, False)]
        while stack:
            cell, needs_known = stack.pop()
            if cell in self._decided or self._layer_at(cell) is not None:
                continue
            if not needs_known:
                stack.append((cell, True))
                stack += [(need, False) for need in self._needs(cell)[0]]
                continue
            needs, reason = self._needs(cell)
            reasons = [self._decided[n] for n in needs if self._decided.get(n)]
            self._decided[cell] = reason or (reasons[0] if reasons else "")
        return self._decided.get(wanted, "")

    def _span(self, stage: str, t: int) -> Span:
        span = span_at(self._histories.get(stage, ()), pack(t))
        assert span is not None, f"stage {stage} was sealed at {t}"
        return span

    def _layer_at(self, cell: Cell) -> Description | None:
        return self._inventory.layer_at(self._span(cell.stage, cell.t).trace(cell.stage, cell.shard), cell.t)

    def _needs(self, cell: Cell) -> tuple[list[Cell], str]:
        """Returns the missing cells that computing this one needs, and why it is impossible ("" if it is not)."""
        stage = self._flow.stages[cell.stage]
        if self._flow_at(cell.t).stages[stage.name].fingerprint != self._span(stage.name, cell.t).fingerprint:
            return [], f"{cell} was recorded by other code than this flow has"
        if not stage.deterministic:
            return [], f"stage {stage.name} is declared deterministic=False: what was recorded is never computed again"
        if stage.kind == SOURCE:
            if self._can_replay(stage.name, cell.t):
                return [], ""
            return [], f"the input of source {stage.name} at {cell.t} is neither recorded nor given again"
        if stage.loop is not None:
            return self._needs_of_loop(stage.loop, cell.t)
        needs = self._own_state(stage, cell)
        reason = ""
        shards = self._span(stage.name, cell.t).shard_count
        for name in stage.inputs:
            by_key, is_anew = self._crosses_shards(stage, name, cell.t), stage.bootstrap_at == cell.t
            for upstream in self._flow.changes_from(name):
                from_all = by_key or (is_anew and not upstream.keyed)  # a log's rows belong to no shard
                for shard in range(shards) if from_all else [cell.shard]:
                    need = self._whole if is_anew else self._changes
                    more, why = need(upstream, Cell(cell.t, upstream.name, shard))
                    needs += more
                    reason = reason or why
        return needs, reason

    def _needs_of_loop(self, loop: str, t: int) -> tuple[list[Cell], str]:
        """Returns what a loop needs for all shards, for its rounds go back and forth between them."""
        needs: list[Cell] = []
        reason = ""
        shards = range(self._span(loop, t).shard_count)
        for stage in self._flow.stages.values():
            if stage.loop != loop:
                continue
            if stage.keyed:
                needs += [need for shard in shards for need in self._state_before(stage, shard, t)]
            for name in stage.inputs:
                if self._flow.stages[name].loop == loop:
                    continue
                need = self._whole if stage.bootstrap_at == t else self._changes
                for upstream in self._flow.changes_from(name):
                    for shard in shards:
                        more, why = need(upstream, Cell(t, upstream.name, shard))
                        needs += more
                        reason = reason or why
        return needs, reason

    def _own_state(self, stage: BoundStage, cell: Cell) -> list[Cell]:
        """Returns what is missing of what the stage reads of itself, and of stages beside it, before the epoch."""
        needs = self._state_before(stage, cell.shard, cell.t) if stage.keyed else []
        if not stage.keyed and stage.bootstrap_at == cell.t and (stage.kind == LATE or not stage.given_once):
            shards = range(self._span(stage.name, cell.t).shard_count)  # a log's rows belong to no shard
            needs = [need for shard in shards for need in self._state_before(stage, shard, cell.t)]
        for name in stage.beside:
            needs += self._state_before(self._flow.stages[name], cell.shard, cell.t)
        if stage.window is not None:
            needs += self._watermark_before(stage, cell)
        return needs

    def _watermark_before(self, stage: BoundStage, of: Cell) -> list[Cell]:
        name = part_of(stage.name, WATERMARK)
        span = span_at(self._histories.get(name, ()), Time(pack(of.t) - 1))
        if name not in self._flow.stages or span is None:
            return []
        # Every shard records the same watermark.
        same_shards = span.shard_count == self._span(stage.name, of.t).shard_count
        cell = Cell(of.t - 1, name, of.shard if same_shards else 0)
        return [cell] if self._layer_at(cell) is None else []

    def _crosses_shards(self, stage: BoundStage, name: str, t: int) -> bool:
        """Returns whether the rows of an input come by key, from every shard."""
        return bool(stage.edge_key) and name not in self._flow_at(t).segment_of(stage.name).stages

    def _changes(self, upstream: BoundStage, given: Cell) -> tuple[list[Cell], str]:
        """Returns what is missing to have the changes of a cell, and why they cannot be had."""
        layer = self._layer_at(given)
        if layer is None:
            return [given], ""
        if not upstream.keyed:
            return [], ""
        if layer.since >= pack(given.t) and layer.since > 0:
            return [], f"what changed in {given} was merged away; retain= or a pin would have kept it"
        return self._state_before(upstream, given.shard, given.t), ""

    def _whole(self, upstream: BoundStage, given: Cell) -> tuple[list[Cell], str]:
        """Returns what is missing to have all rows that are there after a cell's epoch, and why they cannot be had."""
        layer = self._layer_at(given)
        if layer is not None and layer.since >= end_of(given.t):
            return [], f"what was there after {given} was merged away; retain= or a pin would have kept it"
        missing = [given] if layer is None else []
        return [*missing, *self._state_before(upstream, given.shard, given.t)], ""

    def _state_before(self, stage: BoundStage, shard: int, t: int) -> list[Cell]:
        history = self._histories.get(stage.name, ())
        id = self._span(stage.name, t).trace(stage.name, shard)
        view = view_at(history, id, pack(t), self._flow.key_groups)
        assert view.origin is not None
        parts = [*view.base, Part(id, view.origin, pack(t))]
        return [
            Cell(e, stage.name, part.trace.shard.index)
            for part in parts
            for e in self._inventory.missing_between(part.trace, epoch_of(part.lower or ZERO), epoch_of(part.upper))
        ]

    def steps(self) -> tuple[Step, ...]:
        by_epoch: dict[int, dict[str, set[int]]] = {}
        for cell, reason in self._decided.items():
            if not reason:
                by_epoch.setdefault(cell.t, {}).setdefault(cell.stage, set()).add(cell.shard)
        found = []
        for t, compute in sorted(by_epoch.items()):
            needs_input = frozenset(name for name in compute if self._flow.stages[name].kind == SOURCE)
            found.append(Step(t, {name: frozenset(shards) for name, shards in sorted(compute.items())}, needs_input))
        return tuple(found)


def lost_manifest(node: StoreBackend, branch: str) -> dict[str, str]:
    """Returns manifests of a branch that are lost, which no computation brings back, with what to do."""
    return lost_manifests(node.timelines, branch, node.safe_point(branch))
