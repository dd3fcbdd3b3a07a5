"""Who may listen where, and doors that are met from other hosts."""

from __future__ import annotations

import json
import ssl
import urllib.request
from pathlib import Path

import pytest

import nosync
from nosync.checkpoints.door.server import Server, is_loopback
from nosync.lsm.errors import InvalidInputError
from nosync.replication.transport.certs import make_certificates


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
