"""Stages that begin anew with an epoch: the layer that leads from what they held to what all rows that are there give.

Pure functions over whole Arrow tables. `job.replay` decides which stages begin anew.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from nosync.flow.bound_stage import BoundStage
from nosync.flow.kinds import SOURCE
from nosync.flow.stage_options import JoinOptions, PerKeyOptions
from nosync.lsm.columnar.columns import CHANGE_TYPE_COLUMN, Bools, as_array, as_batch
from nosync.lsm.columnar.contents import net_counts
from nosync.lsm.columnar.hashing import HASH_BITS, hash32
from nosync.lsm.layers.writer import arrange
from nosync.lsm.model.layer import LayerId, Shard, TraceId
from nosync.lsm.trace.change_feed import DELETE, INSERT
from nosync.operators.base import OperatorOutput, produce_from, rows_of_layer, weights_of


def bootstrap_layer(
    stage: BoundStage, id: LayerId, whole: OperatorOutput, old: pa.Table, expired: Bools | None = None
) -> OperatorOutput:
    """Returns the layer that turns what a stage held before, `old`, into `whole`, which was computed from all rows that
    are there. `expired` says which of the old rows, if they go, expired.
    """
    if not stage.keyed:
        new = pa.Table.from_batches([whole.layer.batch]).select(stage.schema.names)
        return OperatorOutput(arrange(_log_layer(stage, new, old), (), whose=str(id)))
    rows, before = rows_of_layer(whole.layer, id.description.lower), as_batch(old)
    hashes = hash32([before.column(name) for name in _hashed_by(stage)])
    new = pa.Table.from_batches([rows.data]).select(stage.schema.names)
    return produce_from(stage, id, new, rows.hashes, before, hashes, nested_too=True, expired=expired)


def _log_layer(stage: BoundStage, new: pa.Table, old: pa.Table) -> pa.Table:
    """Returns what a log gets to have the rows `new`. What is given once is not taken back. Where rows otherwise only come
    and some are to go, the layer alone has a column that says which.
    """
    rows, is_new = pa.concat_tables([new, old]), np.repeat([1, -1], [new.num_rows, old.num_rows])
    is_changing = CHANGE_TYPE_COLUMN in stage.schema.names
    weights = is_new * weights_of(rows).to_numpy() if is_changing else is_new
    changes = net_changes(rows, weights)
    if stage.given_once:
        changes = changes.filter(pc.field(CHANGE_TYPE_COLUMN) == INSERT)
    only_come = pc.all(pc.equal(changes.column(CHANGE_TYPE_COLUMN), INSERT)).as_py() is not False
    if is_changing:
        return changes.select(stage.schema.names)
    return changes.drop_columns([CHANGE_TYPE_COLUMN]) if only_come else changes


def _hashed_by(stage: BoundStage) -> tuple[str, ...]:
    """Returns the columns of a keyed stage whose hash its rows are stored by."""
    if isinstance(stage.options, PerKeyOptions):
        return stage.options.on
    return stage.options.spec.on if isinstance(stage.options, JoinOptions) else stage.edge_key


def net_changes(rows: pa.Table, weights: npt.NDArray[np.int64]) -> pa.Table:
    """Returns what is left of rows that come and go, by their contents, in the order of their contents' hash.

    A row that came more often than it went is inserted, one that went more often is deleted, as often: `_change_type`, the
    last column, says so. `weights` has +1 or -1 for each row.
    """
    names = [name for name in rows.column_names if name != CHANGE_TYPE_COLUMN]
    rows = rows.select(names)
    first, net = net_counts(rows, weights)
    times = np.abs(net)
    left = rows.take(pa.array(np.repeat(first, times)))
    return left.append_column(CHANGE_TYPE_COLUMN, pc.if_else(pa.array(np.repeat(net < 0, times)), DELETE, INSERT))


def rows_of_shard(
    log: BoundStage, recorded: TraceId, mine: Shard, key_groups: int
) -> Callable[[pa.Table], pa.Table] | None:
    """Returns a function that takes the rows of the shard `mine` from those of a log that another shard recorded. None:
    it has none.

    Where columns place them, rows go to their shard by these. Where nothing does, and there were other numbers of shards,
    rows belong to no shard, and are dealt out.
    """
    if not (log.placed_by and log.is_placed_by_columns):
        if recorded.shard.count == mine.count:
            return _all_rows if recorded.shard == mine else None
        return _all_rows if recorded.shard.index % mine.count == mine.index else None
    is_same_place = log.placed_alike if log.kind == SOURCE else recorded.fingerprint == log.fingerprint
    theirs, ours = recorded.shard.groups(key_groups), mine.groups(key_groups)
    if is_same_place and (theirs.stop <= ours.start or ours.stop <= theirs.start):
        return None
    if is_same_place and recorded.shard.count == mine.count:
        return _all_rows

    def in_groups(rows: pa.Table) -> pa.Table:
        hashes = hash32([as_array(rows.column(name)) for name in log.placed_by]).astype(np.uint64)
        group = hashes * np.uint64(key_groups) >> np.uint64(HASH_BITS)
        return rows.filter(pa.array((group >= ours.start) & (group < ours.stop)))

    return in_groups


def _all_rows(rows: pa.Table) -> pa.Table:
    return rows
