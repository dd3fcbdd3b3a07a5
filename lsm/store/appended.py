"""What a store knows of the stages that are appended to directly: their columns, and which epoch comes next."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from nosync.lsm.columnar.columns import CHANGE_TYPE_COLUMN, EXPIRED_COLUMN, HASH_COLUMN, TOMBSTONE_COLUMN, joined_schema
from nosync.lsm.errors import HoleError, InvalidInputError, OutOfOrderError, SchemaError
from nosync.lsm.manifests.timelines import Timelines
from nosync.lsm.model.layer import Description, LayerId, TraceId
from nosync.lsm.model.timestamp import epoch_of
from nosync.lsm.store.direct import raw_begin, raw_layers, raw_traces_at
from nosync.lsm.trace.directory import LayerDirectory

BOOKKEEPING = frozenset({HASH_COLUMN, TOMBSTONE_COLUMN, EXPIRED_COLUMN})
"""Columns of a layer that its stage does not have."""

Shape = tuple[tuple[str, ...], pa.Schema]
"""The key and the columns of a stage."""


class Appended:
    """The appended stages of one directory, as this process found and wrote them."""

    def __init__(self, directory: LayerDirectory) -> None:
        self._directory = directory
        self._next: dict[TraceId, int] = {}
        self._shapes: dict[tuple[str, str], Shape] = {}  # by timeline and stage

    def check_order(self, timelines: Timelines, id: LayerId, whose: str) -> None:
        """Raises OutOfOrderError unless a layer is the next one of its trace, or recorded already."""
        t = epoch_of(id.description.lower)
        if self._next.get(id.trace) != t:
            available = self._directory.descriptions(id.trace)
            begin = raw_begin(timelines, id.trace)
            self._next[id.trace] = max((epoch_of(d.upper) for d in available), default=t if begin is None else begin)
            if any(d.lower <= id.description.lower < d.upper and d != id.description for d in available):
                raise OutOfOrderError(
                    f"{whose}: already recorded, and merged since; the next timestamp is {self._next[id.trace]}"
                )
            # Its first layer may be lost, and is given again: manifests say where it began.
            begins = [epoch_of(time) for time in (*(d.lower for d in available), *timelines.origins(id.trace))]
            first = min(begins, default=begin)
            if first is not None and t < first:
                raise OutOfOrderError(
                    f"{whose}: this trace begins with timestamp {first}, and is only ever gone on with; the next one is "
                    f"{self._next[id.trace]}"
                )
        expected = self._next[id.trace]
        if t > expected:
            raise OutOfOrderError(
                f"{whose}: the next timestamp of this trace is {expected}; record it first (empty rows if nothing changed)"
            )
        sealed = timelines.manifest(t)
        if sealed is not None and all(entry.id != id for entry in sealed.entries):
            raise OutOfOrderError(
                f"{whose}: timestamp {t} is sealed without this layer; sealed timestamps never change"
            )

    def check_not_lost(self, timelines: Timelines, id: LayerId, whose: str) -> None:
        """Raises HoleError for an epoch after those of a stage of which no layer is left: nothing says what columns it has."""
        before = [epoch_of(time) for time in timelines.origins(id.trace)]
        if before and timelines.manifest(epoch_of(id.description.lower)) is None:
            raise HoleError(
                f"{whose}: epochs from {min(before)} on list this stage, and no layer of it is left: bring its directory back, "
                "from a peer or a copy, or give its epochs again with the columns that they had",
                stage=id.trace.stage, shard=str(id.trace.shard), lower=str(min(before)), upper="?",
            )  # fmt: skip

    def schema_of_known(self, timelines: Timelines, id: LayerId) -> pa.Schema:
        """Returns the columns of a stage that has layers, or had some. Raises HoleError where none is left."""
        known = self.shape(timelines, id.trace.stage)
        if known is None:
            self.check_not_lost(timelines, id, f"stage {id.trace.stage} timestamp {epoch_of(id.description.lower)}")
        assert known is not None, "the trace, or the one that it goes on from, has layers"
        return known[1]

    def shape(self, timelines: Timelines, stage: str) -> Shape | None:
        """Returns the key and the columns of a stage on the main timeline; None for a new one."""
        at = (timelines.timeline().id, stage)
        if at not in self._shapes:
            for id, end in raw_layers(timelines, self._directory, stage):
                reader = self._directory.reader(id)
                before, schema = self._shapes.get(at), reader.schema_until(end)
                schema = schema if before is None else joined_schema(before[1], schema, str(id.trace))
                self._shapes[at] = (reader.info.key, schema)
        return self._shapes.get(at)

    def published(self, timeline: str, id: LayerId, shape: Shape) -> None:
        """A layer was recorded on a timeline, where its stage has these columns from then on."""
        self._shapes[timeline, id.trace.stage] = shape
        t = epoch_of(id.description.lower)
        self._next[id.trace] = max(t + 1, self._next.get(id.trace, 0))

    def layers_at(self, timelines: Timelines, t: int) -> tuple[list[LayerId], list[LayerId]]:
        """Returns the layers that all stages and shards known so far have at an epoch: what is recorded, and what is
        absent.
        """
        recorded: list[LayerId] = []
        absent: list[LayerId] = []
        for trace in raw_traces_at(timelines, self._directory, t):
            id = LayerId(trace, Description.of_epoch(t))
            if self._next.get(trace) == t + 1 and self._directory.env.exists(self._directory.path_of(id)):
                recorded.append(
                    id
                )  # as this process wrote it: listing what merges left takes the longer the more it is
                continue
            available = self._directory.descriptions(trace)
            if available and min(d.lower for d in available) > id.description.lower:
                continue  # the trace begins later
            covered = any(d.lower <= id.description.lower < d.upper for d in available)
            (recorded if covered else absent).append(id)
        return recorded, absent


def check_given(rows: object, whose: str) -> None:
    """Raises SchemaError for rows with a column that says what they change: only stages of jobs record such logs."""
    if isinstance(rows, pa.Table) and CHANGE_TYPE_COLUMN in rows.column_names:
        raise SchemaError(
            f"{whose}: column {CHANGE_TYPE_COLUMN!r} has a name that nosync uses itself: rename it. Rows that are changed or "
            "deleted by key go into a stage with a key, as rows= and deletes="
        )


def key_to_record(key: Sequence[str] | None, known: Shape | None, whose: str) -> tuple[str, ...]:
    """Returns the key with which rows are recorded, given what the caller said and what the stage has."""
    if key is not None and len(set(key)) != len(list(key)):
        raise InvalidInputError(f"{whose}: the key {list(key)} names a column twice")
    if key is None:
        if known is None:
            raise InvalidInputError(f"{whose}: the first append of a stage needs key=[...] (an empty list for a log)")
        key = known[0]
    if isinstance(key, str):
        raise InvalidInputError(f"{whose}: key is {key!r}, expected a list of column names: [{key!r}]")
    if known is not None and tuple(key) != known[0]:
        raise SchemaError(f"{whose}: the key is {list(key)}, but the stage was recorded with key {list(known[0])}")
    return tuple(key)
