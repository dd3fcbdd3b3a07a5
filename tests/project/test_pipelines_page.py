"""docs/pipelines.md as its reader follows it: the files that it shows, and the commands, each as a process."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.spark

PAGE = Path(__file__).parents[2] / "docs" / "pipelines.md"


def ran(command: str, where: Path) -> str:
    name, *words = shlex.split(command)
    assert name == "nosync"
    found = subprocess.run(
        [sys.executable, "-m", "nosync.cli", *words],
        cwd=where, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert found.returncode == 0, f"{command}\n{found.stdout}{found.stderr}"
    assert "Traceback" not in found.stderr
    return found.stdout


@pytest.mark.long("make spark")
@pytest.mark.timeout(900)
def test_the_page_is_followed(tmp_path: Path) -> None:
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    text = {kind: block for kind, block in blocks if kind != "sh"}
    runs, reads, edits = (block.splitlines() for kind, block in blocks if kind == "sh")
    (tmp_path / "transformations").mkdir()
    (tmp_path / "spark-pipeline.yml").write_text(text["yaml"].replace("/tmp/shop-storage", f"{tmp_path}/storage"))
    (tmp_path / "transformations" / "orders.py").write_text(text["python"])
    (tmp_path / "transformations" / "totals.sql").write_text(text["sql"])
    for name in ("orders", "feed"):
        (tmp_path / "data" / name).mkdir(parents=True)
    (tmp_path / "data" / "items.json").write_text('{"item": "tea", "kind": "drink"}\n{"item": "ink", "kind": "tool"}\n')
    (tmp_path / "data" / "orders" / "1.json").write_text(
        '{"customer": "ann", "item": "tea", "amount": 5}\n{"customer": "bob", "item": "ink", "amount": 20}\n'
    )
    (tmp_path / "data" / "feed" / "1.json").write_text('{"customer": "ann", "city": "Rome", "op": "U", "at": 1}\n')

    plan, first, totals = (ran(command, tmp_path) for command in runs)
    assert re.search(r"totals +materialized view +orders +\d+ +transformations/totals.sql:1", plan)
    assert "has no epoch yet" in plan
    assert "epoch 0: " in first
    assert re.search(r"ann +5.0 +1\nbob +20.0 +1\n", totals)

    as_of, kinds, status = (ran(command, tmp_path) for command in reads)
    assert as_of.split("\n")[0].split() == ["customer", "total", "n"]
    assert re.search(r"drink +5.0\n", kinds)
    assert "totals" in status

    orders = tmp_path / "transformations" / "orders.py"
    orders.write_text(orders.read_text().replace("amount > 0", "amount > 8"))
    branch, strict, differs = (ran(command, tmp_path) for command in edits)
    assert "replayed" in branch
    assert strict.split()[3:] == ["bob", "20.0", "1"]
    assert "only_a" in differs
    live = ran(runs[1], tmp_path)
    assert re.search(r"begins anew +.*totals", live)
    assert "epoch 2: 0 rows" in live or "epoch 3: 0 rows" in live, "the edit is to be seen though nothing came"
    assert "nothing came" in ran(runs[1], tmp_path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("run nowhere/", "nowhere"),
        pytest.param("run . --as-of 3", "--branch", marks=pytest.mark.long),
        pytest.param("run . --branch a --shards 2", "--shards", marks=pytest.mark.long),
        pytest.param("run .", "neither", marks=pytest.mark.long),
        ("run . --branch a --store s", "spark-pipeline.yml"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, words: str, said: str) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "nosync.cli", *words.split()],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert found.returncode in (1, 2)
    assert found.stdout == ""
    assert said in found.stderr
    assert "Traceback" not in found.stderr
    assert len(found.stderr.splitlines()) <= 5
