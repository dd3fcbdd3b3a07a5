"""The demo and what it shows."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.markup import escape

from nosync.cli.app import cli
from nosync.cli.console import (
    JSON,
    GivenPath,
    fail,
    out,
    print_json,
    progress,
    show_layers,
    show_rows,
    size_text,
    table_of,
)
from nosync.lsm.errors import InvalidInputError, NosyncError
from nosync.lsm.store.store import Store

if TYPE_CHECKING:
    from nosync.demo import Demo, WhatIf


@cli.command()
@click.option(
    "--by", type=click.Choice(["month", "week", "day"]), default="week", show_default=True, help="How long an epoch is."
)
@click.option("--out", "directory", type=GivenPath(), default=Path("nosync-demo"), show_default=True,
              help="Where to keep the store, delays.csv and trend.png.")  # fmt: skip
@click.option("--cores", type=click.IntRange(min=1), help="Cores for Spark. [default: all]")
@click.option("--what-if", is_flag=True, help="Then branch off at 1 July without flights in bad weather, and compare.")
@click.option("--checkpoint", is_flag=True, help="Instead, keep the checkpoint of an ordinary query: its host is lost, it "
              "goes on from a peer, and is forked. Two minutes.")  # fmt: skip
@JSON
def demo(by: str, directory: Path, cores: int | None, what_if: bool, checkpoint: bool, as_json: bool) -> None:
    """Run a year of real flights through Spark, damage the store, and watch it recover.

    Needs the extra `demo` (pip install 'nosync[demo]') and a Java 17+ runtime.
    """
    if checkpoint:
        if what_if:
            raise click.UsageError("--checkpoint has a fork of its own: leave --what-if out")
        _demo_of_checkpoint(directory, by, as_json=as_json)
        return
    try:
        from nosync.demo import run_demo  # noqa: PLC0415 - only this command needs Spark
        from nosync.spark.session import local_session  # noqa: PLC0415
    except ImportError as error:
        raise NosyncError(f"the demo needs {error.name}: pip install 'nosync[demo]'") from error
    if (directory / "store").exists():
        raise InvalidInputError(f"{directory / 'store'} exists: choose another --out, or remove it first")
    if not as_json:
        out.print("Starting Spark ...")
    directory.mkdir(parents=True, exist_ok=True)
    spark = local_session(cores, "nosync-demo", log=directory / "spark.log")
    try:
        with progress(f"one epoch per {by}", quiet=as_json) as advance:
            show = _show_nothing if as_json else _show_demo_part
            result = run_demo(spark, directory, by, advance, show, what_if=what_if)
    finally:
        spark.stop()
    if as_json:
        print_json(dataclasses.asdict(result))
    else:
        out.print(
            f"\n{result.epochs} epochs, {result.rows:,} rows, {result.seconds_per_epoch:.2f} s an epoch, of which recording "
            f"{result.record_ms_per_epoch:.1f} ms of task time"
        )
        out.print(f"kept: {result.delays}, {result.plot}, {result.store}")
        beside = Path(sys.executable).with_name("nosync")  # where the environment is not activated
        command = "nosync" if shutil.which("nosync") or not beside.exists() else str(beside)
        out.print(f"try:  {command} get {result.store} delays --as-of 10")
        out.print(f"      {command} layers {result.store}")
    if not result.identical:
        fail("the recovered state differs from the one before", 1)


def _demo_of_checkpoint(directory: Path, by: str, *, as_json: bool) -> None:
    try:
        from nosync.checkpoint_demo import run_checkpoint_demo  # noqa: PLC0415 - only this command needs it
    except ImportError as error:
        raise NosyncError(f"the demo needs {error.name}: pip install 'nosync[demo,daemon]'") from error
    if not as_json:
        out.print(
            f"An ordinary Structured Streaming query over a year of flights, a {by} a batch, beside one of two daemons"
        )
    with progress(f"one batch per {by}", quiet=as_json) as advance:
        result = run_checkpoint_demo(directory, by, advance, _show_nothing if as_json else _show_checkpoint_part)
    if as_json:
        print_json(dataclasses.asdict(result))
    else:
        out.print(f"\n{result.batches} batches, {result.rows:,} rows, {result.seconds:.0f} s with all starts of Spark")
        out.print(f"kept: {result.plot}, {result.out}", soft_wrap=True)
        beside = Path(sys.executable).with_name("nosync")  # where the environment is not activated
        command = "nosync" if shutil.which("nosync") or not beside.exists() else str(beside)
        data = Path(result.out) / "n2" / "nosync"
        out.print(f"try:  {command} checkpoint status flights --store {data}", soft_wrap=True)
        out.print(f"      {command} checkpoint restore flights DIR --at 10 --store {data}", soft_wrap=True)
    if not (result.identical and result.fork_identical):
        fail("a batch has other rows than it should have", 1)


def _show_checkpoint_part(part: str, what: Any) -> None:
    if part == "lost":
        out.print(
            f"\n[bold]The host is lost[/]: query and daemon are killed, their disk is wiped. Committed {what.committed}, "
            f"safe {what.safe} (on {what.nodes} hosts)",
            soft_wrap=True,
        )
    elif part == "went_on":
        status, restore_ms, files = what
        out.print(
            f"[bold]It went on beside the other daemon[/] after batch {status.newest}: {files} files as hard links, "
            f"{restore_ms:.0f} ms",
            soft_wrap=True,
        )
    elif part == "identical":
        out.print(f"  every batch has the rows of a run without a fault: {'yes' if what else 'NO'}")
    elif part == "fork":
        at, mean, without, is_right = what
        out.print(f"[bold]A fork from batch {at} on, with other code[/]: flights in bad weather do not count")
        out.print(f"  mean delay over the year: {mean:.2f} minutes, in the fork {without:.2f}")
        out.print(f"  every batch of the fork is right: {'yes' if is_right else 'NO'}")


def _show_nothing(part: str, what: Any) -> None:
    """Shows nothing, for --json, which prints the result only."""


def _show_demo_part(part: str, what: Any) -> None:
    if part == "delays":
        t, demo = what
        _show_delays(t, demo)
    elif part == "layers":
        _show_layers_by_stage(what)
    elif part == "safe_point":
        out.print(f"\nsafe point: {what} (all layers of all epochs up to it are on disk)")
    elif part == "damage":
        out.print(f"\n[bold]Deleting {len(what)} layer files behind the store's back[/]")
        show_layers(what, [("main",)] * len(what))
    elif part == "recovery":
        out.print("\n[bold]Recovering[/]")
        out.print(escape(str(what)))
    elif part == "what_if":
        _show_what_if(*what)
    elif part == "identical":
        out.print(f"  identical       {'yes: the answers are the same as before, to the byte' if what else 'NO'}")


def _show_what_if(what_if: WhatIf, demo: Demo) -> None:
    out.print(f"\n[bold]What if flights in bad weather had not counted from the {demo.by} of 1 July on?[/]")
    out.print(f"branch {what_if.branch} made in {what_if.branch_ms:.0f} ms at epoch {what_if.at}")
    out.print(
        f"{what_if.epochs_replayed} epochs replayed in {what_if.replay_seconds:.1f} s: {what_if.layers_computed} layers "
        f"computed, {what_if.layers_shared} shared"
    )
    out.print(
        f"mean delay over the year: {what_if.mean_delay:.2f} minutes, "
        f"without bad weather {what_if.mean_delay_without_weather:.2f}"
    )
    ranking = demo.ranking()
    out.print("the worst of the main timeline (a), beside the branch (b):")
    show_rows(ranking.slice(0, 6), ranking.num_rows)


def _show_delays(t: int, demo: Demo) -> None:
    rows = demo.delays(t)
    when = "4 July" if t == demo.independence_day else "31 December"
    busiest = rows.sort_by([("n", "descending")]).slice(0, 6)
    out.print(f"\n[bold]delays as of epoch {t} ({demo.by} of {when})[/]: the busiest")
    show_rows(busiest, rows.num_rows)


def _show_layers_by_stage(store: Store) -> None:
    found = store.layers()
    out.print("\n[bold]layers[/]")
    table = table_of("stage", "layer files>", "tree levels", "epochs in the oldest>", "entries>", "size>", "level")
    for stage in dict.fromkeys(layer.stage for layer in found):
        mine = [layer for layer in found if layer.stage == stage]
        oldest = min(mine, key=lambda layer: (layer.shard, int(layer.lower)))
        levels = sorted({layer.tree_level for layer in mine})
        table.add_row(
            stage, str(len(mine)), " ".join(map(str, levels)), str(int(oldest.upper) - int(oldest.lower)),
            f"{sum(layer.rows for layer in mine):,}", size_text(sum(layer.bytes for layer in mine)),
            " ".join(sorted({layer.level for layer in mine})),
        )  # fmt: skip
    out.print(table)
