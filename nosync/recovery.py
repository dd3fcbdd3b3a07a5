"""The recovery planner: which layers to compute so that the wanted ones exist, and nothing more. Pure.

`plan` is demand-driven: a layer that is recorded is not computed, and a layer that nobody needs is not even looked at.
To compute stage C, shard s at t, a task needs
- C's own layers of shard s before t (its state), if C is keyed;
- the changes at t of C's input: of the same shard if C is stateless, of every shard if C is keyed. The changes of a
  recorded keyed layer are its rows and what they replaced, so they need that shard's layers before t too,
  and history at t that was not merged away.
What is missing of these is computed as well, and so on down to the sources, whose rows must be recorded or given again.
Layers that exist at later timestamps stay: the stages are functions, so they are still right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from nosync.dataflow import SOURCE
from nosync.lsm.layer import Description
from nosync.lsm.timestamp import Time, epoch_of, pack
from nosync.plan import BoundFlow, BoundStage


@dataclass(frozen=True, order=True)
class Cell:
    """The layer of one stage and shard at one epoch."""

    t: int
    stage: str
    shard: int

    def __str__(self) -> str:
        return f"stage {self.stage} shard {self.shard} timestamp {self.t}"


@dataclass(frozen=True)
class Step:
    """One epoch to run: by stage, the shards to compute. `needs_input`: sources whose rows must be given again."""

    t: int
    compute: Mapping[str, frozenset[int]]
    needs_input: frozenset[str]


@dataclass(frozen=True)
class RecoveryPlan:
    """Steps in the order to run them, and the wanted cells that cannot be had, each with the reason."""

    steps: tuple[Step, ...]
    impossible: Mapping[Cell, str]


class Inventory:
    """Which cells are recorded, from the descriptions of the layers of each (stage, shard)."""

    def __init__(self, layers: Mapping[tuple[str, int], Sequence[Description]]) -> None:
        self._layers = layers

    def layer_at(self, cell: Cell) -> Description | None:
        """The layer that covers the cell and was compacted least."""
        time = pack(cell.t)
        covering = [d for d in self._layers.get((cell.stage, cell.shard), ()) if d.lower <= time < d.upper]
        return min(covering, key=lambda d: d.since, default=None)

    def missing_between(self, stage: str, shard: int, origin: int, t: int) -> list[int]:
        """The epochs in `[origin, t)` that no layer of the shard covers."""
        covered: set[int] = set()
        for d in self._layers.get((stage, shard), ()):
            covered.update(range(max(origin, epoch_of(d.lower)), min(t, epoch_of(Time(d.upper - 1)) + 1)))
        return [e for e in range(origin, t) if e not in covered]


def plan(
    flow: BoundFlow,
    inventory: Inventory,
    wanted: Iterable[Cell],
    *,
    shards: int,
    origins: Mapping[str, int],
    can_replay: Callable[[str, int], bool],
) -> RecoveryPlan:
    """What to compute so that every wanted cell is recorded.

    `origins`: by stage, the first epoch of its traces. `can_replay(source, t)`: whether the rows of a source at an epoch
    can be given again. The work done is proportional to what is missing, not to the state.
    """
    planner = _Planner(flow, inventory, shards, origins, can_replay)
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
        inventory: Inventory,
        shards: int,
        origins: Mapping[str, int],
        can_replay: Callable[[str, int], bool],
    ) -> None:
        self._flow, self._inventory, self._shards = flow, inventory, shards
        self._origins, self._can_replay = origins, can_replay
        self._decided: dict[Cell, str] = {}  # cells to compute ("") or that cannot be (the reason)

    def require(self, wanted: Cell) -> str:
        """Plans the cell and all that it needs; the reason if that is impossible. Iterative: histories are long."""
        stack: list[tuple[Cell, bool]] = [(wanted, False)]
        while stack:
            cell, needs_known = stack.pop()
            if cell in self._decided or self._inventory.layer_at(cell) is not None:
                continue
            if not needs_known:
                stack.append((cell, True))
                stack += [(need, False) for need in self._needs(cell)[0]]
                continue
            needs, reason = self._needs(cell)
            reasons = [self._decided[n] for n in needs if self._decided.get(n)]
            self._decided[cell] = reason or (reasons[0] if reasons else "")
        return self._decided.get(wanted, "")

    def _needs(self, cell: Cell) -> tuple[list[Cell], str]:
        """The missing cells that computing this one needs, and why it is impossible ("" if it is not)."""
        stage = self._flow.stages[cell.stage]
        if stage.kind == SOURCE:
            if self._can_replay(stage.name, cell.t):
                return [], ""
            return [], f"the input of source {stage.name} at {cell.t} is neither recorded nor given again"
        assert stage.input is not None
        upstream = self._flow.stages[stage.input]
        needs: list[Cell] = []
        if stage.keyed:
            needs += self._state_before(stage, cell.shard, cell.t)
        reason = ""
        for shard in range(self._shards) if stage.keyed else [cell.shard]:
            given = Cell(cell.t, upstream.name, shard)
            layer = self._inventory.layer_at(given)
            if layer is None:
                needs.append(given)
            elif upstream.keyed:
                needs += self._state_before(upstream, shard, cell.t)
                if layer.since >= pack(cell.t) and layer.since > 0:
                    reason = f"what changed in {given} was merged away; retain= or a pin would have kept it"
        return needs, reason

    def _state_before(self, stage: BoundStage, shard: int, t: int) -> list[Cell]:
        origin = self._origins.get(stage.name, t)
        return [Cell(e, stage.name, shard) for e in self._inventory.missing_between(stage.name, shard, origin, t)]

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
