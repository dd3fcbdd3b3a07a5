"""Spark's daemon that forks Python workers (`pyspark.daemon`), silent about workers that the JVM needs no more.

The JVM ends a worker that had nothing to do for a minute by closing its socket. Over a Unix socket the worker notices
that it cannot say goodbye any more, and would print a stack trace for that. Spark starts this module by
`spark.python.daemon.module`. It must import nothing that starts threads, because it forks.
"""

from __future__ import annotations

import os
import socket

from pyspark import daemon

_worker = daemon.worker


def quiet_worker(sock: socket.socket, authenticated: bool) -> int:
    """Runs a worker for its whole life. Ends the process where the JVM listens no more."""
    try:
        return _worker(sock, authenticated)
    except BrokenPipeError:
        os._exit(1)


if __name__ == "__main__":
    daemon.worker = quiet_worker
    daemon.manager()
