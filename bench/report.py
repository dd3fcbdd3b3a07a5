"""`python -m bench.report`: writes docs/benchmarks.md, the pictures of docs/, and README's figures from bench/results."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt

from bench.harness import RESULTS
from bench.headlines import FIGURES, HEADLINES, WIDTH, machines, number, table, with_table

PAGE = Path("docs/benchmarks.md")
PICTURE = Path("docs/benchmarks.svg")
EPOCH_PICTURE = Path("docs/epoch.svg")
README = Path("README.md")
EPOCHS = (20_000, 500_000)
OPENING = f"""# Benchmarks

`python -m bench.report` writes this page from `bench/results`. Each figure names its command, `python -m bench NAME`.

![Rows a second of a keyed aggregation, beside other engines]({PICTURE.name})

"""
HOW = """
nosync and its baseline ran one after the other, on the same machine, in the same session. The goal is about the ratio.
Machines are shared and noisy, so compare ratios and not seconds: ratios of single runs moved by a tenth.

- **Measure it yourself.** `make bench` measures most of this in under 15 minutes, in fewer and smaller runs. It begins
  with what says most. No benchmark begins after 12 minutes (`MINUTES=12`), and those that were left out are named.
  `make bench-full` takes hours, and goes on where it was interrupted. `make bench-compare` says what became worse.
- **What is not met, and why**: [performance.md](performance.md).

## All headlines

"""
NOTES = """
- "On a file system in memory" is the same job there. It verifies and merges as well.
- The identity job moves as many rows through Spark and Python, and keeps nothing.
- Rates of sums are all rows over all seconds, until the rows of nosync are on disk. Every engine's state had all keys
  before.
- Memory is what processes have of their own. The sections below have beside it what is mapped from files, as layers
  are.
- Where two things were done by turns, the ratio is the median of pairs: recorded and not recorded, the identity job,
  moving the rows of Q3. So it need not be the ratio of the two figures beside it.
- Of the events of Q3 and Q8 92 % are bids, which nobody reads. Q8 and Q12 are aggregates by key and window start in
  every engine, and their state is not dropped.
- Flink reads its rows as CSV. Its rate is that of a long job less a short one.
- Nodes of a cluster are processes on one machine and disk. Hosts are network namespaces.

In the sections below, `n` says how often each was measured, nosync and the baseline, and `spread` is the interquartile
range over the median. Hosts are told apart by their kernel, and the code that was measured by its digest.

"""
COLOURS = {True: "#2e7d5b", False: "#b3541e", None: "#6b7280"}


def section(found: dict[str, Any]) -> str:
    machine, name = found["machine"], found["benchmark"]
    versions = ", ".join(f"{package} {version}" for package, version in machine["versions"].items())
    took = f"; took {found['took_s']} s at {found['scale']} scale" if "took_s" in found else ""
    when = f"; code {found['code']}" + (f" on {found['day']}" if "day" in found else "")
    said = (
        f"`python -m bench {name}` on {machine['cores']} cores ({machine['cpu']}), {machine['memory_gib']} GiB, "
        f"Linux {machine['kernel']}, Python {machine['python']}, {versions}; load before {found['load_before']:.2f}{took}{when}."
    )
    lines = [
        f"## {name}", "", textwrap.fill(said, WIDTH, break_on_hyphens=False), "",
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
    """Returns the figure of nosync, and that of the baseline where it has one of its own."""
    return " / ".join(format(value, format_) for value in (ours, theirs) if value is not None)


def draw(results: list[dict[str, Any]]) -> None:
    """Draws the ratios to other engines on a logarithmic scale. To the right of 1 nosync is faster."""
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


def draw_epoch(results: list[dict[str, Any]]) -> None:
    """Draws how long an epoch takes beside a job that only moves its rows, and who reads the rows of files."""
    known = {found["benchmark"]: found["results"] for found in results}
    matplotlib.use("svg")
    plt.rcParams["svg.hashsalt"] = "nosync"
    figure, (moved, scanned) = plt.subplots(1, 2, figsize=(8.5, 2.3), layout="constrained")
    for at, rows in enumerate(EPOCHS):
        kept = _one(known["engines_sums"], f"epochs of {rows:,} rows, 2,000,000 keys", "identity job")
        ours_ms, moving_ms = 1000 * rows / kept["value"], 1000 * rows / kept["baseline_value"]
        for y, who, of_epoch_ms, colour in (
            (at - 0.2, "nosync", ours_ms, COLOURS[True]), (at + 0.2, "moves the rows alone", moving_ms, COLOURS[None]),
        ):  # fmt: skip
            moved.barh(y, of_epoch_ms, height=0.36, color=colour)
            moved.text(of_epoch_ms + 4, y, f"{of_epoch_ms:.0f} ms: {who}", va="center", fontsize=9)
        read = _one(known["spark_scan"], f"epochs of {rows:,} rows in a Parquet file, 2 shards", "the JVM")
        for y, who, seconds, colour in (
            (at - 0.2, "tasks", read["value"], COLOURS[True]), (at + 0.2, "the JVM", read["baseline_value"], COLOURS[None]),
        ):  # fmt: skip
            scanned.barh(y, 1000 * seconds, height=0.36, color=colour)
            scanned.text(1000 * seconds + 4, y, f"{1000 * seconds:.0f} ms: {who}", va="center", fontsize=9)
    moved.set_yticks(range(len(EPOCHS)), [f"{rows:,} rows" for rows in EPOCHS])
    scanned.set_yticks(range(len(EPOCHS)), [""] * len(EPOCHS))
    moved.set_title("an epoch, and a job that keeps nothing", fontsize=9, loc="left")
    scanned.set_title("who reads the rows of a Parquet file", fontsize=9, loc="left")
    for axes, name in ((moved, "engines_sums"), (scanned, "spark_scan")):
        axes.margins(x=0.45)
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.set_xlabel(f"ms an epoch: {name}", fontsize=8)
    figure.savefig(EPOCH_PICTURE, metadata={"Date": None, "Creator": None})


def _one(results: list[dict[str, Any]], workload: str, baseline: str) -> dict[str, Any]:
    """Returns the result of a workload whose baseline begins so. Raises ValueError where there is not just one."""
    (found,) = (r for r in results if r["workload"] == workload and r["baseline"].startswith(baseline))
    return found


def page(results: list[dict[str, Any]]) -> str:
    """Returns docs/benchmarks.md: a picture, six figures, all headlines, and then a section for each benchmark."""
    opening = f"{OPENING}{table(results, FIGURES)}{HOW}{table(results, HEADLINES)}\n{machines(results)}{NOTES}"
    return opening + "\n".join(map(section, results))


def all_results() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]


def main() -> None:
    results = all_results()
    draw(results)
    draw_epoch(results)
    PAGE.write_text(page(results))
    README.write_text(with_table(README.read_text(), results))
    print(f"wrote {PAGE}, {PICTURE}, {EPOCH_PICTURE} and the figures of {README}")


if __name__ == "__main__":
    main()
