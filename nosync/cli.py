"""The command line. Every command has `--json`; errors are one line, never a stack trace."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import pyarrow as pa
import pyarrow.csv
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

import nosync
from nosync.lsm.errors import InvalidInputError, NosyncError
from nosync.lsm.layer import Shard
from nosync.lsm.status import LayerStatus, StoreStatus
from nosync.lsm.store import Store

if TYPE_CHECKING:
    from nosync.demo import Demo, WhatIf

PLAIN_WIDTH = 140
"""Columns of output that goes to a file or a pipe, where there is no terminal to fit into."""
out = Console(highlight=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH)
err = Console(stderr=True, highlight=False)

STORE = click.argument("path", metavar="PATH", type=click.Path(path_type=Path))
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
MOST_ROWS_SHOWN = 50


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point of the command `nosync`."""
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    try:
        cli.main(args=None if arguments is None else list(arguments), prog_name="nosync", standalone_mode=False)
    except NosyncError as error:
        _fail(str(error), 1)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        _fail("interrupted", 130)
    except BrokenPipeError:
        sys.exit(0)


def _fail(message: str, code: int) -> None:
    err.print(f"[bold red]error:[/] {_escape(message)}", soft_wrap=True)
    sys.exit(code)


def _escape(text: str) -> str:
    return text.replace("[", r"\[")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="nosync")
def cli() -> None:
    """nosync: a coordination-free state store for streaming computations on Spark.

    A store is a directory. Every stage of a computation records what it changed at each epoch as an immutable
    layer; any epoch can be read again, and what is lost is recomputed.

    \b
    Start here:
      nosync demo                        a year of flights, damaged and recovered, in about a minute
      nosync status  demo/store          what is in a store, and how safe it is
      nosync get     demo/store delays --as-of 26
    """


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, default=str))


def _read_only(path: Path) -> Store:
    return nosync.open(path, read_only=True)


@contextmanager
def _progress(text: str, *, quiet: bool = False) -> Iterator[Callable[[int, int, str], None]]:
    """A bar on standard error: `advance(done, of, note)`."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
    )  # fmt: skip
    with Progress(*columns, console=err, transient=True, disable=quiet or not err.is_terminal) as bar:
        task = bar.add_task(text, total=None, note="")
        yield lambda done, of, note: bar.update(task, completed=done, total=of, note=note)


def _table(*columns: str) -> Table:
    """Columns whose name ends in > are right-aligned."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column.removesuffix(">"), justify="right" if column.endswith(">") else "left", overflow="fold")
    return table


