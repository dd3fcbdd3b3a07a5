"""The process of a daemon: signals end it, and systemd is told of it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable

from nosync.replication.daemon.daemon import Daemon


def serve(daemon: Daemon, ready: Callable[[], object], ending: Callable[[], object] = lambda: None) -> None:
    """Serves until SIGTERM or SIGINT. `ready` is called once it does, and `ending` before it ends.

    What `ready` raises ends it as well.
    """
    stop = threading.Event()
    reading, writing = socket.socketpair()
    with reading, writing:
        # Whichever thread gets the signal, a byte comes here and wakes the one that runs handlers.
        writing.setblocking(False)
        signal.set_wakeup_fd(writing.fileno())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        daemon.start()
        try:
            ready()
            _notify_systemd("READY=1")
            while not stop.is_set():
                reading.recv(1)
        finally:
            signal.set_wakeup_fd(-1)
            _notify_systemd("STOPPING=1")
            with contextlib.ExitStack() as last:
                last.callback(daemon.stop)
                ending()


def _notify_systemd(state: str) -> None:
    """Tells systemd, where it asked to be told (Type=notify)."""
    path = os.environ.get("NOTIFY_SOCKET")
    if not path:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.connect("\0" + path[1:] if path.startswith("@") else path)
        out.sendall(state.encode())
