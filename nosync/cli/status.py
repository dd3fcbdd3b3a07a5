"""The command that shows how a store is: what is safe, what is missing, and what its daemon says."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from nosync.cli.app import cli
from nosync.cli.console import JSON, STORE, err, out, print_json, read_only, size_text, table_of
from nosync.lsm.errors import NosyncError
from nosync.lsm.manifests.branches import MAIN
from nosync.lsm.status import StoreStatus, WindowStatus
from nosync.lsm.store.store import Store


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
    """Returns what the daemon of a store says of itself and its peers; None where it has none."""
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
    safe_at = "" if s.safe_point_sealed_at is None else f", sealed {_shown(s.safe_point_sealed_at)}"
    facts.add_row("safe point", "none yet" if s.safe_point is None else f"{s.safe_point}  ({means}{safe_at})")
    when = "" if s.sealed_at is None else f"  ({_shown(s.sealed_at)})"
    facts.add_row("last sealed", "none yet" if s.last_sealed is None else f"{s.last_sealed}{when}")
    facts.add_row("readable from", str(s.since))
    missing = "cannot be said" if s.missing is None else str(s.missing)
    facts.add_row("missing layers", missing + ("  (recover() recomputes them)" if s.missing else ""))
    for name, t in s.pins.items():
        facts.add_row("pin", f"{name} at {t}")
    for name, last in s.branches.items():
        if name != MAIN:
            at = f"  ({_shown(s.branches_sealed_at[name])})" if name in s.branches_sealed_at else ""
            facts.add_row("branch", f"{escape(name)} at {last}{at}")
    for remote in s.remotes:
        facts.add_row("remotely safe", escape(remote.text()))
    if s.lazy_layers:
        facts.add_row(
            "not here yet", f"{s.lazy_layers:,} layers ({size_text(s.lazy_bytes)}): read from the object store, and fetched "
            "while the store is open",
        )  # fmt: skip
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


def _shown(iso: str) -> str:
    return iso.replace("T", " ").replace("+00:00", " UTC")


def _table_of_windows(windows: Mapping[str, WindowStatus]) -> Table:
    """Returns a table with a line for each window, and below it one for each input where there are several."""
    table = table_of("window", "input", "watermark", "epochs without rows>", "")
    for name, window in windows.items():
        held = f"held back by {', '.join(window.held_back_by)}" if window.held_back_by else ""
        table.add_row(name, "", window.watermark or "none yet", "", held)
        for input, one in window.inputs.items():
            state = "holds it back" if input in window.held_back_by else "idle" if one.idle else ""
            table.add_row("", input, one.watermark or "none yet", str(one.epochs_without_rows), state)
    return table
