"""Commands for checkpoints of Structured Streaming queries: `nosync checkpoint ...`."""

from __future__ import annotations

import json
import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import click
from rich.markup import escape

from nosync.checkpoints import api
from nosync.checkpoints.api import CheckpointStatus
from nosync.checkpoints.follow import check_checkpoint
from nosync.checkpoints.places import DATA_VARIABLE, local_directory
from nosync.checkpoints.restore import Restored
from nosync.checkpoints.state_diff import FORMAT_OF_STATES, variables_in
from nosync.cli.app import Group, cli
from nosync.cli.console import JSON, GivenPath, err, out, print_json, size_text, table_of
from nosync.lsm.errors import InvalidInputError, NosyncError, NotAvailableError

DATA = click.option(
    "--store", "store", metavar="DIR", envvar=DATA_VARIABLE, required=True,
    type=GivenPath(file_okay=False), help="The data directory that keeps checkpoints. [env: NOSYNC_DATA]",
)  # fmt: skip
NAME = click.argument("name")
_CHANGED = {"insert": "inserted", "update": "updated", "delete": "deleted"}
AT = click.option(
    "--at", "at", type=click.IntRange(min=0), help="The batch to go on after. [default: the newest safe one]"
)


NEW_OUTPUT = click.option(
    "--new-output", type=GivenPath(),
    help="Of a file sink: make this directory with what --output had after the batch, to write to from now on.",
)  # fmt: skip


@cli.group(cls=Group)
def checkpoint() -> None:
    """Keep the checkpoint of a Structured Streaming query that you have, and go on from any batch of it.

    The query stays as it is. What Spark finishes is linked into a data directory, and is kept there also when Spark
    deletes it.

    \b
    Start here:
      nosync checkpoint watch /data/ck/words --store /data/nosync     beside the query
      nosync checkpoint status words --store /data/nosync             what is kept, and what can be gone on from
      nosync checkpoint restore words /data/ck/again --store /data/nosync
    """


@checkpoint.command()
@click.argument("path", type=GivenPath())
@click.option("--name", help="What it is kept as. [default: the directory's name]")
@click.option(
    "--keep-batches", type=click.IntRange(min=1), help="So many batches. [default: as before; 100 of a new one]"
)
@click.option("--once", is_flag=True, help="Take in what is there, and end.")
@DATA
def watch(path: Path, name: str | None, keep_batches: int | None, once: bool, store: Path) -> None:
    """Keep the checkpoint at PATH, the query's checkpointLocation, until Ctrl-C."""
    path = local_directory(path)
    if once:  # there is nothing to wait for
        check_checkpoint(path)
    with api.watch(path, store, name=name, keep_batches=keep_batches) as running:
        if not once:
            wait = "" if path.exists() else f"{path} is not there yet: waiting for its query. "
            out.print(f"{wait}keeping {path} as {running.checkpoint.name} in {store}; Ctrl-C ends it", soft_wrap=True)
            wait_for_signal()
    status = running.checkpoint.status(last=1)
    out.print(f"{status.name}: {_summary(status)}, {status.files} files")
    if once and status.batches and status.newest is None:
        why = status.batches[-1].why_not
        raise NotAvailableError(f"checkpoint {status.name}: no batch can be gone on from: {why}")


@checkpoint.command(name="list")
@DATA
@JSON
def list_(store: Path, as_json: bool) -> None:
    """List the checkpoints that are kept."""
    if not store.is_dir():
        raise InvalidInputError(f"{store} is not there: give the data directory that keeps checkpoints")
    found, damaged = list[CheckpointStatus](), dict[str, str]()
    for name in api.checkpoints(store):
        try:
            found.append(api.checkpoint(name, store).status(last=0))
        except NosyncError as error:  # the others are shown all the same
            damaged[name] = str(error)
    if as_json:
        shown = [
            {
                "name": s.name, "committed": s.committed, "newest": s.newest, "safe": s.safe, "bytes": s.size_bytes,
                "problem": s.problem,
            }
            for s in found
        ]  # fmt: skip
        print_json([*shown, *({"name": name, "problem": problem} for name, problem in damaged.items())])
        return
    table = table_of("checkpoint", "committed>", "safe>", "files>", "size>")
    for s in found:
        safe = "unknown" if s.problem else _number(s.safe)
        table.add_row(s.name, _number(s.committed), safe, f"{s.files:,}", size_text(s.size_bytes))
    for name in damaged:
        table.add_row(name, "unknown", "unknown", "", "")
    out.print(table if found or damaged else f"{store} keeps no checkpoint")
    for name, problem in damaged.items():
        err.print(f"[red]problem:[/] {escape(name)}: {escape(problem)}", soft_wrap=True)


