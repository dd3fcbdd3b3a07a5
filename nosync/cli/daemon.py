"""Commands for daemons: running one, and certificates for several."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.markup import escape

from nosync.checkpoints.retention import garbage_of
from nosync.checkpoints.watches import Watches
from nosync.cli.app import cli
from nosync.cli.console import JSON, STORE, GivenPath, check_store, err, log_to_stderr, out, print_json, table_of
from nosync.cli.descriptors import take_descriptors
from nosync.lsm.errors import NosyncError, ReplicationError
from nosync.lsm.platform.env import Env
from nosync.lsm.platform.process import leave_out_pandas
from nosync.replication.remote.settings import RemoteSettings

if TYPE_CHECKING:
    from nosync.replication.daemon.config import DaemonConfig
    from nosync.replication.transport.client import DaemonClient

OTHERS_GET_NOTHING = 0o027


@cli.command()
@click.option("--config", type=GivenPath(dir_okay=False), help="A TOML file with the fields below.")
@click.option("--node", help="This node's id, unlike any other's (a-z, 0-9, _ and -).")
@click.option("--data", type=GivenPath(), help="The data directory; made where there is none.")
@click.option(
    "--listen", metavar="HOST:PORT", help="Where jobs and other nodes reach this one. [default: 127.0.0.1:7500]"
)
@click.option(
    "--peer", "peers", multiple=True, metavar="NODE=HOST:PORT", help="Another node of the store; once for each."
)
@click.option("--replicas", type=int, help="On how many nodes every layer is kept, this one included. [default: 2]")
@click.option("--tls", type=GivenPath(), help="Directory of certificates (nosync certs); needed off loopback.")
@click.option(
    "--sockets",
    type=GivenPath(),
    help="Without TLS: a directory of this user alone where its daemons on this machine find each other. "
    "[default: ~/.local/state/nosync]",
)
@click.option("--metrics", metavar="HOST:PORT", help="Where Prometheus fetches metrics.")
@click.option("--door", metavar="HOST:PORT", help="Where queries write checkpoints that are kept (WebHDFS).")
@click.option(
    "--door-mode", type=click.Choice(["async", "strict"]), help="Whether queries wait for copies. [default: async]"
)
@click.option(
    "--remote", metavar="URL", help="Where copies go in an object store: s3://BUCKET/PREFIX, gs://, az://, file:///."
)
@click.option(
    "--checkpoint",
    "checkpoints",
    multiple=True,
    metavar="NAME=PATH",
    help="A query's checkpoint to watch; once for each.",
)
@click.option("--retain", type=click.IntRange(min=0), help="Epochs of history that stay readable. [default: all]")
@click.option(
    "--archive-epochs", type=click.IntRange(min=2), help="Manifests of so many old epochs share a file. [default: 1000]"
)
@click.option(
    "--nice", type=click.IntRange(0, 19), help="How much smaller a share of the processors it gets. [default: 0]"
)
@click.option(
    "--new-store", is_flag=True, default=None, help="Begin a new store here, also where some peers were not met yet."
)
@click.option("--check", is_flag=True, help="Only check the configuration and explain it.")
@click.option("--verbose", is_flag=True, help="Log what happens, not only what goes wrong.")
def daemon(
    config: Path | None,
    peers: tuple[str, ...],
    checkpoints: tuple[str, ...],
    check: bool,
    verbose: bool,
    **given: Any,
) -> None:
    """Keep a data directory: make durable what jobs publish in it, merge it, and replicate it to peers.

    Jobs open the directory as ever and find the daemon by themselves. Stops on SIGTERM, with everything durable.

    \b
      nosync daemon --node n1 --data d1 --listen 127.0.0.1:7501 --peer n2=127.0.0.1:7502 --replicas 2
      nosync daemon --node n2 --data d2 --listen 127.0.0.1:7502 --peer n1=127.0.0.1:7501 --replicas 2
    """
    try:
        from nosync.replication.daemon.config import make_config, read_config  # noqa: PLC0415
        from nosync.replication.daemon.daemon import Daemon  # noqa: PLC0415 - gRPC takes a moment to import
        from nosync.replication.daemon.process import serve  # noqa: PLC0415
        from nosync.replication.daemon.startup import check_config  # noqa: PLC0415
    except ImportError as error:
        raise NosyncError(f"the daemon needs {error.name}: pip install 'nosync[daemon]'") from error
    fields = read_config(config) if config is not None else {}
    fields |= {name: value for name, value in given.items() if value is not None}
    if given["remote"] is not None:
        fields["remote"] = RemoteSettings(given["remote"])
    if peers:
        fields["peers"] = _peers(peers, "--peer")
    if checkpoints:
        fields["checkpoints"] = _named(checkpoints, "--checkpoint", "NAME=PATH", "checkpoint")
    found = make_config(fields, str(config or "the command line"))
    if check:
        check_config(found)
        _explain(found)
        return
    level = logging.INFO if verbose else logging.WARNING
    log_to_stderr(level, "%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)
    leave_out_pandas()
    os.umask(OTHERS_GET_NOTHING)  # for what RocksDB makes; nosync's own files have their modes whatever it is
    take_descriptors()
    _give_way(found.nice)
    one = Daemon(found)
    one.node.opaque.removes(lambda: garbage_of(found.data, Env()))
    beside = contextlib.ExitStack()

    def ready() -> None:
        _keep_checkpoints(found, one.node.problems, beside)
        err.print(f"node {found.node} serves {escape(str(found.data))} on {one.servers.address}", soft_wrap=True)

    serve(one, ready, beside.close)


def _explain(config: DaemonConfig) -> None:
    """Prints each field of a configuration with its meaning. Peers are those that operators left, where they did."""
    from nosync.replication.daemon.config import explain_config  # noqa: PLC0415 - gRPC takes a moment to import
    from nosync.replication.daemon.members import MEMBERS_FILE, peers_of  # noqa: PLC0415

    table = table_of("field", "value", "meaning")
    members = peers_of(config)
    if members != config.peers:
        err.print(
            f"peers are those of {escape(str(config.data / MEMBERS_FILE))}, as nosync peers left them: "
            f"{escape(', '.join(f'{node}={address}' for node, address in members.items()) or 'none')}",
            soft_wrap=True,
        )
        config = dataclasses.replace(config, peers=members)
    for name, value, meaning in explain_config(config):
        table.add_row(name, value, meaning)
    out.print(table)


def _keep_checkpoints(config: DaemonConfig, problems: dict[str, str], beside: contextlib.ExitStack) -> None:
    """Opens the door, and watches the checkpoints, that the configuration asks for. `problems`: those of the node."""
    if config.door:
        from nosync.checkpoints.door.api import serve as open_door  # noqa: PLC0415 - uvicorn is an extra
        from nosync.replication.transport.addresses import is_loopback  # noqa: PLC0415

        host, _, port = config.door.rpartition(":")
        tls = None if is_loopback(config.door) else config.tls
        door = open_door(
            config.data, int(port), host.strip("[]"), "strict" if config.door_mode == "strict" else "async",
            certificate=tls and tls / f"{config.node}.pem", key=tls and tls / f"{config.node}.key",
        )  # fmt: skip
        beside.enter_context(door)
        err.print(f"queries write checkpoints on {config.door}: nosync checkpoint address NAME", soft_wrap=True)
    if config.checkpoints:
        beside.callback(Watches(config.data, config.checkpoints, problems).close)


def _give_way(nice: int) -> None:
    """Makes the threads of this process give way: those that libraries have started by now, and all that are started
    from now on. They take the processor from nobody in the middle of a turn (each link() of a task wakes one, and the
    task would wait until its file was looked at), and get a smaller share if that is wanted.
    """
    priority = os.getpriority(os.PRIO_PROCESS, 0) + nice
    for thread in map(int, os.listdir("/proc/self/task")):
        # A sandbox may forbid it, and a thread may have ended.
        with contextlib.suppress(OSError):
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, priority)


def _peers(texts: Sequence[str], option: str) -> dict[str, str]:
    return _named(texts, option, "NODE=HOST:PORT", "node")


def _named(texts: Sequence[str], option: str, form: str, what: str) -> dict[str, str]:
    """Returns the values by name. Refuses a name that is given twice: one of the two would count, and nobody said which."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            raise click.UsageError(f"{option} {text!r} is not {form}")
        if name in found:
            raise click.UsageError(f"{option} names {what} {name} twice")
        found[name] = value
    return found


