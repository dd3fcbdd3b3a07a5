"""Where in a block's sorted hashes others belong, in a step or two each.

Hashes are spread evenly, so buckets of a range each hold about one. For many hashes at once the bucket's end and a step
back from it take less time than a binary search (`python -m bench lsm_read`).
"""

from __future__ import annotations

import numpy as np

from nosync.lsm.columnar.columns import Indices
from nosync.lsm.columnar.hashing import U32

_STEPS = 8
"""Where hashes are not spread, as with many versions of one key, the rest is left to binary search."""


class HashIndex:
    """Over sorted hashes, at least one."""

    def __init__(self, hashes: U32) -> None:
        self._hashes = hashes
        self._first, self._last = hashes[0], hashes[-1]
        span = int(self._last) - int(self._first) + 1
        self._shift = np.uint32(max(0, (span // len(hashes)).bit_length() - 1))
        buckets = (span - 1 >> int(self._shift)) + 1
        self._ends = np.cumsum(np.bincount(self._bucket_of(hashes), minlength=buckets), dtype=np.int32)

    def _bucket_of(self, hashes: U32) -> U32:
        bucket: U32 = (hashes - self._first) >> self._shift
        return bucket

    def last_at_most(self, wanted: U32) -> Indices:
        """Returns for each wanted hash the last row whose hash is at most that; -1 where all are larger."""
        inside = np.clip(wanted, self._first, self._last)
        at: Indices = np.take(self._ends, self._bucket_of(inside)).astype(np.int64) - 1
        ahead = np.flatnonzero(np.take(self._hashes, at) > inside)
        for _ in range(_STEPS):
            if not len(ahead):
                break
            back = np.take(at, ahead) - 1
            at[ahead] = back
            ahead = ahead[np.take(self._hashes, back) > np.take(inside, ahead)]
        at[ahead] = np.searchsorted(self._hashes, inside[ahead], side="right") - 1
        at[wanted < self._first] = -1
        return at
