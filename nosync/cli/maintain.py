"""Commands that change a store, without the code of a flow."""

from __future__ import annotations

from pathlib import Path

import click
from rich.markup import escape

import nosync
from nosync.cli.app import cli
from nosync.cli.console import (
    ALONE,
    JSON,
    STORE,
    check_store,
    out,
    print_json,
    progress,
    read_only,
    size_text,
    table_of,
)


@cli.command()
@STORE
@click.option("--stage", help="Only this stage.")
@click.option("--retain", type=click.IntRange(min=0), help="First let go of history older than this many epochs.")
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
    what a failed attempt at the next one has recorded is let go of, so that it can be given other rows.

    \b
      nosync rewind state/ 26
    """
    if drop and keep_as:
        raise click.UsageError("--drop keeps nothing: leave out --keep-as")
    check_store(path)
    with nosync.open(path, alone=alone) as store:
        last = store.last_sealed()
        kept = store.rewind(epoch, "" if drop else keep_as)
    if as_json:
        print_json({"epoch": epoch, "was": last, "kept_as": kept})
    else:
        if epoch == last:
            out.print(f"the main timeline is at epoch {epoch}; what was recorded of later ones is let go of")
            return
        rest = f"epochs {epoch + 1} to {last} are " + ("deleted" if kept is None else f"kept as branch {escape(kept)}")
        out.print(f"the main timeline is at epoch {epoch} again; {rest}")


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
