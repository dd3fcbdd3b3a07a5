"""Addresses, HOST:PORT: what one says, whether it is of this host, and whether a daemon can listen there."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
from collections.abc import Iterable

from nosync.lsm.errors import ReplicationError
from nosync.lsm.model.timestamp import is_number


def host_of(address: str) -> str:
    """Returns the host of HOST:PORT. Raises ReplicationError for anything else."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not is_number(port) or int(port) > 65535:
        raise ReplicationError(f"address {address!r} is not HOST:PORT, with a port up to 65535")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ReplicationError(f"address {address!r}: write an IPv6 address as [{host}]:{port}")
    try:
        host.encode("idna")
    except UnicodeError:  # whoever looks it up would raise it
        raise ReplicationError(f"address {address!r}: {host!r} is not the name of a host") from None
    return host.strip("[]")


def is_loopback(address: str) -> bool:
    """Returns whether only this machine can reach an address."""
    host = host_of(address)
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def is_of_this_host(address: str) -> bool:
    """Returns whether an address is one of this machine's. Names are not looked up: who wrote one would hear of it."""
    try:
        host = host_of(address)
    except ReplicationError:
        return False
    if is_loopback(address):
        return True
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return host in (socket.gethostname(), socket.getfqdn())
    if ip.is_unspecified:
        return True
    try:
        with socket.socket(socket.AF_INET if ip.version == 4 else socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True


def check_addresses(me: str, listen: str, peers: Iterable[str], *, is_secure: bool) -> None:
    """Raises ReplicationError for what is no HOST:PORT, and off loopback without certificates."""
    peers = list(peers)
    reached = [is_loopback(address) for address in (listen, *peers)]
    twice = next((address for i, address in enumerate(peers) if address in peers[:i]), None)
    if twice is not None:
        raise ReplicationError(
            f"two peers of node {me} are said to listen on {twice}: each node has an address of its own. To replace a "
            "node by another one in its place, give nosync peers --remove and --add in one call"
        )
    no_port = next((address for address in peers if address.endswith(":0")), None)
    if no_port is not None:
        raise ReplicationError(f"a peer of node {me} is said to listen on {no_port}: say the port that it listens on")
    if not listen.endswith(":0") and any(_is_same(listen, address) for address in peers):
        raise ReplicationError(
            f"node {me} listens on {listen}, and a peer is said to: each node has an address of its own"
        )
    if not is_secure and not all(reached):
        raise ReplicationError(
            f"node {me} listens on {listen} with peers {', '.join(peers) or 'none'}: off loopback both sides need "
            "certificates: make them with nosync certs, and give --tls DIR"
        )


def _is_same(a: str, b: str) -> bool:
    """Returns whether two addresses are one: that of this host has several names."""
    (host, _, port), (other, _, other_port) = a.rpartition(":"), b.rpartition(":")
    return port == other_port and (
        host == other or (is_loopback(a) and is_loopback(b) and "localhost" in (host, other))
    )


def check_free(listen: str) -> None:
    """gRPC would print a line of its own, and tell no reason. Raises ReplicationError."""
    host, _, port = listen.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        refused: list[OSError] = []
        for family, kind, protocol, _, address in found:
            try:
                with socket.socket(family, kind, protocol) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(address)
            except OSError as error:  # a name may stand for an address that this machine has not, such as that of IPv6
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                refused.append(error)
        if found and len(refused) == len(found):
            raise refused[0]
    except OSError as error:
        advice = {
            errno.EADDRINUSE: (
                "another program has this port, a daemon that still runs perhaps: stop it, or --listen on another"
            ),
            errno.EACCES: "ports below 1024 are for root: --listen on a higher one",
            errno.EADDRNOTAVAIL: (
                "no interface of this machine has that address: --listen on one that has, or 0.0.0.0 for all"
            ),
        }.get(error.errno or 0, "give --listen an address of this machine")
        raise ReplicationError(
            f"cannot listen on {listen}: {(error.strerror or str(error)).lower()}; {advice}"
        ) from None