@checkpoint.command()
@NAME
@click.option("--last", default=20, show_default=True, type=click.IntRange(min=0), help="Show so many batches.")
@DATA
@JSON
def status(name: str, last: int, store: Path, as_json: bool) -> None:
    """Show what is kept of a checkpoint, and whether a query can go on from each batch."""
    found = api.checkpoint(name, store).status(last)
    if as_json:
        print_json(found.as_dict())
        return
    out.print(
        f"checkpoint {found.name} of query {found.query or 'unknown'}: {_summary(found)}, "
        f"{found.files} files, {size_text(found.size_bytes)}"
    )
    if found.problem:
        err.print(found.problem, soft_wrap=True)
    nodes = ("on nodes>",) if found.nodes > 1 else ()
    table = table_of("batch>", "can be gone on from", "files>", "size>", *nodes, "pins")
    for b in found.batches:
        why = "yes" if b.why_not is None else f"no: {b.why_not}"
        copies = ("" if b.copies is None else f"{b.copies} of {found.nodes}",) if nodes else ()
        table.add_row(str(b.batch), why, f"{b.files:,}", size_text(b.size_bytes), *copies, " ".join(b.pins))
    if found.batches:
        out.print(table)


@checkpoint.command()
@NAME
@click.argument("directory", type=GivenPath())
@AT
@click.option("--address", help="What the query will call the directory, where that is not its path.")
@click.option("--output", type=GivenPath(), help="Where the query writes to: its sink is looked at.")
@DATA
@JSON
def restore(
    name: str, directory: Path, at: int | None, address: str | None, output: Path | None, store: Path, as_json: bool
) -> None:
    """Make DIRECTORY, from which the query goes on: give it as its checkpointLocation.

    A file sink and Delta skip batches that they have: say --output where the query writes to one.
    """
    _print_made(api.checkpoint(name, store).restore(directory, at, address=address, output=output), as_json=as_json)


@checkpoint.command()
@NAME
@click.argument("new")
@click.argument("directory", type=GivenPath())
@AT
@click.option("--output", type=GivenPath(), help="Where the query's file sink writes to.")
@NEW_OUTPUT
@DATA
@JSON
def fork(
    name: str,
    new: str,
    directory: Path,
    at: int | None,
    output: Path | None,
    new_output: Path | None,
    store: Path,
    as_json: bool,
) -> None:
    """Make DIRECTORY, from which another query goes on, and keep it as NEW. Give that query an output of its own."""
    if (output is None) != (new_output is None):
        raise click.UsageError("--output and --new-output go together")
    found = api.checkpoint(name, store)
    made = found.fork(directory, at, name=new, output=output, new_output=new_output)
    _print_made(made, as_json=as_json)


@checkpoint.command()
@NAME
@click.argument("directory", type=GivenPath())
@click.option("--at", "at", type=click.IntRange(min=0), required=True, help="The batch to go back to.")
@click.option("--output", type=GivenPath(), help="Where the query writes to: its sink is looked at.")
@NEW_OUTPUT
@click.option("--sink-rewound", is_flag=True, help="The output was taken back, or does not remember batches.")
@click.option("--keep-as", metavar="NAME", help="What the batches after it are kept as.")
@DATA
@JSON
def rewind(
    name: str,
    directory: Path,
    at: int,
    output: Path | None,
    new_output: Path | None,
    sink_rewound: bool,
    keep_as: str | None,
    store: Path,
    as_json: bool,
) -> None:
    """Let batch AT be the newest, and make DIRECTORY from which the query goes on after it."""
    if output is None and not sink_rewound:
        raise click.UsageError(
            "say --output DIR, where the query writes to, or --sink-rewound: a sink that remembers batches skips those that "
            "run again, and their rows are lost"
        )
    made, kept = api.checkpoint(name, store).rewind(
        at, directory, output=output, new_output=new_output, sink_rewound=sink_rewound, keep_as=keep_as
    )
    _print_made(made, as_json=as_json, kept_as=kept)


@checkpoint.command()
@NAME
@click.argument("pin_name", metavar="[PIN]", required=False)
@AT
@click.option("--remove", is_flag=True, help="Take the name back.")
@DATA
@JSON
def pin(name: str, pin_name: str | None, at: int | None, remove: bool, store: Path, as_json: bool) -> None:
    """Keep a batch under the name PIN, however old it becomes; or list the pins."""
    if pin_name is None and (remove or at is not None):
        raise click.UsageError(f"{'--remove' if remove else '--at'} is of a PIN: say its name as well")
    found = api.checkpoint(name, store)
    if pin_name is None:
        pins = found.pins()
        if as_json:
            print_json([{"name": one.name, "batch": one.batch} for one in pins])
        else:
            out.print("\n".join(f"{one.name}: batch {one.batch}" for one in pins) or "no pins")
    elif remove:
        found.unpin(pin_name)
        if as_json:
            print_json({"removed": pin_name})
        else:
            out.print(f"{pin_name} is taken back")
    else:
        made = found.pin(pin_name, at)
        if as_json:
            print_json({"name": made.name, "batch": made.batch})
        else:
            out.print(f"{made.name} keeps batch {made.batch}")


