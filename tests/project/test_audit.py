"""Packages with known holes: none is admitted, and `make audit` finds one that is installed."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", ROOT / "tools" / "audit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_installed_is_refused_by_nobody(audit: ModuleType) -> None:
    assert audit.refused_among(audit.installed()) == []
    assert "pyarrow" in audit.installed()


@pytest.mark.parametrize(
    ("name", "version", "cve"),
    [
        ("pyarrow", "23.0.0", "CVE-2026-25087"), ("pyarrow", "18.0.0", "CVE-2026-25087"), ("pyarrow", "14.0.0", "CVE-2023-47248"),
        ("cryptography", "46.0.4", "CVE-2026-26007"), ("pyarrow", "22.0.0rc1", "CVE-2026-25087"),
    ],
)  # fmt: skip
def test_a_version_with_a_hole_is_named(audit: ModuleType, name: str, version: str, cve: str) -> None:
    assert any(cve in line for line in audit.refused_among({name: version}))
    assert audit.refused_among({name: "99.0"}) == []


def test_the_metadata_admit_no_version_that_is_refused(audit: ModuleType) -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        said = tomllib.load(file)
    wanted = [*said["project"]["dependencies"], *said["build-system"]["requires"]]
    for extra in ("daemon", "spark", "report"):
        wanted += said["project"]["optional-dependencies"][extra]
    assert audit.admitted(wanted) == []
    assert len(audit.admitted(["pyarrow>=18,<27", "pyarrow", "blake3"])) == 2


def program(tmp_path: Path, text: str, code: int = 0) -> str:
    path = tmp_path / "pip-audit"
    path.write_text(f"#!{sys.executable}\nimport sys\nsys.stdout.write({text!r})\nsys.exit({code})\n")
    path.chmod(0o755)
    return str(path)


def test_what_pip_audit_says(audit: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hole = {"id": "PYSEC-1", "fix_versions": ["2"]}
    packages = [{"name": "a", "version": "1", "vulns": [hole]}, {"name": "b", "version": "1", "vulns": []}]
    assert audit.main(["--pip-audit", program(tmp_path, json.dumps({"dependencies": packages}), 1)]) == 1
    assert "a 1: PYSEC-1, mended in 2" in capsys.readouterr().out
    packages = [{"name": "b", "version": "1", "vulns": []}]
    assert audit.main(["--pip-audit", program(tmp_path, json.dumps({"dependencies": packages}))]) == 0
    assert "looked at 1 packages" in capsys.readouterr().out


def test_that_pip_audit_saw_nothing_is_said(
    audit: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends with 0, and "no known vulnerabilities", where it reaches no data at all."""
    packages = [{"name": "b", "skip_reason": "not found"}, {"name": "nosync", "skip_reason": "not found"}]
    audit.main(["--pip-audit", program(tmp_path, json.dumps({"dependencies": packages}))])
    assert "has no data of 1 of 1 packages" in capsys.readouterr().out
    for text in ("", "no json", "[]", "{}"):
        audit.main(["--pip-audit", program(tmp_path, text)])
        assert "gave no answer" in capsys.readouterr().out
    audit.main(["--pip-audit", str(tmp_path / "nowhere")])
    assert "gave no answer" in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_a_release_has_a_bill_of_materials_without_our_tools() -> None:
    ran = subprocess.run(["make", "-n", "sbom"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "pip install --quiet --disable-pip-version-check '.[daemon,spark,report]'" in ran.stdout
    assert "cyclonedx-py environment" in ran.stdout
    assert "--of JSON" in ran.stdout