def _client(path: Path) -> DaemonClient:
    try:
        from nosync.replication.transport.client import client_of  # noqa: PLC0415
    except ImportError as error:
        raise NosyncError(f"daemons need {error.name}: pip install 'nosync[daemon]'") from error
    check_store(path)
    client = client_of(path)
    if client is None:
        raise ReplicationError(
            f"{path} has no daemon: start one with nosync daemon --node NAME --data {path}, and --peer NAME=HOST:PORT for each "
            "other node, or --replicas 1 where there is none"
        )
    return client


@cli.command()
@STORE
@click.option("--add", "added", multiple=True, metavar="NODE=HOST:PORT", help="A node that joins the store.")
@click.option(
    "--remove",
    "removed",
    multiple=True,
    metavar="NODE",
    help="A node that is gone for good: its copies no longer count.",
)
@JSON
def peers(path: Path, added: tuple[str, ...], removed: tuple[str, ...], as_json: bool) -> None:
    """List the peers of the daemon of PATH, or change them while it runs.

    Tell every node of the store. A new node's own daemon is started with all others as --peer; it is filled in the
    background. A dead node is never removed by itself: that is for you to decide.

    \b
      nosync peers d1 --add n4=127.0.0.1:7504
      nosync peers d1 --remove n2
    """
    to_add = _peers(added, "--add")
    if both := sorted(to_add.keys() & {*removed}):
        raise click.UsageError(f"node {both[0]} is in --add and in --remove: give one of them")
    client = _client(path)
    if added or removed:
        client.change_members(to_add, removed)
    found = [(p.node, p.address, p.state) for p in client.status().peers]
    client.close()
    if as_json:
        print_json([{"node": node, "address": address, "state": state} for node, address, state in found])
        return
    table = table_of("peer", "address", "state")
    for row in found:
        table.add_row(*row)
    out.print(table if found else "no peers")


