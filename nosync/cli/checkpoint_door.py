"""Commands for the door: `nosync checkpoint serve` and `nosync checkpoint address`."""

from __future__ import annotations

import logging
from pathlib import Path

import click

from nosync.checkpoints.door import api
from nosync.cli.checkpoint import DATA, NAME, checkpoint, wait_for_signal
from nosync.cli.console import GivenPath, log_to_stderr, out
from nosync.cli.descriptors import take_descriptors
from nosync.lsm.errors import NosyncError

_FILE = GivenPath(dir_okay=False)


@checkpoint.command()
@click.option(
    "--listen", default=f"{api.HOST}:{api.PORT}", show_default=True, metavar="HOST:PORT", help="Where queries find it."
)
@click.option("--strict", is_flag=True, help="A batch begins when the one before is durable here.")
@click.option(
    "--keep-batches", type=click.IntRange(min=1), help="So many batches. [default: as before; 100 of a new one]"
)
@click.option("--certificate", type=_FILE, help="Needed off loopback, with --key.")
@click.option("--key", type=_FILE, help="The key of the certificate.")
@click.option("--ca", type=_FILE, help="Callers have to show a certificate of this CA.")
@DATA
def serve(
    listen: str,
    strict: bool,
    keep_batches: int | None,
    certificate: Path | None,
    key: Path | None,
    ca: Path | None,
    store: Path,
) -> None:
    """Open a door through which queries write their checkpoints, until Ctrl-C.

    A query whose checkpointLocation is an address of the door is kept as it runs, and goes on from what is kept where its
    directory is lost. The address holds the secret of the door: whoever has it may read and write checkpoints.
    """
    host, separator, port = listen.rpartition(":")
    if not separator or not (port.isascii() and port.isdigit()):
        raise click.BadParameter(f"{listen!r}: expected HOST:PORT", param_hint="--listen")
    take_descriptors()
    log_to_stderr(logging.WARNING, "%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)
    with api.serve(
        store, int(port), host.strip("[]"), "strict" if strict else "async",
        keep_batches=keep_batches, certificate=certificate, key=key, ca=ca,
    ) as door:  # fmt: skip
        out.print(f"checkpointLocation of a query: {door.address('name')}", soft_wrap=True)
        out.print(f"kept in {store}; put a name for the query in the place of `name`; Ctrl-C ends it", soft_wrap=True)
        wait_for_signal(door.is_open)
        if not door.is_open():
            raise NosyncError("the door has ended by itself; its log says why")


@checkpoint.command()
@NAME
@DATA
def address(name: str, store: Path) -> None:
    """Print the checkpointLocation of a query behind the door, which holds its secret."""
    click.echo(api.address_of(name, store))
