"""Where an object store is, as users write it: `s3://bucket/prefix`. Credentials are never part of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from nosync.lsm.errors import InvalidInputError

MEMORY = "memory"
"""The objects of one process, for tests."""
SCHEMES = ("s3", "gs", "az", "file", MEMORY)
_FORMS = "s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or file:///DIRECTORY"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}\Z")
_PART = re.compile(r"[A-Za-z0-9_.=+-][A-Za-z0-9_.=+ -]{0,254}\Z")


@dataclass(frozen=True)
class RemoteUrl:
    """One place in an object store. `bucket` is empty, and `path` a directory, where the scheme is `file`."""

    scheme: str
    bucket: str
    path: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.path}" if self.path else f"{self.scheme}://{self.bucket}"


def is_remote_url(text: object) -> bool:
    """Returns whether a text is meant to be the URL of an object store, and not a path or a daemon's address."""
    return isinstance(text, str) and _URL.match(text) is not None


def parse_url(text: str) -> RemoteUrl:
    """Raises InvalidInputError for what is no place that copies can be kept in. The message has no credentials in it."""
    if not is_remote_url(text) or not text.isprintable():
        raise InvalidInputError(f"{text!r} is not the URL of an object store: expected {_FORMS}")
    found = urlsplit(text)
    scheme, path = found.scheme.lower(), found.path.strip("/")
    if scheme not in SCHEMES:
        advice = "; write s3://" if scheme in ("s3a", "s3n") else ""
        raise InvalidInputError(f"a remote of scheme {scheme}:// is not known: expected {_FORMS}{advice}")
    if "@" in text or ":" in found.netloc or found.query or found.fragment:
        raise InvalidInputError(
            f"the URL of the remote of scheme {scheme}:// has a user, a query or a fragment in it: leave them "
            "out. Credentials come from the environment, as the store's own tools take them (docs/remote.md)"
        )
    if scheme == "file":
        if found.netloc not in ("", "localhost") or not path:
            raise InvalidInputError(f"{text}: expected file:///DIRECTORY, an absolute path")
        return RemoteUrl(scheme, "", path)
    if not _BUCKET.match(found.netloc):
        raise InvalidInputError(f"{text}: {found.netloc!r} is no name of a bucket; expected {_FORMS}")
    bad = [part for part in path.split("/") if path and (part in (".", "..") or not _PART.match(part))]
    if bad:
        raise InvalidInputError(f"{text}: {bad[0]!r} in the prefix: use letters, digits and . _ = + - between slashes")
    return RemoteUrl(scheme, found.netloc, path)


def check_outside(text: str, root: Path) -> None:
    """Raises InvalidInputError where copies would be in the directory that they are of."""
    url = parse_url(text)
    if url.scheme == "file" and Path(f"/{url.path.lstrip('/')}").resolve().is_relative_to(root.resolve()):
        raise InvalidInputError(
            f"{text} lies in the store that is to be copied, and would be lost with it: give another place"
        )
