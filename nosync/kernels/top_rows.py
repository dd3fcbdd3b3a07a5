"""The first rows of each partition: those whose rank is at most a number, as `ORDER BY ... LIMIT` and `WHERE rank <= 3` ask.

Of a partition only these are recorded, so they are known when other rows come and go. Mostly they, and the changes, say
what the first rows are now; then no other row of the partition is read. Not so where some of them went, and too few are
left: then one comes up of which only the whole partition knows. The idea is that of a top-k with a threshold, as in
Yi et al., *Efficient Maintenance of Materialized Top-k Views* (ICDE 2003), without their reserve of more rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from nosync.kernels.joins import distinct
from nosync.kernels.over_partition import OverPartition, Partitions
from nosync.kernels.own_function import OwnFunction
from nosync.lsm.columnar.columns import Bools, Indices
from nosync.lsm.columnar.contents import content_hash
from nosync.lsm.columnar.hashing import hash32

RANKS = ("row_number", "rank", "dense_rank")
"""The functions that grow with the place of a row, by which its first rows can be told."""
_OF_ROWS_BEFORE = ("row_number", "rank")
"""Those that also say that there are at least so many rows before one, of which the first rows follow."""


@dataclass(frozen=True)
class TopRows(OwnFunction):
    """A function of rows of whole partitions, which adds columns, and leaves the rows whose `rank` is at most `most`."""

    over: OverPartition
    rank: str
    most: int

    def __call__(self, rows: pa.Table) -> pa.Table:
        made = self.over(rows)
        return made.filter(pc.less_equal(made.column(self.rank), self.most))

    @property
    def is_known_by_first_rows(self) -> bool:
        """Returns whether what it makes of a partition's first rows is what it makes of all of them."""
        if self.over.drops:
            return False  # a column that they are ordered by is not recorded
        return all(one.function in _OF_ROWS_BEFORE for one in self.over.columns)

    def first_rows(
        self, rows: pa.Table, partition: Indices, weights: npt.NDArray[np.int64], recorded: int
    ) -> tuple[pa.Table, Bools]:
        """Returns rows with all those that are now among the first of their partition, and which partitions these are of; of
        another one none, for the rows given do not say.

        The first `recorded` of the rows given were the first ones before, and the others came or went, as their weights say.
        """
        content = content_hash(rows)
        ids = [pa.array(partition), pa.array(content)]
        first, group = distinct(ids, hash32(ids))
        was_first = np.bincount(group[:recorded], minlength=len(first))
        changed = np.bincount(group[recorded:], weights[recorded:], minlength=len(first)).astype(np.int64)
        there = np.maximum(was_first + changed, 0)  # below: a row went that was not among the first
        # Each different row once, in the order that equals have in a partition, then by place.
        in_order = np.lexsort((content[first], partition[first]))
        order = in_order[Partitions.of(rows.take(pa.array(first[in_order])), self.over.key, self.over.order).by_place]
        place, of = np.arange(len(order)), partition[first[order]]
        was_first, there = was_first[order], there[order]
        count = int(partition.max(initial=-1)) + 1
        # No row that is not given is before the last of those that were first.
        last = np.full(count, -1, dtype=np.int64)
        np.maximum.at(last, of[was_first > 0], place[was_first > 0])
        left = np.bincount(of, np.where(place <= last[of], there, 0), minlength=count)
        is_known = (np.bincount(of, was_first, minlength=count) < self.most) | (left >= self.most)
        kept = is_known[of]
        return rows.take(pa.array(np.repeat(first[order[kept]], there[kept]))), is_known
