"""`python -m bench.report`: writes docs/benchmarks.md, with a picture, and README's table from what is in bench/results."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt

from bench.harness import RESULTS
from bench.headlines import number, with_table

PAGE = Path("docs/benchmarks.md")
PICTURE = Path("docs/benchmarks.svg")
README = Path("README.md")
HEADER = """# Benchmarks

Written by `python -m bench.report` from `bench/results`; each section comes from the command it names. Ours and the
baseline ran one after the other on the same machine in the same session; `ratio` is what the goal is about. Machines are
shared and noisy: compare ratios, not seconds. `n` says how often each was measured, ours and theirs, and `spread` is the
interquartile range over the median. Hosts are told apart by their kernel, and the code that was measured by its digest.
"""
COLOURS = {True: "#2e7d5b", False: "#b3541e", None: "#6b7280"}


def section(found: dict[str, Any]) -> str:
    machine, name = found["machine"], found["benchmark"]
    versions = ", ".join(f"{package} {version}" for package, version in machine["versions"].items())
    took = f"; took {found['took_s']} s at {found['scale']} scale" if "took_s" in found else ""
    when = f"; code {found['code']}" + (f" on {found['day']}" if "day" in found else "")
    lines = [
        f"## {name}", "", f"`python -m bench {name}` on {machine['cores']} cores ({machine['cpu']}), "
        f"{machine['memory_gib']} GiB, Linux {machine['kernel']}, Python {machine['python']}, {versions}; load before "
        f"{found['load_before']:.2f}{took}{when}.", "",
        "| workload | ours | | beside | | ratio | goal | met | n | spread |", "|---|---|--:|---|--:|--:|---|---|---|---|",
    ]  # fmt: skip
    for r in found["results"]:
        met = {True: "yes", False: "**no**", None: ""}[r["met"]]
        baseline = "" if r["baseline_value"] is None else f"{number(r['baseline_value'])} {r['unit']}"
        ratio = "" if r["ratio"] is None else f"{r['ratio']:.3g}"
        cells = (
            r["workload"], r["engine"], f"{number(r['value'])} {r['unit']}", r["baseline"], baseline, ratio, r["goal"], met,
            _both(r["repeats"], r.get("baseline_repeats"), "d"), _both(r["spread"], r.get("baseline_spread"), ".2f"),
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _both(ours: float | None, theirs: float | None, format_: str) -> str:
    """Of ours, and of the baseline where that was said for itself."""
    return " / ".join(format(value, format_) for value in (ours, theirs) if value is not None)


def draw(results: list[dict[str, Any]]) -> None:
    """The ratios to other engines, on a logarithmic scale: to the right of 1 ours is faster."""
    matplotlib.use("svg")
    plt.rcParams["svg.hashsalt"] = "nosync"
    sums = [r for found in results if found["benchmark"] == "engines_sums" for r in found["results"]]
    rows = [r for r in sums if r["unit"] == "rows/s"]
    labels = [textwrap.fill(f"{r['baseline']}; {r['workload']}", 52) for r in rows]
    ratios = [r["ratio"] for r in rows]
    figure, axes = plt.subplots(figsize=(8.5, 0.55 * len(rows) + 1.2), layout="constrained")
    axes.barh(labels, [ratio - 1 for ratio in ratios], left=1, height=0.6, color=[COLOURS[r["met"]] for r in rows])
    for row, ratio in enumerate(ratios):
        axes.text(max(ratio, 1) * 1.08, row, f"{ratio:.2g} x", va="center", fontsize=9)
    axes.axvline(1.0, color="#111827", linewidth=1)
    axes.set_xscale("log")
    axes.set_xticks([0.5, 1, 2, 5, 10, 20, 50], ["0.5", "1", "2", "5", "10", "20", "50"])
    axes.set_xlim(0.35, 1.8 * max(ratios))
    axes.minorticks_off()
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=8, length=0)
    axes.set_title("rows a second: nosync over the other (green: its goal is met)", fontsize=10, loc="right")
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(PICTURE, metadata={"Date": None, "Creator": None})


def all_results() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]


def main() -> None:
    results = all_results()
    draw(results)
    picture = f"![A keyed aggregation beside other engines]({PICTURE.name})\n"
    PAGE.write_text("\n".join([HEADER, picture, *map(section, results)]))
    README.write_text(with_table(README.read_text(), results))
    print(f"wrote {PAGE}, {PICTURE} and the table of {README}")


if __name__ == "__main__":
    main()
