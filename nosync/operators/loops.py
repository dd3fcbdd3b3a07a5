"""Loops inside an epoch: the loop variable's operator, the phases of a fixpoint, and what is kept of its rounds.

The variable is a set of rows: those that `start` gives, and those that the body derives from it, round after round,
until nothing new comes. The body is monotone (map, filter, union, inner join): more rows in, never fewer out. Each row
keeps the number of its derivations.

Deletions need care: rows of a cycle derive each other, so their numbers never fall to zero although nothing else
supports them. So an epoch goes in phases (delete and rederive; Gupta, Mumick and Subrahmanian 1993):

    RETRACT  A row that loses any derivation leaves the set, and what was derived from it loses one, and so on. Rows
             that come are counted, but wait. The phase ends with a round in which no row leaves.
    TURN     Rows that have derivations left and are not in the set enter it: what supports them did not change.
    GROW     What follows from those enters, until a round brings nothing.

After RETRACT no row is left that lost any derivation, so none supports itself alone. Where nothing that enters the loop
can be taken back there is only GROW. A round r of epoch t has the timestamp (t, r); when the loop is done its rounds
are consolidated into the one layer of the epoch, and dropped.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nosync.flow.bound_stage import BoundStage
from nosync.flow.internal_columns import COUNT, LIVE
from nosync.kernels.groups import SUM, Groups
from nosync.lsm.columnar.columns import (
    CHANGE_TYPE_COLUMN,
    Bools,
    Indices,
    as_array,
    key_columns,
    rows_equal,
    take,
    take_batch,
)
from nosync.lsm.layers.merging import Rows
from nosync.lsm.layers.writer import arrange
from nosync.lsm.model.layer import LayerId
from nosync.lsm.model.timestamp import Time, pack
from nosync.lsm.trace.change_feed import DELETE, INSERT, Lookup, change_rows, first_of_keys
from nosync.lsm.trace.trace import Trace
from nosync.operators.base import (
    OperatorInput,
    OperatorOutput,
    as_changes,
    hash32_of,
    produce,
    rows_of_layer,
    stage_error,
    weights_of,
)

_HASH, _CAME, _LOST = "__hash", "__came", "__lost"


class Phase(enum.Enum):
    RETRACT = "retract"
    TURN = "turn"
    GROW = "grow"


def first_phase(*, growing: bool) -> Phase:
    """Returns the phase of an epoch's first round. `growing`: nothing that enters the loop can be taken back."""
    return Phase.GROW if growing else Phase.RETRACT


def next_phase(phase: Phase, round: int, changes: int) -> Phase | None:
    """Returns the phase of the round after `round`, in which the set changed by so many rows. None: the loop is done.

    What enters the loop beside the variable reaches it in round 1, so round 0 alone never ends a phase.
    """
    if phase is Phase.RETRACT:
        return Phase.TURN if round and not changes else Phase.RETRACT
    if not changes and (round or phase is Phase.TURN):
        return None
    return Phase.GROW


def apply_loop(given: OperatorInput) -> OperatorOutput:
    """Returns the layer of the variable after a round: numbers of derivations, and which rows are in the set."""
    stage, id = given.stage, given.id
    phase = Phase(given.phase)
    touched = _derivations(given)
    if phase is Phase.TURN:
        touched = pa.concat_tables([touched, _touched_before(given)])
    columns, all_hashes = key_columns(touched, stage.key, str(id)), as_array(touched.column(_HASH)).to_numpy()
    groups = Groups.of(columns, all_hashes)
    keys = pa.table([take(column, groups.first) for column in columns], names=list(stage.key))
    hashes = all_hashes[groups.first]
    came, lost = (groups.reduce(as_array(touched.column(name)), SUM).to_numpy() for name in (_CAME, _LOST))
    found = given.state.find(keys, hashes)
    before = np.zeros(len(hashes), dtype=np.int64)
    was_live: Bools = np.zeros(len(hashes), dtype=np.bool_)
    before[found.found] = found.data.column(COUNT).to_numpy()
    was_live[found.found] = _flags(found.data.column(LIVE))
    after = before + came - lost
    if (after < 0).any() or (phase is not Phase.RETRACT and lost.any()):
        raise stage_error(id, "the loop's body took back rows that it had not derived: it is not monotone")
    live = was_live & (lost == 0) if phase is Phase.RETRACT else after > 0
    table = keys.append_column(COUNT, pa.array(after)).append_column(LIVE, pa.array(live))
    return produce(stage, id, table, hashes, found, after == 0)


def _derivations(given: OperatorInput) -> pa.Table:
    """Returns the round's derivations, each with its row, the row's hash, and 1 in `came` or `lost`."""
    names = list(given.stage.key)
    parts = []
    for rows in map(as_changes, given.inputs):
        weights = weights_of(rows).to_numpy()
        part = rows.select(names).append_column(_HASH, pa.array(hash32_of(rows)))
        part = part.append_column(_CAME, pa.array((weights > 0).astype(np.int64)))
        parts.append(part.append_column(_LOST, pa.array((weights < 0).astype(np.int64))))
    return pa.concat_tables(parts)


