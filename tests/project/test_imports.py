"""What is imported when: processes that start often, or stay small, load only what they use."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import nosync

HEAVY = ("pandas", "pyspark", "grpc", "rocksdict", "nosync.job.job", "nosync.spark.session")


@pytest.mark.parametrize(
    ("statement", "loaded"),
    [
        ("import nosync", ()),
        ("from nosync.lsm.compaction.worker import main", ()),
        ("import nosync; nosync.Job", ("nosync.job.job",)),
        (
            "from nosync.lsm.platform.process import leave_out_pandas as do; do(); "
            "import numpy, pyarrow as pa; pa.array(numpy.ones(2))",
            (),
        ),
    ],
)
def test_only_what_is_used_is_loaded(statement: str, loaded: tuple[str, ...]) -> None:
    program = f"{statement}; import sys; print(*(name for name in {HEAVY} if name in sys.modules))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert set(loaded) <= set(found)
    assert loaded or not found


def test_commands_begin_without_what_only_jobs_need() -> None:
    program = "import nosync.cli, sys; print(*(name for name in ('pandas', 'pyspark', 'grpc') if name in sys.modules))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert found.split() == []


def test_every_public_name_is_where_it_is_said_to_be() -> None:
    assert {name for name in nosync.__all__ if getattr(nosync, name) is None} == set()
    assert set(nosync.__all__) <= set(dir(nosync))
    for module, names in nosync._HOMES.items():
        for name in names.split():
            assert getattr(nosync, name) is getattr(importlib.import_module(module), name)
            assert name in nosync.__all__
    with pytest.raises(AttributeError, match="module 'nosync' has no attribute 'Jobb'"):
        nosync.Jobb  # type: ignore[attr-defined] # noqa: B018
