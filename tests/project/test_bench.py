"""What compares benchmark results: worse is worse in the direction of the goal, and nothing else is reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench.__main__ import FIRST, NAMES, TUNING, all_of, main
from bench.compare import regressions
from bench.harness import MEASURED, Progress, Samples, is_busy, source_digest
from bench.headlines import BEGIN, END, FIGURES, HEADLINES, with_table
from bench.report import PAGE, README, all_results, page


def result(ratio: float | None, goal: str, workload: str = "w", unit: str = "rows/s") -> dict[str, Any]:
    return {"workload": workload, "engine": "nosync", "baseline": "other", "unit": unit, "ratio": ratio, "goal": goal}


@pytest.mark.parametrize(
    ("goal", "before", "now", "is_worse"),
    [
        (">= 5", 10.0, 8.5, False), (">= 5", 10.0, 8.0, True), (">= 5", 10.0, 20.0, False),
        ("<= 1.2", 1.0, 1.15, False), ("<= 1.2", 1.0, 1.25, True), ("<= 1.2", 1.0, 0.5, False),
        ("", 1.0, 9.0, False), (">= 5", None, 1.0, False),
    ],
)  # fmt: skip
def test_a_regression_is_a_ratio_that_is_worse(goal: str, before: float | None, now: float, is_worse: bool) -> None:
    found = regressions([result(now, goal)], [result(before, goal)])
    assert bool(found) == is_worse
    if is_worse:
        assert f"ratio {now:.3g}, committed {before:.3g}" in found[0]


def test_what_is_new_is_no_regression_and_what_is_gone_is_one() -> None:
    assert regressions([result(10.0, ">= 5"), result(0.1, ">= 5", "new")], [result(10.0, ">= 5")]) == []
    assert "not measured any more" in regressions([], [result(10.0, ">= 5")])[0]
    assert regressions([], [result(10.0, "")]) == []


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        ({"value": 0.99, "ratio": 2.0, "goal": "<= 1 ms"}, {"value": 8.9, "ratio": 2.0, "goal": "<= 1 ms"}, "value 8.9"),
        ({"value": 5.0, "ratio": None, "goal": "p50 <= 10"}, {"value": 9.0, "ratio": None, "goal": "p50 <= 10"}, "value 9"),
        ({"value": 1, "ratio": 1.1, "goal": "<= 1.2", "met": True}, {"value": 1, "ratio": 1.25, "goal": "<= 1.2", "met": False},
         "is not met any more"),
    ],
)  # fmt: skip
def test_values_and_goals_are_compared_as_well(before: dict[str, Any], now: dict[str, Any], message: str) -> None:
    found = regressions([{**result(1.0, ""), **now}], [{**result(1.0, ""), **before}])
    assert message in found[0]
    assert regressions([{**result(1.0, ""), **before}], [{**result(1.0, ""), **before}]) == []


def test_a_percentile_is_one_of_the_samples_and_not_always_the_last() -> None:
    samples = Samples([*range(1, 1001)])
    assert [samples.percentile(p) for p in (50, 99, 99.9, 100)] == [500, 990, 999, 1000]
    assert Samples([3.0]).percentile(50) == 3.0


def test_progress_that_was_cut_short_is_none(tmp_path: Path) -> None:
    state = tmp_path / "unfinished.json"
    state.write_text('{"scale": "full", "co')
    assert Progress("full", state).resume() == []


def test_every_committed_result_says_of_which_code_and_scale_it_is() -> None:
    for found in all_results():
        assert {"scale", "code", "took_s"} <= set(found), found["benchmark"]
        assert not is_busy(found["load_before"]), found["benchmark"]


def test_an_interrupted_run_goes_on_and_a_run_of_other_code_begins_anew(tmp_path: Path) -> None:
    state = tmp_path / "unfinished.json"
    assert Progress("full", state).resume() == []
    first = Progress("full", state)
    first.add("lsm_read")
    assert Progress("full", state).resume() == ["lsm_read"]
    assert Progress("short", state).resume() == []
    assert Progress("full", state, code="another").resume() == []
    first.finish()
    assert Progress("full", state).resume() == []


def test_the_code_that_is_measured_has_a_digest(tmp_path: Path) -> None:
    for directory in MEASURED:
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "a.py").write_text("1")
    before = source_digest(tmp_path)
    (tmp_path / "README.md").write_text("2")
    assert source_digest(tmp_path) == before
    (tmp_path / "lsm" / "a.py").write_text("2")
    assert source_digest(tmp_path) != before


def test_only_the_same_is_compared() -> None:
    before = [result(10.0, ">= 5"), result(0.1, "", unit="CPU s for 10^6 rows")]
    assert regressions([result(9.9, ">= 5"), result(0.1, "", unit="CPU s for 10^6 rows")], before) == []
    assert len(regressions([result(5.0, ">= 5")], before)) == 1


def test_the_readme_shows_what_was_measured() -> None:
    text = README.read_text()
    assert text == with_table(text, all_results()), "run `python -m bench.report`"
    assert [text.count(f"| {figure.text} |") for figure in FIGURES] == [1] * 6


def test_the_page_of_benchmarks_shows_all_that_was_measured() -> None:
    text = PAGE.read_text()
    assert text == page(all_results()), "run `python -m bench.report`"
    assert text.count(f"| {HEADLINES[0].text} |") == 1
    assert text.index("![") < text.index(FIGURES[0].text) < text.index(HEADLINES[0].text) < text.index("\n## engines_")


def test_a_headline_without_a_result_is_an_error() -> None:
    with pytest.raises(LookupError, match=r"0 results of engines_sums are those of '.*', expected one: run"):
        with_table(f"{BEGIN}{END}", [])
    with pytest.raises(LookupError, match="the page has no lines"):
        with_table("a page", all_results())


def test_a_run_of_all_begins_with_what_says_most_and_leaves_nothing_out() -> None:
    assert all_of("normal")[: len(FIRST)] == list(FIRST)
    assert sorted(all_of("normal")) == sorted(NAMES)
    assert set(all_of("short")) == set(NAMES) - TUNING


@pytest.mark.parametrize("is_first_begun", [False, True])
def test_what_time_was_too_short_for_is_named(monkeypatch: pytest.MonkeyPatch, is_first_begun: bool) -> None:
    """Also where another one fails: here the machine is busy."""
    clock_s = iter([0.0, 30.0] if is_first_begun else [0.0])
    monkeypatch.setattr("bench.__main__.time.perf_counter", lambda: next(clock_s, 61.0))
    monkeypatch.setattr("bench.__main__.load_before", lambda: 2.0)
    done = CliRunner().invoke(main, ["--scale", "short", "--minutes", "1", "lsm_read", "lsm_merge"])
    assert done.exit_code == is_first_begun
    left_out = "lsm_merge" if is_first_begun else "lsm_read lsm_merge"
    assert f"time was up before these: python -m bench --scale short {left_out}\n" in done.output
    assert ("not measured, for the reasons above: lsm_read" in done.output) == is_first_begun
