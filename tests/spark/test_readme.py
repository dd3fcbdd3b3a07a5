"""The README's example runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

README = Path(__file__).parents[2] / "README.md"

pytestmark = pytest.mark.spark


def test_the_example(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert 15 <= len(code.splitlines()) <= 25
    monkeypatch.chdir(tmp_path)
    exec(compile(code, str(README), "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out
    assert "|   JFK|  1| 3.0|  3.0|" in printed
    assert "update_postimage" in printed
    assert "recomputed      0" in printed


def test_every_link_leads_somewhere() -> None:
    for page in [README, *(README.parent / "docs").glob("*.md"), README.parent / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
