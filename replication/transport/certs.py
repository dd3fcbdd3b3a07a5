"""Certificates for mutual TLS between nodes: a small authority for tests and closed networks."""

from __future__ import annotations

import contextlib
import datetime
import os
import stat
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from nosync.lsm.errors import ReplicationError
from nosync.lsm.platform.env import Env, NotRegularFileError, opened_regular, storage_errors
from nosync.lsm.visible import visible
from nosync.replication.transport.codec import check_node_id
from nosync.replication.transport.revocation import REVOKED, parse_serial, read_revoked

DAYS = 825
_AUTHORITY = "ca"
_CA, _CA_KEY = "ca.pem", "ca.key"
_DIRECTORY_MODE, _CERTIFICATE_MODE, _KEY_MODE = 0o700, 0o644, 0o600
_SHORTEST_SERIAL = 16
"""Digits: nodes have short names, and serial numbers have forty digits or a few less."""
_SHARED_KEY_MODE = 0o640
"""The most that a node's key may have: jobs beside a daemon show its certificate, so its group may read the key."""


def make_certificates(directory: Path, nodes: list[str], *, now: datetime.datetime | None = None) -> list[Path]:
    """Writes `ca.pem`, and `<node>.pem` and `<node>.key` for each node. An authority that is there already is used.

    The node's id is the certificate's common name. Raises ReplicationError for an id that none can be, and where a link
    has one of the names, StorageError.
    """
    at = now or datetime.datetime.now(datetime.UTC)
    for node in nodes:
        check_node_id(node)
        if node == _AUTHORITY:
            raise ReplicationError(f"no node can be called {node!r}: {_CA} and {_CA_KEY} are the authority's")
    written: list[Path] = []
    with storage_errors("write certificates", directory):
        directory.mkdir(_DIRECTORY_MODE, parents=True, exist_ok=True)
        mend_keys(directory)
        if (directory / _CA).exists() or (directory / _CA_KEY).exists():
            authority, authority_key = _authority(directory, at)
        else:
            authority_key = ec.generate_private_key(ec.SECP256R1())
            # A name of its own: of two authorities in one ca.pem, while they are replaced, it tells the right one.
            authority = _certificate(f"nosync {Env().token()}", authority_key, None, None, at)
            written += _write(directory, _AUTHORITY, authority, authority_key)
        for node in nodes:
            key = ec.generate_private_key(ec.SECP256R1())
            written += _write(directory, node, _certificate(node, key, authority, authority_key, at), key)
    return written


def _authority(directory: Path, at: datetime.datetime) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Returns the authority that is there. Raises ReplicationError where a part of it is not, it is another kind of one, or
    has expired: what it signs is worth nothing.
    """
    for path in (directory / _CA, directory / _CA_KEY):
        if not path.exists():
            raise ReplicationError(
                f"{path} is not there, and the other half of the authority is: put it back to add nodes, or take an "
                "empty directory for a new authority, whose certificates every node then needs"
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
            f"{directory}: {_CA} and {_CA_KEY} are not a pair that nosync certs made; use the tool that made them, or "
            "an empty directory"
        )
    if authority.not_valid_after_utc <= at:
        raise ReplicationError(
            f"{directory / _CA}: the authority has expired on {authority.not_valid_after_utc:%Y-%m-%d}, and so has all that it "
            "signed. Make a new one in an empty directory (nosync certs NEW n1 n2 ...), add its ca.pem to that of every node, "
            "and then give each node its new certificate"
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
        .not_valid_after(_end(at, issuer))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
    )
    if issuer is not None:
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
    return builder.sign(issuer_key or key, hashes.SHA256())


def _end(at: datetime.datetime, issuer: x509.Certificate | None) -> datetime.datetime:
    """Returns when a certificate ends: not after the authority that signs it."""
    end = at + datetime.timedelta(days=DAYS)
    return end if issuer is None else min(end, issuer.not_valid_after_utc)


def mend_keys(directory: Path) -> list[tuple[Path, int]]:
    """Takes from keys the modes that no key should have. Returns those that had them, and which. Raises StorageError.

    The authority's is its owner's alone; a node's may be read by its group where that was allowed.
    """
    mended = []
    with storage_errors("mend the modes of keys in", directory):
        for path in sorted(directory.glob("*.key")):
            with contextlib.suppress(NotRegularFileError), opened_regular(path, os.O_RDONLY) as (fd, found):
                was = stat.S_IMODE(found.st_mode)
                mode = was & (_KEY_MODE if path.name == _CA_KEY else _SHARED_KEY_MODE)
                if mode != was:
                    os.fchmod(fd, mode)
                    mended.append((path, was))
    return mended


def revoke(directory: Path, what: list[str]) -> list[tuple[int, str]]:
    """Adds to the list of a directory: nodes whose certificate is there, other certificates' files, or serial numbers.

    Returns what was added: the serial number, and of whom. Raises ReplicationError for anything else, StorageError.
    """
    path = directory / REVOKED
    known, added = set(read_revoked(path)), []
    for one in what:
        serial, whose = _serial(directory, one)
        if serial not in known:
            known.add(serial)
            added.append((serial, whose))
    with storage_errors("revoke certificates in", directory):
        before = path.read_text() if path.exists() else ""
        lines = "".join(f"{serial:x}  # {whose}\n" for serial, whose in added)
        write_private(path, (before + "\n" * bool(before and before[-1] != "\n") + lines).encode(), _CERTIFICATE_MODE)
    return added


def _serial(directory: Path, what: str) -> tuple[int, str]:
    """Returns the serial number that is meant, and of whom it is."""
    file = next((path for path in (directory / f"{what}.pem", Path(what)) if path.is_file()), None)
    if file is None:
        if len(what) < _SHORTEST_SERIAL:
            raise ReplicationError(
                f"{directory / what}.pem is not there, and {what!r} is no serial number: name a node, the file of a "
                "certificate, or what `openssl x509 -serial` says of it"
            )
        return parse_serial(what, "the command line"), "by its serial number"
    with storage_errors("read", file):
        text = file.read_bytes()
    try:
        found = x509.load_pem_x509_certificate(text)
    except ValueError as error:
        raise ReplicationError(f"{file} is not the PEM file of a certificate: {error}") from error
    names = found.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if found.issuer == found.subject:
        raise ReplicationError(
            f"{file} is an authority's: it is replaced by another one (docs/daemons.md), and not revoked"
        )
    return found.serial_number, visible(str(names[0].value)) if names else visible(file.name)


def _write(directory: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> list[Path]:
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    written = [
        (directory / f"{name}.key", secret, _KEY_MODE),
        (directory / f"{name}.pem", certificate.public_bytes(serialization.Encoding.PEM), _CERTIFICATE_MODE),
    ]
    for path, _, _ in written:
        if path.is_symlink():
            raise ReplicationError(f"{path} is a symbolic link, and keys are written through none: remove it")
    for path, text, mode in written:
        write_private(path, text, mode)
    return [path for path, _, _ in reversed(written)]


def write_private(path: Path, text: bytes, mode: int) -> None:
    """Puts a file in the place of what has its name, whole or not at all; it has its mode from the beginning."""
    temporary = path.with_name(f".{path.name}.{Env().token()}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode), "wb") as file:
            os.fchmod(file.fileno(), mode)  # whatever the umask
            file.write(text)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
