"""Commands for the copies of a store in an object store."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import click
from rich.markup import escape

from nosync.cli.app import cli
from nosync.cli.console import JSON, GivenPath, err, out, print_json, progress, size_text, table_of
from nosync.lsm.errors import InvalidInputError
from nosync.lsm.platform.env import Env
from nosync.lsm.platform.layout import MARKER
from nosync.lsm.platform.paths import local_path
from nosync.replication.remote.stubs import is_lazy, read_from

URL = click.argument("url", metavar="URL")


@cli.group()
def remote() -> None:
    """Look at copies of a store in an object store.

    \b
      nosync remote status s3://bucket/state
    """


@remote.command("status")
@URL
@JSON
def remote_status(url: str, as_json: bool) -> None:
    """Show what is at URL: the newest remotely safe epoch of each branch, pins, sizes, and about what it costs.

    Exits with 1 where objects are damaged or gone. What is gone is put again by the daemon or the store that copies there,
    within a quarter of an hour, and by `nosync backup DIR URL`.

    \b
      nosync remote status s3://bucket/state
    """
    from nosync.replication.remote.cloud import open_bucket  # noqa: PLC0415 - needs the extra `remote`
    from nosync.replication.remote.status import bucket_status  # noqa: PLC0415

    found = bucket_status(open_bucket(url, to_read=True))
    if as_json:
        print_json(dataclasses.asdict(found))
        _end_with(found.problems)
        return
    facts = table_of("", "")
    facts.show_header = False
    facts.add_row("copies at", found.url)
    facts.add_row("of store", found.store_id)
    for name, t in found.branches.items():
        facts.add_row("remotely safe", f"{name} up to {'no epoch yet' if t is None else t}")
    for name, pinned in found.pins.items():
        facts.add_row("pin", f"{name} at {pinned}")
    for name in found.checkpoints:
        facts.add_row("checkpoint", name)
    facts.add_row(
        "in use", f"{size_text(found.used_bytes)} of {size_text(found.stored_bytes)} in {found.objects:,} objects"
    )
    facts.add_row("costs about", f"${found.dollars_a_month:.2f} a month to keep (S3 Standard), and the requests")
    out.print(facts)
    out.print()
    table = table_of("node", "claim>", "packs>", "files>", "size>")
    for node, one in found.nodes.items():
        table.add_row(node, str(one.claim), f"{one.packs:,}", f"{one.files:,}", size_text(one.bytes))
    out.print(table)
    _show_problems(found.problems)
    _end_with(found.problems)


def _show_problems(problems: Sequence[str]) -> None:
    for problem in problems:
        err.print(f"[red]problem:[/] {escape(problem)}", soft_wrap=True)


@cli.command()
@URL
@click.argument("target", metavar="DIRECTORY", type=GivenPath())
@click.option(
    "--as-of", type=int, help="Let the main timeline end with this epoch. [default: the newest remotely safe one]"
)
@click.option("--branch", help="Let main be this branch.")
@click.option(
    "--lazy", is_flag=True, help="Leave layers at URL until they are read; the rest is fetched while the store is open."
)
@JSON
def restore(url: str, target: Path, as_of: int | None, branch: str | None, lazy: bool, as_json: bool) -> None:
    """Make a new DIRECTORY of the copies at URL. One that is interrupted goes on when it is said again.

    Every byte is verified. Exits with 1 where something in the bucket is damaged, so that not all was restored. The
    directory is then a store as any other, and a job goes on after its newest epoch. With --lazy it does so at once,
    however large the state is; said again without it, this fetches the rest.

    \b
      nosync restore s3://bucket/state state/
      nosync restore s3://bucket/state state/ --lazy
      nosync restore s3://bucket/state yesterday/ --as-of 86400
    """
    from nosync.replication.remote.cloud import open_bucket  # noqa: PLC0415 - needs the extra `remote`
    from nosync.replication.remote.restore import restore as restore_store  # noqa: PLC0415

    if (
        (local_path(target) / MARKER).exists()
        and is_lazy(local_path(target))
        and not (lazy or branch or as_of is not None)
    ):
        _fetch_rest(url, local_path(target), as_json=as_json)
        return
    with progress("restoring", quiet=as_json) as advance:
        report = restore_store(
            open_bucket(url, to_read=True), local_path(target), as_of=as_of, branch=branch, lazy=lazy,
            progress=lambda done, of: advance(done, of, size_text(done)),
        )  # fmt: skip
    if as_json:
        print_json({"path": str(target), **dataclasses.asdict(report)})
        _end_with(report.problems)
        return
    until = "no epoch yet" if report.epoch is None else f"up to epoch {report.epoch}"
    out.print(f"restored {until}: {report.files:,} files, {size_text(report.bytes)}, to {escape(str(target))}")
    if report.lazy_layers:
        out.print(
            f"{report.lazy_layers:,} layers ({size_text(report.lazy_bytes)}) are still at {escape(url)}: they are fetched when "
            "they are read, and in the background while the store is open"
        )
    _show_problems(report.problems)
    _end_with(report.problems)


def _end_with(problems: Sequence[str]) -> None:
    """Tells scripts, too, that not all is there."""
    if problems:
        sys.exit(1)


def _fetch_rest(url: str, target: Path, *, as_json: bool) -> None:
    """Fetches what a directory lacks that was restored with --lazy."""
    from nosync.replication.remote.cloud import open_bucket  # noqa: PLC0415 - needs the extra `remote`
    from nosync.replication.remote.hydration import fetch_rest  # noqa: PLC0415

    bucket, its_url = open_bucket(url, to_read=True), read_from(target, Env())
    if bucket.url != its_url:
        raise InvalidInputError(f"{target} is restored from {its_url}, and not from {bucket.url}")
    with progress("restoring", quiet=as_json) as advance:
        report = fetch_rest(target, bucket, lambda done, of: advance(done, of, size_text(done)))
    if as_json:
        print_json({"path": str(target), **dataclasses.asdict(report)})
        return
    out.print(f"fetched {report.layers:,} layers, {size_text(report.bytes)}: {escape(str(target))} has all now")


def backup_to_remote(path: Path, url: str, *, as_json: bool) -> None:
    """Puts what is new in the store at `path` to an object store. See the command `backup`."""
    from nosync.replication.remote.cloud import open_bucket  # noqa: PLC0415 - needs the extra `remote`
    from nosync.replication.remote.copying import copy_directory  # noqa: PLC0415
    from nosync.replication.remote.settings import RemoteSettings  # noqa: PLC0415

    report = copy_directory(local_path(path), open_bucket(url), RemoteSettings(url))
    for problem in report.gone:
        err.print(f"[yellow]put again:[/] {escape(problem)}", soft_wrap=True)
    if as_json:
        print_json(dataclasses.asdict(report))
        return
    until = "no epoch yet" if report.epoch is None else f"up to epoch {report.epoch}"
    out.print(
        f"{escape(report.url)} has all {until}: {size_text(report.sent_bytes)} were put, {report.files:,} files are there"
    )
