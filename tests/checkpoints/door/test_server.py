"""Who may listen where, and doors that are met from other hosts."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import urllib.request
from pathlib import Path

import pytest

import nosync
from nosync.checkpoints.door import server
from nosync.checkpoints.door.server import Server, is_loopback
from nosync.lsm.errors import InvalidInputError
from nosync.replication.transport.certs import make_certificates
from nosync.testing.daemon_cluster import eventually


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", "", "localhost.example.org"])
def test_what_others_can_meet_needs_a_certificate(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(InvalidInputError, match="give a certificate"):
        Server(host, 0)


@pytest.mark.parametrize("asks_callers", [False, True])
def test_a_door_with_a_certificate(tmp_path: Path, asks_callers: bool) -> None:
    tls = tmp_path / "tls"
    make_certificates(tls, ["n1", "caller"])
    ca = {"ca": tls / "ca.pem"} if asks_callers else {}
    with nosync.checkpoints.serve(
        tmp_path / "data", host="0.0.0.0", certificate=tls / "n1.pem", key=tls / "n1.key", **ca
    ) as door:
        assert door.address("q").startswith("swebhdfs://0.0.0.0:")
        context = ssl.create_default_context(cafile=str(tls / "ca.pem"))
        context.check_hostname = False
        url = f"https://127.0.0.1:{door.port}/webhdfs/v1/?op=GETHOMEDIRECTORY"
        if asks_callers:
            with pytest.raises(OSError):  # noqa: PT011 - in the handshake, or after it
                urllib.request.urlopen(url, context=context, timeout=10).read()
            context.load_cert_chain(tls / "caller.pem", tls / "caller.key")
        with urllib.request.urlopen(url, context=context, timeout=10) as answer:
            assert json.loads(answer.read()) == {"Path": "/"}
        with pytest.raises(OSError):  # noqa: PT011 - not without TLS
            urllib.request.urlopen(url.replace("https", "http"), timeout=10).read()


def test_more_connections_than_a_door_has_files_for_are_sent_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_most_connections", lambda: 4)
    with nosync.checkpoints.serve(tmp_path / "data") as door:
        url = f"http://127.0.0.1:{door.port}/webhdfs/v1/?op=GETHOMEDIRECTORY"
        with contextlib.ExitStack() as held:
            for _ in range(4):
                idle = held.enter_context(socket.create_connection(("127.0.0.1", door.port), timeout=10))
                idle.sendall(b"GET /webhdfs")
            with pytest.raises(OSError):  # noqa: PT011 - reset, while it is sent or after
                urllib.request.urlopen(url, timeout=10)
        eventually("the door answers again", lambda: is_answered(url))


def is_answered(url: str) -> bool:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return bool(json.loads(answer.read()) == {"Path": "/"})