def _size(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


# --- looking -----------------------------------------------------------------------------------------------------------


@cli.command()
@STORE
@JSON
def status(path: Path, as_json: bool) -> None:
    """Show what a store holds: safe point, history, stages, pins, and what is missing."""
    with _read_only(path) as store:
        found = store.status()
    if as_json:
        _print_json(dataclasses.asdict(found))
    else:
        _show_status(found)


def _show_status(s: StoreStatus) -> None:
    facts = _table("", "")
    facts.show_header = False
    facts.add_row("store", s.path)
    facts.add_row(
        "safe point", "none yet" if s.safe_point is None else f"{s.safe_point}  (everything up to it is durable)"
    )
    facts.add_row("last sealed", "none yet" if s.last_sealed is None else str(s.last_sealed))
    facts.add_row("readable from", str(s.since))
    facts.add_row("missing layers", str(s.missing) + ("  (recover() recomputes them)" if s.missing else ""))
    for name, t in s.pins.items():
        facts.add_row("pin", f"{name} at {t}")
    out.print(facts)
    out.print()
    table = _table("stage", "shards>", "layers>", "entries>", "size>", "recorded up to>")
    for name, stage in s.stages.items():
        table.add_row(
            name, str(stage["shards"]), str(stage["layers"]), f"{stage['rows']:,}", _size(stage["bytes"]),
            str(stage["upper"] - 1),
        )  # fmt: skip
    out.print(table if s.stages else "no stage recorded yet")
    for where, problem in s.problems.items():
        err.print(f"[red]problem:[/] {_escape(where)}: {_escape(problem)}")


@cli.command()
@STORE
@click.option("--stage", help="Only this stage.")
@JSON
def layers(path: Path, stage: str | None, as_json: bool) -> None:
    """List the layer files: which stage, shard and epochs each covers, its size, level and digest."""
    with _read_only(path) as store:
        if stage is not None:
            store.directory.fingerprint_of(stage)
        found = [layer for layer in store.layers() if stage is None or layer.stage == stage]
    if as_json:
        _print_json([dataclasses.asdict(layer) for layer in found])
    else:
        show_layers(found)


def show_layers(found: Sequence[LayerStatus]) -> None:
    table = _table("stage", "shard", "epochs>", "since>", "entries>", "size>", "level", "tree level>", "digest")
    for layer in found:
        shard, epochs = str(Shard(layer.shard, layer.shards)), _escape(f"[{layer.lower}, {layer.upper})")
        table.add_row(
            layer.stage, shard, epochs, str(layer.since), f"{layer.rows:,}", _size(layer.bytes), layer.level,
            str(layer.tree_level), layer.digest[:12],
        )  # fmt: skip
    out.print(table if found else "no layers")


@cli.command()
@STORE
@click.argument("stage")
@click.option("--as-of", type=int, help="The epoch whose state to read. [default: the last sealed one]")
@click.option("--key", "keys", multiple=True, metavar="COLUMN=VALUE",
              help="Only this key. Once for each key column, in order; the first ones alone select a prefix.")  # fmt: skip
@click.option("--columns", help="Columns to show, separated by commas.")
@click.option(
    "--limit", type=click.IntRange(min=0), help=f"Rows to show. [default: {MOST_ROWS_SHOWN} in a table, else all]"
)
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
@click.option("--branch", default="main", show_default=True, help="Which branch to read.")
@JSON
def get(
    path: Path, stage: str, as_of: int | None, keys: Sequence[str], columns: str | None, limit: int | None,
    as_csv: bool, branch: str, as_json: bool,
) -> None:  # fmt: skip
    """Read the state of STAGE as of any epoch, or a single key of it.

    \b
      nosync get state/ delays --as-of 26
      nosync get state/ delays --key origin=JFK --csv
    """
    with _read_only(path) as store:
        wanted = [column.strip() for column in columns.split(",")] if columns else None
        prefix = _parse_keys(store, stage, as_of, keys, branch)
        table = store.read(stage, as_of, columns=wanted, prefix=prefix, branch=branch)
    shown = table if limit is None else table.slice(0, limit)
    if as_json:
        _print_json(shown.to_pylist())
    elif as_csv:
        pyarrow.csv.write_csv(_flat(shown), sys.stdout.buffer)
    else:
        show_rows(shown.slice(0, limit or MOST_ROWS_SHOWN), table.num_rows)


def _parse_keys(store: Store, stage: str, as_of: int | None, keys: Sequence[str], branch: str) -> dict[str, Any] | None:
    if not keys:
        return None
    schema = store.schema(stage, as_of, branch=branch)
    prefix = {}
    for text in keys:
        name, equals, value = text.partition("=")
        if not equals:
            raise InvalidInputError(f"--key {text!r} is not COLUMN=VALUE")
        if name not in schema.names:
            raise InvalidInputError(f"--key: stage {stage} has no column {name!r}; it has {', '.join(schema.names)}")
        try:
            prefix[name] = pa.array([value]).cast(schema.field(name).type)[0].as_py()
        except pa.ArrowInvalid as error:
            raise InvalidInputError(f"--key {text!r}: {value!r} is not a {schema.field(name).type}: {error}") from error
    return prefix


def _flat(table: pa.Table) -> pa.Table:
    """CSV has no nested values: they become JSON text."""
    for i, f in enumerate(table.schema):
        if pa.types.is_nested(f.type):
            texts = [json.dumps(value, default=str) for value in table.column(i).to_pylist()]
            table = table.set_column(i, f.name, pa.array(texts))
    return table


def show_rows(rows: pa.Table, of: int) -> None:
    numeric = [
        pa.types.is_integer(f.type) or pa.types.is_floating(f.type) or pa.types.is_decimal(f.type) for f in rows.schema
    ]
    table = _table(*(f"{name}>" if right else name for name, right in zip(rows.column_names, numeric, strict=True)))
    for row in rows.to_pylist():
        table.add_row(*(_escape(_cell(value)) for value in row.values()))
    out.print(table)
    if rows.num_rows < of:
        out.print(f"... {of - rows.num_rows:,} more of {of:,} rows")


def _cell(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, float):
        return f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


@cli.command()
@STORE
@click.argument("stage")
@click.argument("a")
@click.argument("b")
@click.option("--as-of", type=int, help="The epoch to compare at. [default: the newest that both branches have]")
@click.option("--limit", type=click.IntRange(min=0), default=MOST_ROWS_SHOWN, show_default=True, help="Rows to show.")
@JSON
def diff(path: Path, stage: str, a: str, b: str, as_of: int | None, limit: int, as_json: bool) -> None:
    """Compare STAGE on branch A with the same stage on branch B: the keys whose rows differ.

    \b
      nosync diff state/ delays main no-weather --as-of 26
    """
    with _read_only(path) as store:
        table = store.diff(stage, a, b, as_of)
    if as_json:
        _print_json(table.to_pylist())
        return
    kinds = table.column("_diff").to_pylist()
    found = ", ".join(f"{kinds.count(kind):,} {text}" for kind, text in _DIFF_KINDS.items())
    out.print(f"{found} of stage {_escape(stage)}, {_escape(a)} (a) beside {_escape(b)} (b)")
    if table.num_rows:
        show_rows(table.slice(0, limit), table.num_rows)


_DIFF_KINDS = {"changed": "keys changed", "only_a": "only in a", "only_b": "only in b"}


@cli.command()
@STORE
@click.option("--delete", "name", help="Delete this branch, with the layers that nothing else needs.")
@JSON
def branch(path: Path, name: str | None, as_json: bool) -> None:
    """List the branches of a store, or delete one. Jobs make them: job.branch("name", at=26, replace={...}).

    \b
      nosync branch state/
      nosync branch state/ --delete no-weather
    """
    if name is not None:
        with nosync.open(path) as store:
            layers = store.delete_branch(name)
        if as_json:
            _print_json({"deleted": name, "layers": layers})
        else:
            out.print(f"deleted branch {_escape(name)} and {layers:,} layers")
        return
    with _read_only(path) as store:
        rows = [
            {"branch": n, "line": line.id, "from": line.parent, "at": line.at, "epoch": store.last_sealed(n),
             "other_code": ", ".join(line.changed)}
            for n, line in store.branches().items()
        ]  # fmt: skip
    if as_json:
        _print_json(rows)
        return
    table = _table("branch", "from", "at>", "epoch>", "stages with other code")
    for row in rows:
        shown = [row["branch"], row["from"] or "", row["at"], row["epoch"], row["other_code"]]
        table.add_row(*(_escape("" if cell is None else str(cell)) for cell in shown))
    out.print(table)


@cli.command()
@STORE
@JSON
def verify(path: Path, as_json: bool) -> None:
    """Check every byte of every file against its digest. Exits 1 where something is wrong."""
    with _read_only(path) as store, _progress("verifying", quiet=as_json) as advance:
        report = store.verify(lambda done, of: advance(done, of, ""))
    if as_json:
        _print_json(dataclasses.asdict(report))
    else:
        out.print(f"{report.layers} layers ({_size(report.bytes)}) and {report.manifests} manifests are whole")
        for error in report.errors:
            err.print(f"[red]bad:[/] {_escape(error)}", soft_wrap=True)
    if not report.ok:
        sys.exit(1)


# --- changing ---------------------------------------------------------------------------------------------------------


@cli.command()
@STORE
@click.option("--stage", help="Only this stage.")
@click.option("--retain", type=click.IntRange(min=0), help="First let go of history older than this many epochs.")
@JSON
def compact(path: Path, stage: str | None, retain: int | None, as_json: bool) -> None:
    """Merge every trace into one layer now. No read at a retained epoch changes."""
    _read_only(path).close()  # a missing store is an error here, not a new store
    # No background merges: what is counted below is then what this command did.
    with nosync.open(path, retain=retain, settings=nosync.StoreSettings(merge=False)) as store:
        before = store.status()
        with _progress("merging", quiet=as_json) as advance:
            total = sum(s["shards"] for s in before.stages.values())
            merges = store.compact(stage, lambda done: advance(done, max(total, done), ""))
        after = store.status()
    sizes = {when: sum(s["bytes"] for s in x.stages.values()) for when, x in (("before", before), ("after", after))}
    counts = {when: sum(s["layers"] for s in x.stages.values()) for when, x in (("before", before), ("after", after))}
    if as_json:
        _print_json({"merges": merges, "bytes": sizes, "layers": counts})
    else:
        out.print(
            f"{merges} merges: {counts['before']} layers ({_size(sizes['before'])}) "
            f"-> {counts['after']} layers ({_size(sizes['after'])})"
        )


@cli.command()
@STORE
@click.argument("name", required=False)
@click.argument("epoch", type=int, required=False)
@click.option("--remove", is_flag=True, help="Remove the pin NAME.")
@JSON
def pin(path: Path, name: str | None, epoch: int | None, remove: bool, as_json: bool) -> None:
    """Hold EPOCH readable under NAME, whatever retain= says; or list the pins.

    \b
      nosync pin state/                       list
      nosync pin state/ before-upgrade 7      hold epoch 7
      nosync pin state/ before-upgrade --remove
    """
    if name is None:
        with _read_only(path) as store:
            pins = store.pins()
    else:
        if remove == (epoch is not None):
            raise click.UsageError("give an EPOCH to hold, or --remove")
        _read_only(path).close()
        with nosync.open(path) as store:
            if epoch is None:
                store.unpin(name)
            else:
                store.pin(name, epoch)
            pins = store.pins()
    if as_json:
        _print_json(pins)
        return
    table = _table("pin", "epoch>")
    for pinned, t in pins.items():
        table.add_row(pinned, str(t))
    out.print(table if pins else "no pins")


# --- demo -------------------------------------------------------------------------------------------------------------


@cli.command()
@click.option(
    "--by", type=click.Choice(["week", "day"]), default="week", show_default=True, help="One epoch per week or day."
)
@click.option("--out", "directory", type=click.Path(path_type=Path), default=Path("nosync-demo"), show_default=True,
              help="Where to keep the store, delays.csv and trend.png.")  # fmt: skip
@click.option("--cores", type=click.IntRange(min=1), help="Cores for Spark. [default: all]")
@click.option("--what-if", is_flag=True, help="Then branch off at 1 July without flights in bad weather, and compare.")
@JSON
def demo(by: str, directory: Path, cores: int | None, what_if: bool, as_json: bool) -> None:
    """Run a year of real flights through Spark, damage the store, and watch it recover.

    Needs the extra `demo` (pip install 'nosync[demo]') and a Java 17+ runtime.
    """
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
        with _progress(f"one epoch per {by}", quiet=as_json) as advance:
            show = _show_nothing if as_json else _show_demo_part
            result = run_demo(spark, directory, by, advance, show, what_if=what_if)
    finally:
        spark.stop()
    if as_json:
        _print_json(dataclasses.asdict(result))
    else:
        out.print(
            f"\n{result.epochs} epochs, {result.rows:,} rows, {result.seconds_per_epoch:.2f} s an epoch, of which recording "
            f"{result.record_ms_per_epoch:.1f} ms of task time"
        )
        out.print(f"kept: {result.delays}, {result.plot}, {result.store}")
        command = "nosync" if shutil.which("nosync") else sys.argv[0]  # as it can be typed here
        out.print(f"try:  {command} get {result.store} delays --as-of 10")
        out.print(f"      {command} layers {result.store}")
    if not result.identical:
        _fail("the recovered state differs from the one before", 1)


def _show_nothing(part: str, what: Any) -> None:
    """For --json, which prints the result only."""


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
        show_layers(what)
    elif part == "recovery":
        out.print("\n[bold]Recovering[/]")
        out.print(_escape(str(what)))
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
    out.print("the worst of the main line (a), beside the branch (b):")
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
    table = _table("stage", "layer files>", "tree levels", "epochs in the oldest>", "entries>", "size>", "level")
    for stage in dict.fromkeys(layer.stage for layer in found):
        mine = [layer for layer in found if layer.stage == stage]
        oldest = min(mine, key=lambda layer: (layer.shard, int(layer.lower)))
        levels = sorted({layer.tree_level for layer in mine})
        table.add_row(
            stage, str(len(mine)), " ".join(map(str, levels)), str(int(oldest.upper) - int(oldest.lower)),
            f"{sum(layer.rows for layer in mine):,}", _size(sum(layer.bytes for layer in mine)),
            " ".join(sorted({layer.level for layer in mine})),
        )  # fmt: skip
    out.print(table)


if __name__ == "__main__":
    main()
