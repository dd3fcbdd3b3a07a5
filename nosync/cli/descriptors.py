"""The descriptors of a process that serves."""

from __future__ import annotations

import contextlib
import resource


def take_descriptors() -> None:
    """Lets this process have as many descriptors as it may: connections of strangers and files of the store share them."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # a sandbox may forbid it
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
