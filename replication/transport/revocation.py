"""Certificates that are revoked before they run out: a list of their serial numbers in the tls directory.

    <tls>/revoked      a serial number in hexadecimal a line; what follows # is for people

`nosync certs revoke` writes it; give it to every node as ca.pem was given. Daemons look at it again every second, and
when it has changed they end the links of those it names. A list that cannot be read, or that is gone, revokes what the
one before it did, and is logged: an editor may just be writing it, or the directory was copied without it. An empty
list revokes nothing.
"""

from __future__ import annotations

import functools
import logging
import os
import stat
import threading
from pathlib import Path

from nosync.lsm.errors import ReplicationError

log = logging.getLogger("nosync.replication")

REVOKED = "revoked"
LOOK_EVERY_S = 1.0
_MOST_BYTES = 16 << 20


def read_revoked(path: Path) -> frozenset[int]:
    """Returns the serial numbers of a list; none where there is no list. Raises ReplicationError naming the line that
    is none.
    """
    try:
        # It may be a link, as in a Kubernetes secret, but nothing that never ends.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return frozenset()
    except OSError as error:
        raise ReplicationError(f"cannot read {path}: {error.strerror}") from error
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_BYTES:
            raise ReplicationError(f"{path} is no file of serial numbers: remove it, or put the list there")
        lines = file.read(_MOST_BYTES).decode(errors="replace").splitlines()
    serials = set()
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if text:
            serials.add(parse_serial(text, f"{path}, line {number}"))
    return frozenset(serials)


def parse_serial(text: str, where: str) -> int:
    """Returns a serial number as certificates show it. Raises ReplicationError."""
    digits = text.replace(":", "")
    if not digits.isascii() or not digits.isalnum():
        raise ReplicationError(f"{where}: {text!r} is no serial number, expected hexadecimal digits")
    try:
        return int(digits, 16)
    except ValueError:
        raise ReplicationError(f"{where}: {text!r} is no serial number, expected hexadecimal digits") from None


@functools.lru_cache(maxsize=1024)
def serial_of(pem: bytes) -> int:
    """Returns the serial number of a certificate. Raises ReplicationError for what is none."""
    from cryptography import x509  # noqa: PLC0415 - takes a moment, and is needed only where something is revoked

    try:
        return x509.load_pem_x509_certificate(pem).serial_number
    except ValueError as error:
        raise ReplicationError(f"the caller shows what is no certificate: {error}") from None


class Revocations:
    """The list of a tls directory, as it is now. Safe to ask from any thread."""

    def __init__(self, directory: Path) -> None:
        """Raises ReplicationError where there is a list that cannot be read."""
        self._path = directory / REVOKED
        self._lock = threading.Lock()
        self._seen = self._stamp()
        self._serials = read_revoked(self._path)
        self.additions = 0
        """How often the list was found to revoke more than before: whoever acts on that remembers up to where it has."""

    @property
    def serials(self) -> frozenset[int]:
        return self._serials

    def look(self) -> None:
        """Reads the list again if it has changed."""
        with self._lock:
            stamp = self._stamp()
            if stamp == self._seen:
                return
            self._seen = stamp
            try:
                found = read_revoked(self._path)
                if stamp is None and self._serials:
                    raise ReplicationError(f"{self._path} is gone: put it back, or an empty file to revoke nothing")
            except ReplicationError as error:
                log.error("the list of revoked certificates from before counts: %s", error)
                return
            self.additions += bool(found - self._serials)
            self._serials = found
            log.warning("%s names %d certificates", self._path, len(found))

    def check(self, pem: bytes, whose: str) -> None:
        """Raises ReplicationError where a certificate is revoked."""
        if self._serials and serial_of(pem) in self._serials:
            raise _revoked(whose, serial_of(pem))

    def check_serial(self, serial: int, whose: str) -> None:
        """Does what `check` does, by the serial number."""
        if serial in self._serials:
            raise _revoked(whose, serial)

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size


def _revoked(whose: str, serial: int) -> ReplicationError:
    return ReplicationError(
        f"the certificate of {whose} was revoked (serial {serial:x}): make another one with nosync certs, and give it "
        "to who should have it"
    )
