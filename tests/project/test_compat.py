"""What the short suite on other versions runs on, read from the metadata."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.compat import run

ROOT = Path(__file__).parents[2]


def project() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        found: dict[str, Any] = tomllib.load(file)["project"]
    return found


def test_the_oldest_and_the_newest_of_the_metadata_are_tested() -> None:
    oldest, middle, newest = run.environments(
        {
            "name": "nosync",
            "requires-python": ">=3.11",
            "classifiers": [f"Programming Language :: Python :: {v}" for v in ("3", "3.9", "3.12", "3.13")],
            "dependencies": ["numpy>=2.0,<3"],
            "optional-dependencies": {
                "spark": ["pyspark<4.4,>=4.1"],
                "pipelines": ["nosync[spark]", "pyspark[pipelines]<4.4,>=4.1"],
                "dev": ["pytest>=8,<10", "ruff"],
            },
        }
    )
    assert oldest == run.Environment(
        "oldest", "3.11", ("numpy==2.0", "pyspark==4.1", "pyspark[pipelines]==4.1", "pytest<10,>=8")
    )
    assert middle == run.Environment(
        "spark-4.2", "3.13", ("numpy<3,>=2.0", "pyspark[pipelines]==4.2.*", "pytest<10,>=8")
    )
    assert newest == run.Environment(
        "newest", "3.13", ("numpy<3,>=2.0", "pyspark<4.4,>=4.1", "pyspark[pipelines]<4.4,>=4.1", "pytest<10,>=8")
    )


def test_releases_between() -> None:
    assert run.between(Requirement("pyspark>=4.1,<4.4")) == ["4.2"]
    assert run.between(Requirement("pyspark>=4.1,<4.3")) == []
    assert run.between(Requirement("pyspark>=4.0.1,<4.5")) == ["4.1", "4.2", "4.3"]
    assert run.between(Requirement("pyspark>=4.1,<5")) == [], "what the last one before 5 is nobody knows"


def test_a_requirement_without_a_lowest_release_is_refused() -> None:
    with pytest.raises(ValueError, match=r"numpy<3 has no lowest release, expected name>=release"):
        run.lowest(Requirement("numpy<3"))


def test_every_package_that_a_job_needs_has_a_lowest_release() -> None:
    oldest, *_, newest = run.environments(project())
    assert len(oldest.packages) == len(newest.packages)
    assert {Requirement(each).name for each in oldest.packages} >= {"pyspark", "pyarrow", "numpy", "pandas", "pytest"}
    assert Version(oldest.python) < Version(newest.python)


def test_pyarrow_is_one_that_reads_foreign_files_safely() -> None:
    """Releases before 23.0.1 have CVE-2026-25087."""
    (pyarrow,) = (Requirement(text) for text in project()["dependencies"] if text.startswith("pyarrow"))
    assert Version(run.lowest(pyarrow)) >= Version("23.0.1")
    assert Version(pa.__version__) in pyarrow.specifier


def test_a_python_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = []

    def make(environment: run.Environment, python: str, directory: Path) -> Path:
        made.append(python)
        raise run.subprocess.CalledProcessError(1, ["pip"])

    monkeypatch.setattr(run, "make", make)
    code, text = run.run_suite(run.Environment("newest", "3.99", ()), tmp_path)
    assert "no Python 3.99 on this machine: newest packages on" in text
    assert made == [sys.executable]
    assert (code, "cannot be made" in text) == (1, True)


def test_the_python_of_this_process_is_found() -> None:
    assert run.find_python(".".join(map(str, sys.version_info[:2]))) == sys.executable
    assert run.find_python("3.99") is None


def test_ci_runs_the_suite() -> None:
    assert "make compat" in (ROOT / ".ci" / "run").read_text()
    assert "tests.compat.run" in (ROOT / "Makefile").read_text()
