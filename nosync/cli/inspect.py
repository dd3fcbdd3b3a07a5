"""Commands that look at a store and change nothing."""

from __future__ import annotations

import base64
import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pyarrow.csv
from rich.markup import escape
from rich.table import Table

import nosync
from nosync.cli.app import cli
from nosync.cli.console import (
    ALONE,
    JSON,
    MOST_ROWS_SHOWN,
    STORE,
    GivenPath,
    by_key,
    check_store,
    err,
    head,
    json_text,
    out,
    parse_keys,
    print_json,
    progress,
    read_only,
    rows_of,
    show_layers,
    show_rows,
    size_text,
    table_of,
)
from nosync.lsm.errors import InvalidInputError, NosyncError, StorageError
from nosync.lsm.manifests.branches import MAIN
from nosync.lsm.platform.paths import local_path
from nosync.lsm.status import StoreStatus, WindowStatus
from nosync.lsm.store.backup import backup as copy_store
from nosync.lsm.store.repair import Repair
from nosync.lsm.store.store import Store
from nosync.lsm.visible import visible


@cli.command()
@STORE
@click.option("--watch", is_flag=True, help="Show it again every second, until Ctrl-C.")
@JSON
def status(path: Path, watch: bool, as_json: bool) -> None:
    """Show what a store holds: safe point, history, stages, pins, branches, what is missing, and the peers of its daemon."""
    if watch and as_json:
        raise click.UsageError("--watch is for people: leave out --json")
    _show_now(path, as_json=as_json)
    while watch:
        time.sleep(1.0)
        out.clear()
        _show_now(path, as_json=False)


def _show_now(path: Path, *, as_json: bool) -> None:
    with read_only(path) as store:
        from nosync.job.watermarks import window_status  # noqa: PLC0415 - loads the operators, which a daemon does without

        found = dataclasses.replace(store.status(), windows=window_status(store))
        daemon = _daemon_of(store)
    if daemon is not None and "peers" in daemon:  # it knows on how many nodes everything is, and this process does not
        problems = found.problems | daemon.pop("problems")  # what is wrong with a store stands in one place
        found = dataclasses.replace(found, safe_point=daemon["safe_point"], problems=problems)
    if as_json:
        print_json(dataclasses.asdict(found) | ({} if daemon is None else {"daemon": daemon}))
        return
    _show_status(found)
    if daemon is not None:
        _show_daemon(daemon)


def _daemon_of(store: Store) -> dict[str, Any] | None:
    """What the daemon of a store says of itself and its peers; None where it has none."""
    try:
        from nosync.replication.client.remote_store import daemon_of  # noqa: PLC0415 - needs the extra `daemon`
    except ImportError:
        return None
    with daemon_of(store) as client:
        if client is None:
            return None
        address, node = client.address, client.node
        try:
            reply = client.status(timeout_s=2.0)
        except NosyncError as error:
            return {"node": node, "address": address, "error": str(error)}
    peers = [
        {"node": p.node, "address": p.address, "state": p.state, "behind_files": p.behind_files,
         "behind_bytes": p.behind_bytes, "silent_s": round(p.silent_s, 1), "why": p.why}
        for p in reply.peers
    ]  # fmt: skip
    safe = reply.safe_point if reply.HasField("safe_point") else None
    return {
        "node": reply.node, "address": address, "replicas": reply.replicas, "safe_point": safe,
        "lag_s": round(reply.lag_s, 1), "backlog_bytes": reply.backlog_bytes, "loaded": reply.loaded,
        "stages": [_stage_of(stage) for stage in reply.stages],
        "peers": peers, "problems": dict(reply.problems),
    }  # fmt: skip


def _stage_of(stage: Any) -> dict[str, Any]:
    epochs = {name: getattr(stage, name) if stage.HasField(name) else None for name in _EPOCHS}
    return {
        "stage": stage.stage,
        **epochs,
        "waiting_layers": stage.waiting_layers,
        "waiting_bytes": stage.waiting_bytes,
    }


_EPOCHS = ("complete", "durable", "replicated")


