"""Explain: which input rows, at which epochs, led to a value. Found by going back through the flow, stage by stage.

The way back is in `nosync.job.lineage`. A step that can only say "some of these" says so: it is not exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from nosync.flow.bound_flow import BoundFlow
from nosync.flow.bound_stage import BoundStage, Evaluate
from nosync.flow.kinds import SOURCE
from nosync.job.lineage import Lineage, Recorded, Walk, matching
from nosync.kernels.aggregate_plan import ALL_ROWS, ALL_ROWS_TYPE
from nosync.lsm.columnar.columns import EPOCH_COLUMN, with_columns_of
from nosync.lsm.errors import InvalidInputError, NotAvailableError, SchemaError, UnknownStageError
from nosync.lsm.manifests.branches import MAIN
from nosync.lsm.platform.nearest import named_stages
from nosync.lsm.platform.notebook import facts_html, rows_html
from nosync.lsm.visible import visible

_ROWS_SHOWN = 10


@dataclass(frozen=True)
class Explanation:
    """Why a key has its value: the value, and stage by stage the rows that led to it, back to the sources."""

    stage: str
    key: Mapping[str, Any]
    as_of: int
    value: pa.Table
    """The rows of the key as of the epoch."""
    steps: tuple[Lineage, ...]
    """The rows of each stage, from the stage itself back to the sources."""

    @property
    def inputs(self) -> dict[str, pa.Table]:
        """Returns the rows of each source that led to the value, with `_epoch`."""
        return {step.stage: step.rows for step in self.steps if step.kind == SOURCE}

    @property
    def exact(self) -> bool:
        """Says whether every row that is named did lead to the value."""
        return all(step.exact for step in self.steps)

    def _repr_html_(self) -> str:
        key = ", ".join(f"{name}={value}" for name, value in self.key.items())
        parts = [rows_html(self.value.column_names, [list(row.values()) for row in self.value.to_pylist()])]
        for step in self.steps:
            caption = f"{step.stage} ({step.kind}): {step.rows.num_rows:,} rows" + "".join(f"; {n}" for n in step.notes)
            shown = step.rows.slice(0, _ROWS_SHOWN).to_pylist()
            parts.append(rows_html(step.rows.column_names, [list(row.values()) for row in shown], caption))
        return facts_html(f"stage {self.stage} as of {self.as_of}", {"key": key, "exact": self.exact}, *parts)

    def __str__(self) -> str:
        key = ", ".join(f"{name}={value}" for name, value in self.key.items())
        lines = [f"stage {self.stage}, {key}, as of {self.as_of}: {_row(self.value)}"]
        for step in self.steps:
            epochs = sorted(set(step.rows.column(EPOCH_COLUMN).to_pylist()))
            at = f" of epochs {_ranges(epochs)}" if epochs else ""
            lines.append(f"  {step.stage:<16} {step.kind:<10} {step.rows.num_rows:,} rows{at}")
            lines += [f"    ! {note}" for note in step.notes]
        return "\n".join(map(visible, lines))


def _row(rows: pa.Table) -> str:
    found = rows.to_pylist()
    if not found:
        return "not there"
    return "; ".join(", ".join(f"{name}={value}" for name, value in row.items()) for row in found)


def _ranges(epochs: Sequence[int]) -> str:
    """`1-3, 7` for 1, 2, 3, 7."""
    parts: list[list[int]] = []
    for e in epochs:
        if parts and e == parts[-1][1] + 1:
            parts[-1][1] = e
        else:
            parts.append([e, e])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def explain(
    flow: BoundFlow,
    recorded: Recorded,
    stage: str,
    key: Mapping[str, Any],
    as_of: int | None,
    *,
    evaluate: Evaluate,
    branch: str = MAIN,
    progress: Callable[[int, int], None] | None = None,
) -> Explanation:
    """Finds the input rows that led to the value of a key of a stage as of an epoch (default: the last sealed one).

    `key`: the key's columns and values; of a stage without a key any columns, and of an aggregate over all rows none.
    `progress(stages done, of)`. Time and reads are proportional to the recorded history of the stages that lead to this
    one. Raises UnknownStageError, SchemaError for columns that are not there, NotAvailableError for an epoch that was
    not run.
    """
    bound = flow.stages.get(stage)
    if bound is None:
        raise UnknownStageError(f"no stage {stage!r} in {flow.name}; stages: {named_stages(flow.stages)}")
    last, first = recorded.last_sealed(branch), recorded.first_sealed(branch)
    if last is None or first is None or (as_of is not None and not first <= as_of <= last):
        raise NotAvailableError(
            f"cannot explain epoch {as_of}: " + ("none was run yet" if last is None else f"run are {first} to {last}")
        )
    t = last if as_of is None else as_of
    begun = recorded.replaced_from(stage, branch)
    if begun is not None and t < begun:
        raise NotAvailableError(
            f"stage {stage} began anew at epoch {begun}, with another key or other columns than as of epoch {t}: the flow of "
            "then explains it, on the branch that the line before is kept as"
        )
    wanted_key = _check_key(bound, key)
    walk = Walk(flow, recorded, branch, first, t, evaluate)
    steps = walk.back_from(bound, wanted_key, progress)
    state = recorded.read(stage, t, branch=branch) if bound.recorded else walk.rows_of(stage)
    value = state.filter(pa.array(matching(state, wanted_key, list(key))[0]))
    return Explanation(stage, dict(key), t, with_columns_of(value, bound.output), steps)


def _names(stage: BoundStage) -> list[str]:
    """Returns the columns that a key can have."""
    return [name for name in stage.key if name in stage.output.names] or list(stage.output.names)


def _check_key(stage: BoundStage, key: Mapping[str, Any]) -> pa.Table:
    if not isinstance(key, Mapping):
        raise InvalidInputError(
            f"stage {stage.name}: key is {key!r}, expected its columns and values: "
            f"{{{', '.join(f'{name!r}: ...' for name in stage.key or stage.output.names[:1])}}}"
        )
    if not key and stage.key[:1] == (ALL_ROWS,):
        return pa.table({ALL_ROWS: pa.array([0], ALL_ROWS_TYPE)})
    if not key:
        raise InvalidInputError(f"explain needs a key of stage {stage.name}: {', '.join(_names(stage))}")
    if stage.key and not {*key} <= {*stage.key} and {*key} <= {*stage.output.names}:
        raise InvalidInputError(
            f"explain needs the key of stage {stage.name}, {', '.join(stage.key)}; given are {', '.join(key)}: what led to "
            "a value is looked for by its key"
        )
    columns = {}
    for name, value in key.items():
        if name not in stage.output.names:
            raise SchemaError(f"stage {stage.name} has no column {name!r}; it has {', '.join(stage.output.names)}")
        type_ = stage.output.field(name).type
        try:
            columns[name] = pa.array([value], type_)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise SchemaError(f"stage {stage.name}: {name}={value!r} does not fit {type_}: {error}") from error
    return pa.table(columns)
