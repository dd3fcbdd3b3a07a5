"""When the certificate of a node runs out: from then on no peer takes a connection of it, and nothing else says so before."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

WARNED_BEFORE = datetime.timedelta(days=30)


@dataclass(frozen=True)
class Expiry:
    """The end of the certificate that a process has loaded. `path`: of its file, which may be another one by now."""

    path: Path
    at: datetime.datetime

    @classmethod
    def of(cls, path: Path) -> Expiry:
        """`path`: of a certificate, in PEM, that was checked already."""
        from cryptography import x509  # noqa: PLC0415 - takes a moment, and only daemons with certificates need it

        return cls(path, x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc)

    def warning(self, now: datetime.datetime) -> str | None:
        """Returns what to do about a certificate that runs out soon; None where it does not."""
        left = self.at - now
        if left > WARNED_BEFORE:
            return None
        when = f"runs out in {left.days} days" if left > datetime.timedelta() else "has run out"
        return (
            f"the certificate {self.path} {when} ({self.at:%Y-%m-%d %H:%M} UTC), and then peers refuse this node: make another "
            "one with nosync certs, and restart the daemon with it"
        )
