"""NumPy's slow sorts are avoided where the processor has them, and nowhere else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nosync.lsm.platform.process import numpy_environment

DISABLE = "NPY_DISABLE_CPU_FEATURES"
NEWER, OLDER = ["X86_V3", "X86_V4", "AVX512_ICL"], ["AVX2", "AVX512F", "AVX512_SKX"]


def _cpuinfo(path: Path, *, vendor: str = "AuthenticAMD", family: int = 25, flags: str = "sse avx2 avx512f") -> Path:
    one = (
        f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel name\t: any: name\nflags\t\t: {flags}\n"
    )
    path.write_text(f"{one}\n{one}\n")
    return path


@pytest.fixture(autouse=True)
def _of_a_wide_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DISABLE, raising=False)
    monkeypatch.setattr(np, "show_config", lambda mode: {"SIMD Extensions": {"found": NEWER}})


@pytest.mark.parametrize(("found", "disabled"), [(NEWER, "X86_V4,AVX512_ICL"), (OLDER, "AVX512F,AVX512_SKX")])
def test_zen_4(found: list[str], disabled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "show_config", lambda mode: {"SIMD Extensions": {"found": found}})
    assert numpy_environment(_cpuinfo(tmp_path / "cpuinfo")) == {DISABLE: disabled}


def test_others_are_left_as_they_are(tmp_path: Path) -> None:
    assert numpy_environment(_cpuinfo(tmp_path / "zen-3", flags="sse avx2")) == {}
    assert numpy_environment(_cpuinfo(tmp_path / "zen-5", family=26)) == {}
    assert numpy_environment(_cpuinfo(tmp_path / "intel", vendor="GenuineIntel")) == {}
    assert numpy_environment(tmp_path / "missing") == {}
    (tmp_path / "arm").write_text("processor\t: 0\nFeatures\t: fp asimd\n")
    assert numpy_environment(tmp_path / "arm") == {}


@pytest.mark.parametrize("said", [{}, {"SIMD Extensions": {"baseline": ["X86_V4"]}}])
def test_a_numpy_that_has_no_choice(said: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "show_config", lambda mode: said)
    assert numpy_environment(_cpuinfo(tmp_path / "cpuinfo")) == {}


def test_what_the_user_has_set_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DISABLE, "")
    assert numpy_environment(_cpuinfo(tmp_path / "cpuinfo")) == {}


def test_numpy_takes_what_it_is_told(tmp_path: Path) -> None:
    """With the names of this NumPy on this processor: it warns of a name that it does not know."""
    code = (
        "import os, sys, numpy; from pathlib import Path; from nosync.lsm.platform.process import numpy_environment; "
        "os.environ.update(numpy_environment(Path(sys.argv[1]))); "
        "os.execv(sys.executable, [sys.executable, '-W', 'error', '-c', 'import numpy; print(numpy.arange(3)[::-1].copy())'])"
    )
    command = [sys.executable, "-c", code, str(_cpuinfo(tmp_path / "cpuinfo"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[2 1 0]", "")
