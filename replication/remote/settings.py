"""Settings of the copies in an object store, apart from the components that use them."""

from __future__ import annotations

from dataclasses import dataclass

from nosync.lsm.errors import InvalidInputError
from nosync.replication.remote.url import parse_url

MIB = 1 << 20


@dataclass(frozen=True)
class RemoteSettings:
    """Says where copies go and how. It is frozen; every field states unit, default, and what it costs."""

    url: str
    """s3://BUCKET/PREFIX, gs://, az:// or file:///. Credentials come from the environment."""
    flush_s: float = 10.0
    """How often new files are put, together. So much more is lost where all nodes are; a PUT costs money each time."""
    flush_bytes: int = 16 * MIB
    """They are put sooner where so many bytes wait; so much memory is taken at most."""
    large_bytes: int = 8 * MIB
    """A file of at least so many bytes is an object of its own, in parts of so many."""
    grace_s: float = 3600.0
    """How long what nothing needs any more stays, for readers that are about to fetch it."""
    close_s: float = 10.0
    """How long closing the store waits for what was not put yet."""

    def __post_init__(self) -> None:
        parse_url(self.url)
        for name in ("flush_s", "grace_s", "close_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise InvalidInputError(f"{name} is {value!r}, expected seconds >= 0")
        for name in ("flush_bytes", "large_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidInputError(f"{name} is {value!r}, expected a number of bytes >= 1")
