"""The README's example runs as it stands."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

README = Path(__file__).parents[2] / "README.md"

pytestmark = pytest.mark.spark


def run_page(name: str, blocks: int, replace: Mapping[str, str] = MappingProxyType({})) -> None:
    """Runs the code of a page of docs/, which has so many blocks."""
    page = README.parent / "docs" / name
    found = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert len(found) == blocks
    code = "\n".join(found)
    for old, new in replace.items():
        code = code.replace(old, new)
    exec(compile(code, str(page), "exec"), {"__name__": "page"})


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


def test_the_streaming_page(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "1.json").write_text('{"customer": "ann", "amount": 3}\n{"customer": "bob", "amount": 4}\n')
    # The JVM of the test session was started in another directory.
    run_page("streaming.md", 4, {f'"{name}"': repr(str(tmp_path / name)) for name in ("in/", "checkpoint/", "state/")})
    printed = capsys.readouterr().out
    assert "|     ann|     1|    3|" in printed
    assert printed.count("insert") == 2
    assert (tmp_path / "out" / "epoch=0").is_dir()


def test_the_operators_page(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_page("operators.md", 7)
    printed = capsys.readouterr().out
    assert "|plain|        1|" in printed
    assert "| gold|        1|" in printed
    assert "|Oslo| 60.0|" in printed
    assert [node for node in "abc" if f"|   {node}|" in printed] == list("abc")


def test_the_tutorial(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_page("tutorial.md", 4)
    printed = capsys.readouterr().out
    assert "replays 6 epochs, 25 to 30" in printed
    assert "rank_was" in printed
    assert "JFK, carrier=HA, as of 21" in printed
    assert "keys changed" in printed


def test_the_what_if_page(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_page("what-if.md", 5)
    printed = capsys.readouterr().out
    assert "replays 2 epochs, 1 to 2" in printed
    assert "flights          source     2 rows of epochs 0-1" in printed
    assert "|   JFK|changed|        3|        2|  33.0|   2.0|" in printed
    assert "they differ from epoch 1 on" in printed
    assert "|   EWR|      1| 7.0|" in printed
