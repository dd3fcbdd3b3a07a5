"""What NumPy is told of this machine's processor, in the Python processes that are started for its sake.

On AMD's Zen 4 NumPy sorts faster with AVX2 than with AVX-512: its AVX-512 sorts store compressed vectors to memory, which
that processor does in microcode (numpy/x86-simd-sort, issue 6). NumPy chooses when it is imported, so that only a process
that starts later can be told.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import numpy as np

_CPUINFO = Path("/proc/cpuinfo")
_DISABLE = "NPY_DISABLE_CPU_FEATURES"
_ZEN_3_AND_4 = "25"
"""AMD's number for the family of both; of them, Zen 4 has AVX-512."""


@functools.cache
def numpy_environment(cpuinfo: Path = _CPUINFO) -> dict[str, str]:
    """Environment variables for Python processes on this machine: none, unless NumPy would sort slowly.

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