def _show_daemon(daemon: dict[str, Any]) -> None:
    out.print()
    if "error" in daemon:
        err.print(f"[red]daemon {escape(daemon['node'])}:[/] {escape(daemon['error'])}", soft_wrap=True)
        return
    where = escape(f"{daemon['node']} on {daemon['address']}")
    out.print(f"daemon {where}, keeps {daemon['replicas']} copies")
    if daemon["lag_s"]:
        out.print(f"an epoch has waited {daemon['lag_s']:.1f} s to be safe")
    if daemon["backlog_bytes"]:
        waits = ", so stages that can be computed again wait" if daemon["loaded"] else ""
        out.print(f"{size_text(daemon['backlog_bytes'])} that peers have is still to come{waits}")
    stages = table_of("stage", "complete>", "durable here>", "replicated>", "layers waiting>", "bytes waiting>")
    for stage in daemon["stages"]:
        epochs = ["none" if stage[name] is None else str(stage[name]) for name in _EPOCHS]
        stages.add_row(stage["stage"], *epochs, f"{stage['waiting_layers']:,}", size_text(stage["waiting_bytes"]))
    if daemon["stages"]:
        out.print(stages)
        out.print()
    table = table_of("peer", "address", "state", "behind>", "bytes behind>", "last heard>")
    for peer in daemon["peers"]:
        heard = "never" if peer["silent_s"] < 0 else f"{peer['silent_s']:.1f} s ago"
        table.add_row(
            peer["node"],
            peer["address"],
            peer["state"],
            f"{peer['behind_files']:,}",
            size_text(peer["behind_bytes"]),
            heard,
        )
    out.print(table)
    for peer in daemon["peers"]:
        if peer["why"]:
            err.print(f"[red]peer {escape(peer['node'])}:[/] {escape(peer['why'])}", soft_wrap=True)


def _show_status(s: StoreStatus) -> None:
    facts = table_of("", "")
    facts.show_header = False
    facts.add_row("store", s.path)
    means = "everything up to it was made durable" if s.missing else "everything up to it is durable"
    facts.add_row("safe point", "none yet" if s.safe_point is None else f"{s.safe_point}  ({means})")
    when = "" if s.sealed_at is None else f"  ({s.sealed_at.replace('T', ' ').replace('+00:00', ' UTC')})"
    facts.add_row("last sealed", "none yet" if s.last_sealed is None else f"{s.last_sealed}{when}")
    facts.add_row("readable from", str(s.since))
    missing = "cannot be said" if s.missing is None else str(s.missing)
    facts.add_row("missing layers", missing + ("  (recover() recomputes them)" if s.missing else ""))
    for name, t in s.pins.items():
        facts.add_row("pin", f"{name} at {t}")
    for name, last in s.branches.items():
        if name != MAIN:
            facts.add_row("branch", f"{escape(name)} at {last}")
    out.print(facts)
    out.print()
    table = table_of("stage", "shards>", "layers>", "entries>", "size>", "copies>", "recorded up to>")
    for name, stage in s.stages.items():
        table.add_row(
            name, str(stage["shards"]), str(stage["layers"]), f"{stage['rows']:,}", size_text(stage["bytes"]),
            str(stage["copies"]), str(stage["upper"] - 1),
        )  # fmt: skip
    out.print(table if s.stages else "no stage recorded yet")
    if s.windows:
        out.print()
        out.print(_table_of_windows(s.windows))
    for where, problem in s.problems.items():
        err.print(f"[red]problem:[/] {escape(where)}: {escape(problem)}", soft_wrap=True)


def _table_of_windows(windows: Mapping[str, WindowStatus]) -> Table:
    """A line for each window, and below it one for each of its inputs where there are several."""
    table = table_of("window", "input", "watermark", "epochs without rows>", "")
    for name, window in windows.items():
        held = f"held back by {', '.join(window.held_back_by)}" if window.held_back_by else ""
        table.add_row(name, "", window.watermark or "none yet", "", held)
        for input, one in window.inputs.items():
            state = "holds it back" if input in window.held_back_by else "idle" if one.idle else ""
            table.add_row("", input, one.watermark or "none yet", str(one.epochs_without_rows), state)
    return table


@cli.command()
@STORE
@click.option("--stage", help="Only this stage.")
@JSON
def layers(path: Path, stage: str | None, as_json: bool) -> None:
    """List the layer files: which stage, shard, epochs and branches each is of, its size, level and digest."""
    with read_only(path) as store:
        if stage is not None:
            store.directory.check_stage(stage)
        found = [layer for layer in store.layers() if stage is None or layer.stage == stage]
        branches = store.branches_of(found)
    if as_json:
        print_json(
            [dataclasses.asdict(layer) | {"branches": names} for layer, names in zip(found, branches, strict=True)]
        )
    else:
        show_layers(found, branches)


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
    """Read the state of STAGE as of any epoch, or a single key of it. Rows come in order of their key.

    \b
      nosync get state/ delays --as-of 26
      nosync get state/ delays --key origin=JFK --csv
    """
    if as_csv and as_json:
        raise click.UsageError("--csv and --json are two formats: leave out one")
    with read_only(path) as store:
        wanted = [column.strip() for column in columns.split(",")] if columns else None
        if wanted is not None and len(set(wanted)) < len(wanted):
            raise InvalidInputError(f"--columns {columns}: a column is given twice")
        prefix = parse_keys(store, stage, as_of, keys, branch)
        key = store.key(stage, as_of, branch=branch)
        asked = wanted if wanted is None else [*wanted, *(name for name in key if name not in wanted)]
        table = by_key(store.read(stage, as_of, columns=asked, prefix=prefix, branch=branch), key)
        table = table if wanted is None else table.select(wanted)
    shown = table if limit is None else head(table, limit)
    if as_json:
        print_json(rows_of(shown))
    elif as_csv:
        _print_csv(_flat(shown))
    else:
        show_rows(shown if limit is not None else head(table, MOST_ROWS_SHOWN), table.num_rows)


