"""Certificates for mutual TLS between nodes: a small authority for tests and closed networks."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from nosync.lsm.errors import ReplicationError
from nosync.lsm.platform.env import Env, storage_errors
from nosync.replication.transport.codec import check_node_id

DAYS = 825
_AUTHORITY = "ca"
_CA, _CA_KEY = "ca.pem", "ca.key"


def make_certificates(directory: Path, nodes: list[str], *, now: datetime.datetime | None = None) -> list[Path]:
    """Writes `ca.pem`, and `<node>.pem` and `<node>.key` for each node. An authority that is there already is used.

    The node's id is the certificate's common name. Raises ReplicationError for an id that none can be, StorageError.
    """
    at = now or datetime.datetime.now(datetime.UTC)
    for node in nodes:
        check_node_id(node)
        if node == _AUTHORITY:
            raise ReplicationError(f"no node can be called {node!r}: {_CA} and {_CA_KEY} are the authority's")
    written: list[Path] = []
    with storage_errors("write certificates", directory):
        directory.mkdir(parents=True, exist_ok=True)
        if (directory / _CA).exists() or (directory / _CA_KEY).exists():
            authority, authority_key = _authority(directory)
        else:
            authority_key = ec.generate_private_key(ec.SECP256R1())
            # A name of its own: of two authorities in one ca.pem, as while they are replaced, the right one is found by it.
            authority = _certificate(f"nosync {Env().token()}", authority_key, None, None, at)
            written += _write(directory, _AUTHORITY, authority, authority_key)
        for node in nodes:
            key = ec.generate_private_key(ec.SECP256R1())
            written += _write(directory, node, _certificate(node, key, authority, authority_key, at), key)
    return written


def _authority(directory: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """That which is there. Raises ReplicationError where a part of it is not, or it is another kind of one."""
    for path in (directory / _CA, directory / _CA_KEY):
        if not path.exists():
            raise ReplicationError(
                f"{path} is not there, and the other half of the authority is: put it back to add nodes, or take an empty "
                "directory for a new authority, whose certificates every node then needs"
            )
    try:
        authority = x509.load_pem_x509_certificate((directory / _CA).read_bytes())
        key = serialization.load_pem_private_key((directory / _CA_KEY).read_bytes(), None)
    except (ValueError, TypeError) as error:
        raise ReplicationError(
            f"{directory}: {_CA} and {_CA_KEY} are not PEM files of an authority: {error}"
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != authority.public_key():
        raise ReplicationError(
            f"{directory}: {_CA} and {_CA_KEY} are not a pair that nosync certs made; use the tool that made them, or an "
            "empty directory"
        )
    return authority, key


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Certificate | None,
    issuer_key: ec.EllipticCurvePrivateKey | None,
    at: datetime.datetime,
) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(at - datetime.timedelta(minutes=5))
        .not_valid_after(at + datetime.timedelta(days=DAYS))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
    )
    if issuer is not None:
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
    return builder.sign(issuer_key or key, hashes.SHA256())


def _write(directory: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> list[Path]:
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    paths = [directory / f"{name}.pem", directory / f"{name}.key"]
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    with open(os.open(paths[1], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(secret)
    return paths
