"""What a Python process of ours does for speed: it keeps freed memory, sorts as its processor likes, and leaves out
Pandas.

Freed memory stays with processes that will want as much again at once.

glibc gives large arrays back to the kernel as soon as they are freed, and the next one of the size is mapped and zeroed
page by page. Where one column after the other is made and freed, as in a task or a merge, that is a seventh of the
time (`python -m bench task_parts`).

What NumPy is told of this machine's processor, in the Python processes that are started for its sake.

On AMD's Zen 4 NumPy sorts faster with AVX2 than with AVX-512: its AVX-512 sorts store compressed vectors to memory,
which that processor does in microcode (numpy/x86-simd-sort, issue 6). NumPy chooses when it is imported, so that only a
process that starts later can be told.

Processes that run only our own code do without Pandas.

Arrow looks whether what it makes an array of is a Series, and imports Pandas for that where it is installed: a third of
a second, and memory that nothing else uses. Spark's workers and drivers run code of users, which may want it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path

import numpy as np

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Of glibc's malloc.h."""
_KEPT_BYTES = 128 << 20
_MAPPED_BYTES = 32 << 20
"""Larger blocks still go back at once; the most that every version of glibc takes."""


@functools.cache
def keep_freed_memory() -> bool:
    """From now on this process keeps up to 128 MiB that it freed. False where the C library is not glibc: nothing
    changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)) and bool(mallopt(_MMAP_THRESHOLD, _MAPPED_BYTES))


_CPUINFO = Path("/proc/cpuinfo")
_DISABLE = "NPY_DISABLE_CPU_FEATURES"
_ZEN_3_AND_4 = "25"
"""AMD's number for the family of both; of them, Zen 4 has AVX-512."""


@functools.cache
def numpy_environment(cpuinfo: Path = _CPUINFO) -> dict[str, str]:
    """Returns environment variables for Python processes on this machine: none, unless NumPy would sort slowly.

    Whoever has set `NPY_DISABLE_CPU_FEATURES` keeps it.
    """
    if _DISABLE in os.environ or not _is_zen_4(cpuinfo):
        return {}
    # Named differently before NumPy 2.4; NumPy leaves out what is empty.
    found = np.show_config(mode="dicts").get("SIMD Extensions", {}).get("found", [])
    wide = [name for name in found if name.startswith("AVX512") or name == "X86_V4"]
    return {_DISABLE: ",".join(wide)} if wide else {}


def _is_zen_4(cpuinfo: Path) -> bool:
    try:
        first, _, _ = cpuinfo.read_text().partition("\n\n")
    except OSError:
        return False  # not Linux, or hidden from us
    said = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}
    is_family = said.get("vendor_id") == "AuthenticAMD" and said.get("cpu family") == _ZEN_3_AND_4
    return is_family and "avx512f" in said.get("flags", "").split()


class _NoPandas(MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: object = None) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError("this process does without pandas", name=fullname)


def leave_out_pandas() -> None:
    """From now on `import pandas` fails in this process, as if it were not installed."""
    sys.meta_path.insert(0, _NoPandas())
