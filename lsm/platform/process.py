"""Freed memory stays with processes that will want as much again at once.

glibc gives large arrays back to the kernel as soon as they are freed, and the next one of the size is mapped and zeroed page by
page. Where one column after the other is made and let go, as in a task or a merge, that is a seventh of the time
(`python -m bench task_parts`).
"""

from __future__ import annotations

import ctypes
import functools

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Of glibc's malloc.h."""
_KEPT_BYTES = 128 << 20
_MAPPED_BYTES = 32 << 20
"""Larger blocks still go back at once; the most that every version of glibc takes."""


@functools.cache
def keep_freed_memory() -> bool:
    """From now on this process keeps up to 128 MiB that it freed. False where the C library is not glibc: nothing changes."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)) and bool(mallopt(_MMAP_THRESHOLD, _MAPPED_BYTES))