@cli.command()
@STORE
@click.option("--take-theirs", is_flag=True, help="This node is wrong: what its peers hold counts, and is fetched.")
@JSON
def conflicts(path: Path, take_theirs: bool, as_json: bool) -> None:
    """List the files whose contents differ between the node of PATH and its peers, or decide that theirs count.

    One layer was computed twice with different results: a stage is not deterministic, or two jobs ran on two nodes. The
    safe point waits until you decide which node is wrong, and say so there. What it discards goes to its quarantine/.

    \b
      nosync conflicts d2
      nosync conflicts d2 --take-theirs
    """
    client = _client(path)
    names = client.conflicts(take_theirs=take_theirs)
    client.close()
    if as_json:
        print_json(names)
        return
    for name in names:
        out.print(f"{'discarded' if take_theirs else 'conflict'}  {escape(name)}")
    if not names:
        out.print("no conflicts")


class _Certs(click.Group):
    """Holds the commands for certificates. Without the name of one, a directory is given, and the nodes to make
    certificates for.
    """

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        return super().resolve_command(ctx, args if args and args[0] in self.commands else ["make", *args])


@cli.group(cls=_Certs)
def certs() -> None:
    """Make certificates for nodes and readers, and revoke them.

    \b
      nosync certs tls n1 n2 n3
      nosync certs revoke tls n2
    """


@certs.command("make")
@click.argument("directory", type=GivenPath(file_okay=False))
@click.argument("nodes", nargs=-1, required=True)
def make(directory: Path, nodes: tuple[str, ...]) -> None:
    """Make certificates for NODES in DIRECTORY: an authority of their own, and a certificate and key for each.

    An authority that is there already is used again, so nodes can be added later. Give each node ca.pem and its own two
    files, and keep ca.key to yourself. `make` may be left out.

    \b
      nosync certs tls n1 n2 n3
    """
    try:
        from nosync.replication.transport.certs import make_certificates, mend_keys  # noqa: PLC0415
    except ImportError as error:
        raise NosyncError(f"certificates need {error.name}: pip install 'nosync[daemon]'") from error
    for path, was in mend_keys(directory):
        out.print(f"{escape(str(path))} was readable by others (mode {was:o}), and is not any more", soft_wrap=True)
    for path in make_certificates(directory, list(nodes)):
        out.print(f"wrote {escape(str(path))}")


@certs.command()
@click.argument("directory", type=GivenPath(file_okay=False, exists=True))
@click.argument("what", nargs=-1, required=True)
def revoke(directory: Path, what: tuple[str, ...]) -> None:
    """Revoke certificates: WHAT is a node or reader, the file of a certificate, or a serial number.

    They are added to the file `revoked` in DIRECTORY. Give it to every node, in its tls directory: daemons look at it
    every second, end the links of those it names, and refuse them. Then make another certificate where one is wanted.

    \b
      nosync certs revoke tls n2
      nosync certs tls n2
    """
    try:
        from nosync.replication.transport.certs import revoke as revoke_in  # noqa: PLC0415
        from nosync.replication.transport.revocation import REVOKED  # noqa: PLC0415
    except ImportError as error:
        raise NosyncError(f"certificates need {error.name}: pip install 'nosync[daemon]'") from error
    added = revoke_in(directory, list(what))
    for serial, whose in added:
        out.print(f"revoked {serial:x} ({escape(whose)})", soft_wrap=True)
    listed = escape(str(directory / REVOKED))
    out.print(f"give {listed} to every node" if added else f"{listed} has them already", soft_wrap=True)
