"""Commands that keep a store in order, without the code of a flow."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import click
from rich.markup import escape

import nosync
from nosync.cli.app import cli
from nosync.cli.console import (
    ALONE,
    JSON,
    STORE,
    check_store,
    confirmed,
    err,
    out,
    print_json,
    progress,
    read_only,
    size_text,
    table_of,
)
from nosync.cli.remote import backup_to_remote
from nosync.lsm.platform.paths import local_path
from nosync.lsm.store.backup import backup as copy_store
from nosync.lsm.store.repair import Repair
from nosync.replication.remote.stubs import is_lazy
from nosync.replication.remote.url import is_remote_url


@cli.command()
@STORE
@click.option("--stage", help="Only this stage.")
@click.option("--retain", type=click.IntRange(min=0), help="First release history older than this many epochs.")
@ALONE
@JSON
def compact(path: Path, stage: str | None, retain: int | None, alone: bool, as_json: bool) -> None:
    """Merge every trace into one layer now. No read at a retained epoch changes."""
    check_store(path)
    # No background merges: what is counted below is then what this command did.
    with nosync.open(path, alone=alone, retain=retain, settings=nosync.StoreSettings(merge=False)) as store:
        before = store.status()
        with progress("merging", quiet=as_json) as advance:
            total = sum(s["shards"] for s in before.stages.values())
            merges = store.compact(stage, lambda done: advance(done, max(total, done), ""))
        after = store.status()
    sizes = {when: sum(s["bytes"] for s in x.stages.values()) for when, x in (("before", before), ("after", after))}
    counts = {when: sum(s["layers"] for s in x.stages.values()) for when, x in (("before", before), ("after", after))}
    if as_json:
        print_json({"merges": merges, "bytes": sizes, "layers": counts})
    else:
        out.print(
            f"{merges} merges: {counts['before']} layers ({size_text(sizes['before'])}) "
            f"-> {counts['after']} layers ({size_text(sizes['after'])})"
        )


def _check_keep_as(keep_as: str | None, *, drop: bool) -> None:
    if drop and keep_as is not None:
        raise click.UsageError("--drop keeps nothing: leave out --keep-as")
    if keep_as == "":
        raise click.UsageError("--keep-as has no name: give one, or --drop to delete what would be kept")


@cli.command()
@STORE
@click.argument("epoch", type=int)
@click.option(
    "--keep-as", metavar="NAME", help="Name of the branch that keeps what came after. [default: before-rewind-N]"
)
@click.option("--drop", is_flag=True, help="Delete what came after instead of keeping it as a branch.")
@ALONE
@JSON
def rewind(path: Path, epoch: int, keep_as: str | None, drop: bool, alone: bool, as_json: bool) -> None:
    """Let the main timeline go on from EPOCH; what it had after that is kept as a branch.

    Sinks take back what they were given for later epochs when the job is started again. With the last sealed epoch,
    what a failed attempt at the next one has recorded is deleted, so that it can be given other rows.

    \b
      nosync rewind state/ 26
    """
    _check_keep_as(keep_as, drop=drop)
    check_store(path)
    with nosync.open(path, alone=alone) as store:
        last = store.last_sealed()
        kept = store.rewind(epoch, "" if drop else keep_as)
    if as_json:
        print_json({"epoch": epoch, "was": last, "kept_as": kept})
    else:
        if epoch == last:
            rest = "deleted" if kept is None else f"kept as branch {escape(kept)}"
            out.print(f"the main timeline is at epoch {epoch}; what was recorded of later ones is {rest}")
            return
        rest = f"epochs {epoch + 1} to {last} are " + ("deleted" if kept is None else f"kept as branch {escape(kept)}")
        out.print(f"the main timeline is at epoch {epoch} again; {rest}")


@cli.command()
@STORE
@click.argument("branch")
@click.option(
    "--keep-as", metavar="NAME", help="Name of the branch that keeps what main was. [default: before-promote-N]"
)
@click.option("--drop", is_flag=True, help="Delete what main was from the fork on instead of keeping it as a branch.")
@ALONE
@JSON
def promote(path: Path, branch: str, keep_as: str | None, drop: bool, alone: bool, as_json: bool) -> None:
    """Let the main timeline be that of BRANCH, which must have come as far; what main was is kept as a branch.

    A job that runs on main is stopped (FencedError). Start it again with the code of the branch: its sinks take back what
    they were given after the fork, and get the branch's changes instead.

    \b
      nosync promote state/ fix
    """
    _check_keep_as(keep_as, drop=drop)
    check_store(path)
    with nosync.open(path, alone=alone) as store:
        was = store.last_sealed()
        kept = store.promote(branch, "" if drop else keep_as)
        now = store.last_sealed()
    if as_json:
        print_json({"promoted": branch, "epoch": now, "was": was, "kept_as": kept})
        return
    rest = "deleted" if kept is None else f"kept as branch {escape(kept)}"
    out.print(f"the main timeline is that of branch {escape(branch)}, at epoch {now}; what it was is {rest}")


@cli.command()
@STORE
@click.argument("name", required=False)
@click.argument("epoch", type=int, required=False)
@click.option("--remove", is_flag=True, help="Remove the pin NAME.")
@ALONE
@JSON
def pin(path: Path, name: str | None, epoch: int | None, remove: bool, alone: bool, as_json: bool) -> None:
    """Hold EPOCH readable under NAME, whatever retain= says; or list the pins.

    \b
      nosync pin state/                       list
      nosync pin state/ before-upgrade 7      hold epoch 7
      nosync pin state/ before-upgrade --remove
    """
    if name is None:
        if remove:
            raise click.UsageError("--remove needs the NAME of the pin")
        with read_only(path) as store:
            pins = store.pins()
    else:
        if remove == (epoch is not None):
            raise click.UsageError("give an EPOCH to hold, or --remove")
        check_store(path)
        with nosync.open(path, alone=alone) as store:
            if epoch is None:
                store.unpin(name)
            else:
                store.pin(name, epoch)
            pins = store.pins()
    if as_json:
        print_json(pins)
        return
    table = table_of("pin", "epoch>")
    for pinned, t in pins.items():
        table.add_row(pinned, str(t))
    out.print(table if pins else "no pins")


@cli.command()
@STORE
@click.option(
    "--repair", is_flag=True, help="First write lost or damaged small files again that the store needs to open."
)
@click.option("--yes", is_flag=True, help="With --repair: do it without asking.")
@click.option("--untrusted", is_flag=True, help="A store of somebody else: its catalog is not opened.")
@JSON
def verify(path: Path, repair: bool, yes: bool, untrusted: bool, as_json: bool) -> None:
    """Check every byte of every file against its digest. Exits 1 where something is wrong.

    With --repair a lost or damaged NOSYNC file, and entries of the log of branches, are written again from what the
    catalog and other files say. It says first what it will do, and asks; with --json it does nothing without --yes.

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
        away = sum(layer.level == "remote" for layer in store.layers()) if is_lazy(path.expanduser()) else 0
    if as_json:
        print_json(dataclasses.asdict(report) | {"layers_in_bucket": away} | ({} if done is None else {"repair": done}))
    else:
        kept = f", and {report.checkpoint_files} files of kept checkpoints" if report.checkpoint_files else ""
        out.print(
            f"{report.layers} layers ({size_text(report.bytes)}) and {report.manifests} manifests are whole{kept}"
        )
        if away:
            out.print(
                f"{away} layers are still in the bucket, and were not looked at: nosync restore URL {escape(str(path))}"
            )
        for error in report.errors:
            err.print(f"[red]bad:[/] {escape(error)}", soft_wrap=True)
    if not report.ok:
        sys.exit(1)