@checkpoint.command()
@NAME
@click.argument("before", type=click.IntRange(min=0))
@click.argument("after", type=click.IntRange(min=0))
@click.option(
    "--option", "options", multiple=True, metavar="KEY=VALUE",
    help="An option of Spark's statestore reader: operatorId, storeName, joinSide, stateVarName, ...; once for each.",
)  # fmt: skip
@click.option("--limit", default=20, show_default=True, type=click.IntRange(min=0), help="Show so many keys.")
@DATA
@JSON
def diff(name: str, before: int, after: int, options: tuple[str, ...], limit: int, store: Path, as_json: bool) -> None:
    """Show what differs in the state between the batches BEFORE and AFTER, by Spark's own reader."""
    said = dict(_option(text) for text in options)
    found = api.checkpoint(name, store)
    found.at(before), found.at(after)  # a batch that is not there is told before Spark starts
    try:
        from nosync.spark.errors import reason_of  # noqa: PLC0415
        from nosync.spark.session import local_session  # noqa: PLC0415 - only this command needs Spark
    except ImportError as error:
        raise NosyncError(f"reading states needs {error.name}: pip install 'nosync[spark]'") from error
    with tempfile.TemporaryDirectory() as logs:
        settings = {FORMAT_OF_STATES: "2"}  # in which it reads those of the first format, too
        spark = local_session(None, "nosync-checkpoint-diff", log=Path(logs) / "spark.log", settings=settings)
        try:
            rows = found.diff(spark, before, after, **said).cache()
            counts = {row["change"]: row["count"] for row in rows.groupBy("change").count().collect()}
            shown = [row.asDict(recursive=True) for row in rows.orderBy("partition_id").limit(limit).collect()]
        except Exception as error:  # of Spark's reader, which says what it does not know
            hint = ""
            if "stateVarName" in str(error) and (variables := variables_in(found.at(after).path)):
                hint = f". Say --option stateVarName=NAME; there are {', '.join(variables)}"
            raise NosyncError(f"Spark cannot read the state: {reason_of(str(error))}{hint}") from error
        finally:
            spark.stop()
    if as_json:
        print_json({"checkpoint": name, "before": before, "after": after, "counts": counts, "rows": shown})
        return
    table = table_of("partition>", "change", "key", f"batch {before}", f"batch {after}")
    for row in shown:
        values = [
            json.dumps(row[side], default=str) if row[side] is not None else "" for side in ("key", "before", "after")
        ]
        table.add_row(str(row["partition_id"]), row["change"], *values)
    if shown:
        out.print(table)
    total = ", ".join(f"{counts[kind]:,} {word}" for kind, word in _CHANGED.items() if kind in counts)
    out.print(f"{name}: {f'entries {total}' if total else 'no state differs'} from batch {before} to batch {after}")


def _option(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise click.UsageError(f"--option {text!r} is not KEY=VALUE")
    return name, value


def _print_made(made: Restored, *, as_json: bool, kept_as: str | None = None) -> None:
    if as_json:
        rest = {} if kept_as is None else {"kept_as": kept_as}
        print_json(
            {"path": str(made.path), "batch": made.batch, "files": made.files, "same_offsets": made.repeats_offsets}
            | rest
        )
        return
    again = f"batch {made.batch + 1} reads what it read before" if made.repeats_offsets else "it reads what is new"
    out.print(f"{made.path}: a query goes on after batch {made.batch} ({made.files} files); {again}", soft_wrap=True)
    if kept_as is not None:
        out.print(f"what came after is kept as checkpoint {kept_as}")


def _summary(found: CheckpointStatus) -> str:
    """Returns which batches are there: where there are peers, what is safe is on several nodes."""
    text = f"committed {_number(found.committed)}, safe {'unknown' if found.problem else _number(found.safe)}"
    if found.nodes > 1:
        text += f" (on {found.nodes} nodes), here {_number(found.newest)}"
    return text


def _number(t: int | None) -> str:
    return "none" if t is None else str(t)


def wait_for_signal(is_going_on: Callable[[], bool] = lambda: True) -> None:
    """Waits for Ctrl-C or SIGTERM, or until what is waited beside has ended."""
    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    while not stopped.wait(1.0) and is_going_on():
        pass
