"""`python -m bench [NAME ...]`: runs benchmarks, prints their results, and keeps them in bench/results/."""

from __future__ import annotations

import importlib
import sys
import time
import traceback
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from bench.harness import Progress, Result, is_busy, load_before, write

NAMES = tuple(sorted(p.stem for p in Path(__file__).parent.glob("[a-z]*_*.py")))
SCALES = ("short", "normal", "full")
FIRST = (
    "spark_epochs", "recovery_protocols", "lsm_publish", "lsm_merge", "engines_sums", "takeover_hosts", "engines_nexmark",
)  # fmt: skip
"""What says most, where time may be up before all are done, and of that first what wants a disk that nobody just removed many
files from.
"""
TUNING = frozenset({"spark_session", "spark_handover", "spark_exchange", "spark_scan"})
"""What single settings of Spark give, and ways to hand rows over: not in short runs of all."""


def show(name: str, results: list[Result]) -> None:
    table = Table(title=name, title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column, justify in (
        ("workload", "left"), ("engine", "left"), ("value", "right"), ("unit", "left"), ("baseline", "left"),
        ("its value", "right"), ("ratio", "right"), ("goal", "left"), ("met", "left"),
    ):  # fmt: skip
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for r in results:
        table.add_row(
            r.workload, r.engine, _number(r.value), r.unit, r.baseline, _number(r.baseline_value), _number(r.ratio),
            r.goal, "" if r.met is None else "yes" if r.met else "NO",
        )  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 180).print(table)


def all_of(scale: str) -> list[str]:
    """The benchmarks that a run of all has, in its order."""
    names = [name for name in NAMES if scale != "short" or name not in TUNING]
    return sorted(names, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name))


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


@click.command(epilog=f"NAMES: {', '.join(NAMES)}.")
@click.argument("names", nargs=-1, type=click.Choice(NAMES), metavar="[NAME]...")
@click.option(
    "--scale",
    type=click.Choice(SCALES),
    default="normal",
    show_default=True,
    help="How many and how large the runs are.",
)
@click.option("--busy-ok", is_flag=True, help="Measure even when the machine is doing something else.")
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    help="Begin no other benchmark after that; what is left out is named.",
)
@click.option("--resume", is_flag=True, help="Remember what is done; go on where such a run was interrupted.")
def main(names: tuple[str, ...], scale: str, busy_ok: bool, minutes: float | None, resume: bool) -> None:
    """Run the benchmarks NAMES (all by default), each beside its baseline in the same run.

    Short runs of all leave out what single settings of Spark give, and ways to hand rows over.
    """
    until = float("inf") if minutes is None else time.perf_counter() + 60 * minutes
    progress = Progress(scale)
    done = progress.resume() if resume else []
    if done:
        print(f"done before: {', '.join(done)}")
    failed: list[str] = []
    left_out: list[str] = []
    for name in [name for name in names or all_of(scale) if name not in done]:
        if time.perf_counter() > until:
            left_out.append(name)
            continue
        load = load_before()
        if is_busy(load) and not busy_ok:
            print(f"{name}: something else takes {load:.1f} cores of this machine: figures would mislead (--busy-ok)")
            failed.append(name)
            continue
        began = time.perf_counter()
        results: list[Result] = []
        try:
            results.extend(importlib.import_module(f"bench.{name}").run(scale))
        except Exception:  # noqa: BLE001 - what is wrong is shown, and the others are wanted
            failed.append(name)
            traceback.print_exc()
        finally:
            show(name, results)  # of one that fails, what it found until then
        if name in failed:
            continue
        took_s = time.perf_counter() - began
        print(f"kept in {write(name, results, load, scale, took_s)}; took {took_s:,.0f} s")
        if resume:
            progress.add(name)
    if left_out:
        print(f"time was up before these: python -m bench --scale {scale} {' '.join(left_out)}")
    if failed:
        raise click.ClickException(f"not measured, for the reasons above: {', '.join(failed)}")
    if resume and not names and not left_out:
        progress.finish()


if __name__ == "__main__":
    main()