def _touched_before(given: OperatorInput) -> pa.Table:
    """Returns the rows that earlier rounds of the epoch touched, without a derivation."""
    touched = given.trace(given.stage.name).rows_between(Time(pack(given.t) - 1), given.before)
    zeros = pa.array(np.zeros(len(touched.hashes), dtype=np.int64))
    table = pa.Table.from_batches([touched.data]).select(list(given.stage.key))
    return table.append_column(_HASH, pa.array(touched.hashes)).append_column(_CAME, zeros).append_column(_LOST, zeros)


# --- what the variable's consumers see --------------------------------------------------------------------------------


def loop_changes(rows: Rows, first_of_key: Bools, before: Lookup) -> pa.Table:
    """Returns the rows that entered and left the set, from entries in order of key and time, and the state before."""
    waits = ~_flags(rows.data.column(LIVE))
    was_live = _flags(before.data.column(LIVE))
    found = before.found.copy()
    found[np.flatnonzero(found)[~was_live]] = False
    seen = Rows(rows.data, rows.hashes, rows.times, rows.tombstones | waits)
    changes = change_rows(seen, first_of_key, Lookup(found, take_batch(before.data, np.flatnonzero(was_live))))
    # A row that stays, with another number of derivations, did not change.
    moved = pc.is_in(changes.column(CHANGE_TYPE_COLUMN), value_set=pa.array([INSERT, DELETE]))
    return changes.filter(moved)


def changes_of_round(output: OperatorOutput, stage: BoundStage, time: Time) -> pa.Table:
    """Returns the changes that a layer of the variable means to its consumers."""
    assert output.before is not None, "the variable is keyed"
    rows = rows_of_layer(output.layer, time)
    all_first = np.ones(len(rows.hashes), dtype=np.bool_)
    return loop_changes(rows, all_first, output.before).select(stage.rows_schema.names)


def recorded_changes(trace: Trace, stage: BoundStage, after: Time, until: Time) -> pa.Table:
    """Returns the same changes, read back: the net ones with `after < time <= until`, each row once."""
    return loop_changes(*_newest(trace, after, until)).select(stage.rows_schema.names)


def _newest(trace: Trace, after: Time, until: Time) -> tuple[Rows, Bools, Lookup]:
    """Returns the newest entry of each key in a range of times, and the state before it."""
    rows = trace.rows_between(after, until)
    first = first_of_keys(rows, len(trace.key))
    last = np.append(first[1:], True) if len(first) else first
    at = np.flatnonzero(last)
    rows = Rows(take_batch(rows.data, at), rows.hashes[at], rows.times[at], rows.tombstones[at])
    before = trace.lookup(
        [take(rows.data.column(i), np.arange(len(at))) for i in range(len(trace.key))], rows.hashes, after
    )
    return rows, np.ones(len(at), dtype=np.bool_), before


def consolidate(trace: Trace, stage: BoundStage, id: LayerId) -> OperatorOutput:
    """Returns the layer of a whole epoch from those of its rounds: what each key is in the end, where it is not what it
    was.
    """
    t = id.description.lower
    rows, _, before = _newest(trace, Time(t - 1), Time(id.description.upper - 1))
    has_before = before.found
    row_before = np.cumsum(has_before) - 1
    changed = ~rows.tombstones | has_before
    both = np.flatnonzero(~rows.tombstones & has_before)
    names = stage.schema.names
    data, old = rows.data.select(names), before.data.select(names)
    values, old_values = (rows.columns[len(stage.key) :] for rows in (data, old))
    changed[both[rows_equal(values, both, old_values, row_before[both])]] = False
    live, dead = np.flatnonzero(changed & ~rows.tombstones), np.flatnonzero(changed & rows.tombstones)
    layer = arrange(
        pa.Table.from_batches([take_batch(data, live)]),
        stage.key,
        whose=str(id),
        deletes=pa.Table.from_batches([take_batch(data.select(list(stage.key)), dead)]),
        hashes=np.concatenate([rows.hashes[live], rows.hashes[dead]]),
    )
    recorded = np.flatnonzero(changed)
    kept: Indices = row_before[recorded][has_before[recorded]]
    return OperatorOutput(layer, Lookup(has_before[recorded], take_batch(old, kept)))


def _flags(column: pa.Array) -> Bools:
    flags: Bools = column.fill_null(False).to_numpy(zero_copy_only=False)
    return flags


def rounds_done(counts: Sequence[int], *, growing: bool) -> Phase | None:
    """Returns the phase of the next round after rounds with these numbers of changes. None: the loop is done."""
    phase: Phase | None = first_phase(growing=growing)
    for round, changes in enumerate(counts):
        assert phase is not None, "a loop that is done has no more rounds"
        phase = next_phase(phase, round, changes)
    return phase
