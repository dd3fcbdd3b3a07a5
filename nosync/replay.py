"""Replaying a branch: which epochs and stages it takes, and what came of it.

A branch shares every layer of stages whose fingerprint is its parent's. What is missing are the layers of changed stages and
of what is computed from them; the recorded inputs give them again, and nothing else runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields

import pyarrow as pa

from nosync.dataflow import PART_SEPARATOR, STATELESS, UPDATE, Dataflow
from nosync.lsm.columns import describe, unify_schemas
from nosync.lsm.errors import FlowError, NosyncError, SchemaError
from nosync.lsm.html import facts_html, rows_html
from nosync.plan import BoundFlow

_INSTEAD = (
    "Change, or add to, what comes before the first aggregate, update or outer join, where rows only come; or run the changed "
    "flow in a store of its own, with backfill()"
)
Progress = Callable[[int, int], None]
"""Called with (epochs done, epochs in all)."""


@dataclass(frozen=True)
class ReplayPlan:
    """What a replay will do: the epochs, and by stage how many layers are to be computed and how many are shared."""

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
            f"branch {self.branch}: replays {self.epochs} epochs, {self.first} to {self.last}\n"
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
    """What a replay did."""

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
            f"branch {self.branch}: {epochs} epochs replayed in {self.seconds:.1f} s, {self.layers_computed} layers computed, "
            f"{self.layers_shared} shared"
        )


def changed_stages(flow: BoundFlow, recorded: Mapping[str, str]) -> list[str]:
    """The recorded stages of a flow that a manifest has with another fingerprint, or not at all."""
    return [stage.name for stage in flow.recorded if recorded.get(stage.name) != stage.fingerprint]


def check_states_fit(
    flow: BoundFlow, changed: Iterable[str], schema_of: Callable[[str], tuple[tuple[str, ...], pa.Schema] | None]
) -> None:
    """A changed keyed stage goes on from its parent's state, so it must be able to read it.

    `schema_of(stage)`: key and columns that the parent recorded; None for a new stage. Raises SchemaError naming the stage.
    """
    for name in changed:
        stage, before = flow.stages[name], schema_of(name)
        if before is None or not stage.keyed:
            continue
        key, schema = before
        try:
            if key != stage.key:
                raise SchemaError(f"its key was ({', '.join(key)}) and is now ({', '.join(stage.key)})")
            unify_schemas(schema, stage.schema, f"stage {name}")
        except NosyncError as error:
            raise SchemaError(
                f"stage {name} cannot go on from its parent's state ({describe(schema)}): {error}. Give the changed "
                "stage another name (drop= the old one, add= the new), so that it begins with no state"
            ) from error


def check_takes_back_what_came(flow: BoundFlow, own: Collection[str], known: Collection[str]) -> None:
    """Rows of an input that changes may be taken back after the fork though they came before it. So who counts them must have
    counted them before, and as it sees them now. `own`: stages whose own code is another one; `known`: those that were there
    before. Raises FlowError naming the stage and the input.
    """
    for stage in flow.stages.values():
        changing = next((name for name in stage.inputs if flow.stages[name].changing), None)
        declared = stage.name.partition(PART_SEPARATOR)[0]
        if changing is None or stage.kind == UPDATE:  # whose function sees what goes, and may do with it what it likes
            continue
        if declared in own and (stage.kind in STATELESS or stage.plan is not None):
            raise FlowError(
                f"stage {declared} cannot have other code on a branch: its input {changing} changes, so rows that came before "
                f"the fork would be taken back as the new code sees them, and were counted as the old one did. {_INSTEAD}"
            )
        if stage.keyed and (stage.name not in known or declared in own):
            raise FlowError(
                f"stage {declared} cannot begin on a branch: its input {changing} changes, so rows that came before the fork, "
                f"which it has never seen, would be taken back. {_INSTEAD}"
            )


def check_same_sources(before: Dataflow, after: Dataflow) -> None:
    """A branch replays the recorded inputs, so it has the same sources."""
    old = {stage.name: stage.schema for stage in before.sources}
    new = {stage.name: stage.schema for stage in after.sources}
    for name in sorted(old.keys() ^ new.keys()):
        raise FlowError(
            f"source {name} {'is dropped' if name in old else 'is new'}: a branch has the sources of its parent, whose "
            "recorded rows it replays"
        )
