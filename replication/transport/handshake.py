"""Why nothing comes of a connection to a daemon. gRPC says no more than that it is unavailable, so this looks below it.

It connects, shakes hands as gRPC would, and waits for the first bytes that a daemon sends.
"""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass
from typing import Any

PATIENCE_S = 1.0
_EXPIRED = 10
"""OpenSSL's X509_V_ERR_CERT_HAS_EXPIRED."""
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""What HTTP/2 begins with: its name and a frame of no settings."""
_ALERT = b"\x15"


@dataclass(frozen=True)
class Finding:
    """Says what is wrong, after "something takes connections". `is_refusal`: one side does not accept the other's
    certificate.
    """

    text: str
    is_refusal: bool = True


_SAYS_NOTHING = Finding(
    "says nothing: its process is stopped (SIGSTOP, a debugger), or its machine is overloaded: let it go on, or start "
    "it again",
    is_refusal=False,
)

_NOT_ACCEPTED = Finding(
    "ends the session: it does not accept the certificate that is shown here, which has expired or is of another "
    "authority"
)


def look(address: str, context: ssl.SSLContext | None, node: str) -> Finding | None:
    """Returns what keeps a session from coming about; None where nobody is there, or all is well. `context`: None:
    without TLS.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE_S) as connection:
            return _without_tls(connection) if context is None else _with_tls(connection, context, node)
    except (OSError, ValueError):
        return None


def _without_tls(connection: socket.socket) -> Finding | None:
    try:
        connection.sendall(_PREFACE)
        said = connection.recv(1)
    except TimeoutError:
        return _SAYS_NOTHING
    except OSError:
        said = b""
    if said and said != _ALERT:
        return None
    return Finding("does not answer without certificates")


def _with_tls(connection: socket.socket, context: ssl.SSLContext, node: str) -> Finding | None:
    context.set_alpn_protocols(["h2"])
    try:
        with context.wrap_socket(connection) as secure:
            shown: Any = secure.getpeercert()
            names = [value for part in shown["subject"] for kind, value in part if kind == "commonName"]
            if node and node not in names:
                return Finding(
                    f"has the certificate of {', '.join(map(str, names))}: the daemon there is not node {node}"
                )
            secure.sendall(_PREFACE)
            if secure.recv(1):
                return None
            return _NOT_ACCEPTED
    except TimeoutError:
        return _SAYS_NOTHING
    except ssl.SSLCertVerificationError as error:
        if error.verify_code == _EXPIRED:
            return Finding(
                "has a certificate that has expired: make another one for it (nosync certs), or see to the clocks"
            )
        return Finding(
            f"has a certificate that is not accepted here ({error.verify_message}): the certificates are not of one "
            "authority, or a clock is wrong"
        )
    except ssl.SSLError as error:
        said = (error.reason or str(error)).lower().replace("_", " ")
        if "alert" not in said:
            return Finding(f"does not speak TLS as daemons do ({said})")
        why = "it has expired" if "expired" in said else "the certificates are not of one authority"
        return Finding(f"does not accept the certificate that is shown here ({said}): {why}")
    except OSError:
        return _NOT_ACCEPTED