def _print_csv(table: pa.Table) -> None:
    """Prints a file's contents as they are, and what a person sees in a terminal as it looks."""
    if not sys.stdout.isatty():
        pyarrow.csv.write_csv(table, sys.stdout.buffer)
        return
    text = pa.BufferOutputStream()
    pyarrow.csv.write_csv(table, text)
    click.echo(visible(text.getvalue().to_pybytes().decode(), keep="\n\t"), nl=False)


def _flat(table: pa.Table) -> pa.Table:
    """CSV has no nested values: they become JSON text."""
    for i, f in enumerate(table.schema):
        if pa.types.is_binary(f.type) or pa.types.is_large_binary(f.type) or pa.types.is_fixed_size_binary(f.type):
            texts = [
                None if value is None else base64.b64encode(value).decode() for value in table.column(i).to_pylist()
            ]
            table = table.set_column(i, f.name, pa.array(texts, pa.string()))
        if pa.types.is_nested(f.type):
            texts = [None if value is None else json_text(value) for value in table.column(i).to_pylist()]
            table = table.set_column(i, f.name, pa.array(texts, pa.string()))
    return table


@cli.command()
@STORE
@click.argument("stage")
@click.argument("a")
@click.argument("b")
@click.option("--as-of", type=int, help="The epoch to compare at. [default: the newest that both branches have]")
@click.option("--limit", type=click.IntRange(min=0), default=MOST_ROWS_SHOWN, show_default=True, help="Rows to show.")
@click.option("--html", type=GivenPath(dir_okay=False),
              help="Write a page with plots and tables to this file instead.")  # fmt: skip
@JSON
def diff(
    path: Path, stage: str, a: str, b: str, as_of: int | None, limit: int, html: Path | None, as_json: bool
) -> None:
    """Compare STAGE on branch A with the same stage on branch B: the keys whose rows differ.

    \b
      nosync diff state/ delays main no-weather --as-of 26
      nosync diff state/ delays main no-weather --html report.html
    """
    if html is not None:
        _write_page(path, stage, a, b, as_of, html, as_json=as_json)
        return
    with read_only(path) as store:
        table = store.diff(stage, a, b, as_of)
    table = by_key(table, table.column_names[: table.column_names.index("_diff")])
    if as_json:
        print_json(rows_of(table))
        return
    kinds = table.column("_diff").to_pylist()
    found = ", ".join(f"{kinds.count(kind):,} {text}" for kind, text in _DIFF_KINDS.items())
    out.print(f"{found} of stage {escape(stage)}, {escape(a)} (a) beside {escape(b)} (b)")
    if table.num_rows:
        show_rows(head(table, limit), table.num_rows)