@cli.command()
@STORE
@click.argument("target", metavar="TARGET")
@JSON
def backup(path: Path, target: str, as_json: bool) -> None:
    """Copy a store to a new directory, while it is in use: whole, verified, and as it was at some epoch.

    A copy has no catalog: when it is opened, it becomes another incarnation of the directory, and its files are
    verified. To put it back, move it to where the store was.

    TARGET may also be the URL of an object store: then what is new since the last time is put there. `nosync restore`
    makes a directory of it.

    \b
      nosync backup state/ /backups/state-2
      nosync backup state/ s3://bucket/state
    """
    if not target:
        raise click.BadParameter("it is empty: give a directory, or the URL of an object store", param_hint="TARGET")
    if is_remote_url(target):
        backup_to_remote(path, target, as_json=as_json)
        return
    directory = Path(target)
    with progress("copying", quiet=as_json) as advance:
        report = copy_store(local_path(path), local_path(directory), progress=lambda done: advance(done, done, ""))
    with nosync.open(directory, read_only=True) as store:
        last = store.last_sealed()
    if as_json:
        print_json({"path": str(directory), "epoch": last, **dataclasses.asdict(report)})
    else:
        until = "no epoch yet" if last is None else f"up to epoch {last}"
        out.print(f"copied {until}: {report.layers} layers, {size_text(report.bytes)}, to {escape(str(directory))}")


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
            if not confirmed("Do this?"):
                sys.exit(1)
        repair.carry_out()
        return said | {"done": True}