def _write_page(path: Path, stage: str, a: str, b: str, as_of: int | None, html: Path, *, as_json: bool) -> None:
    from nosync.html_diff.page import diff_page  # noqa: PLC0415 - matplotlib takes a second to import

    with read_only(path) as store, progress("comparing", quiet=as_json) as advance:
        page = diff_page(store, stage, a, b, as_of, progress=lambda done, of: advance(done, of, ""))
    try:
        html.write_text(page, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write {html}: {error.strerror}") from error
    if as_json:
        print_json({"html": str(html), "bytes": len(page)})
    else:
        out.print(f"wrote {escape(str(html))} ({size_text(len(page))}): open it in any browser")


_DIFF_KINDS = {"changed": "keys changed", "only_a": "only in a", "only_b": "only in b"}


@cli.command()
@STORE
@click.argument("name", required=False)
@click.option("--delete", is_flag=True, help="Delete the branch NAME, with the layers that nothing else needs.")
@ALONE
@JSON
def branch(path: Path, name: str | None, delete: bool, alone: bool, as_json: bool) -> None:
    """List the branches of a store, describe one, or delete one. Jobs make them: job.branch("name", at=26, replace={...}).

    \b
      nosync branch state/                         list
      nosync branch state/ no-weather              where it comes from, what is shared and what is its own
      nosync branch state/ no-weather --delete
    """
    if delete:
        if name is None:
            raise click.UsageError("--delete needs the NAME of a branch")
        check_store(path)
        with nosync.open(path, alone=alone) as store:
            layers = store.delete_branch(name)
        if as_json:
            print_json({"deleted": name, "layers": layers})
        else:
            out.print(f"deleted branch {escape(name)} and {layers:,} layers")
        return
    with read_only(path) as store, store.held():
        found = [store.describe_branch(n) for n in (store.branches() if name is None else [name])]
    if as_json:
        print_json([dataclasses.asdict(info) for info in found])
        return
    table = table_of("branch", "from", "epoch>", "own layers>", "own>", "shared>", "stages with other code")
    for info in found:
        shown = [info.name, ", ".join(info.lineage), str(info.epoch), f"{info.own_layers:,}", size_text(info.own_bytes),
                 size_text(info.shared_bytes), ", ".join(info.changed)]  # fmt: skip
        table.add_row(*shown)
    out.print(table)


@cli.command()
@STORE
@click.option(
    "--repair", is_flag=True, help="Before that write small files again without which the store does not open."
)
@click.option("--yes", is_flag=True, help="With --repair: do it without asking.")
@click.option("--untrusted", is_flag=True, help="A store of somebody else: its catalog is not opened.")
@JSON
def verify(path: Path, repair: bool, yes: bool, untrusted: bool, as_json: bool) -> None:
    """Check every byte of every file against its digest. Exits 1 where something is wrong.

    With --repair a lost or damaged NOSYNC file, and entries of the log of branches, are written again from what the catalog and
    other files say. It says first what it will do, and asks; with --json it does nothing without --yes.

    \b
      nosync verify state/
      nosync verify state/ --repair
      nosync verify received/ --untrusted
    """
    if yes and not repair:
        raise click.UsageError("--yes is for --repair")
    if untrusted and repair:
        raise click.UsageError("--repair goes by what the catalog says, which --untrusted leaves alone")
    done = _repair(path, yes=yes, as_json=as_json) if repair else None
    with read_only(path) as store, progress("verifying", quiet=as_json) as advance:
        report = store.verify(lambda done, of: advance(done, of, ""), untrusted=untrusted)
    if as_json:
        print_json(dataclasses.asdict(report) | ({} if done is None else {"repair": done}))
    else:
        out.print(f"{report.layers} layers ({size_text(report.bytes)}) and {report.manifests} manifests are whole")
        for error in report.errors:
            err.print(f"[red]bad:[/] {escape(error)}", soft_wrap=True)
    if not report.ok:
        sys.exit(1)


@cli.command()
@STORE
@click.argument("target", metavar="DIRECTORY", type=click.Path(path_type=Path))
@JSON
def backup(path: Path, target: Path, as_json: bool) -> None:
    """Copy a store to a new DIRECTORY, while it is in use: whole, verified, and as it was at some epoch.

    A copy has no catalog, so that what is opened there is another incarnation of the directory, and verifies what it has. To
    put it back, move it to where the store was.

    \b
      nosync backup state/ /backups/state-2
    """
    with progress("copying", quiet=as_json) as advance:
        report = copy_store(local_path(path), local_path(target), progress=lambda done: advance(done, done, ""))
    with nosync.open(target, read_only=True) as store:
        last = store.last_sealed()
    if as_json:
        print_json({"path": str(target), "epoch": last, **dataclasses.asdict(report)})
    else:
        until = "no epoch yet" if last is None else f"up to epoch {last}"
        out.print(f"copied {until}: {report.layers} layers, {size_text(report.bytes)}, to {escape(str(target))}")


def _repair(path: Path, *, yes: bool, as_json: bool) -> dict[str, Any]:
    """Says what a repair will do, and does it if that is wanted. What is left to do, or not wanted, ends the command."""
    with Repair(local_path(path)) as repair:
        plan = repair.plan
        said = {"steps": [dataclasses.asdict(step) for step in plan.steps], "left": plan.left, "done": False}
        if not as_json:
            for step in plan.steps:
                out.print(f"will repair {escape(step.path)}: {escape(step.what)}", soft_wrap=True)
            for text in plan.left:
                err.print(f"[red]cannot repair:[/] {escape(text)}", soft_wrap=True)
            if not plan.steps and not plan.left:
                out.print("nothing to repair")
        if plan.left and not plan.steps:
            if as_json:
                print_json({"repair": said})
            sys.exit(1)
        if plan.steps and not yes:
            if as_json:
                print_json({"repair": said})
                sys.exit(1)
            if not sys.stdin.isatty():
                raise click.UsageError("nothing was done: there is nobody to ask; say --yes")
            if not click.confirm("Do this?"):
                sys.exit(1)
        repair.carry_out()
        return said | {"done": True}
