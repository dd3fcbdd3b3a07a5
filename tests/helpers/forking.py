"""Daemons by a fork of a process that has imported everything. A daemon takes a second of processor time to import what it
needs, and tests start hundreds.

The process that forks is the fork server of `multiprocessing`. What it starts is a process of its own that runs
`nosync.cli.main`, with its own output, environment and exit code.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.helpers.preloaded"])


class ForkedProcess:
    """A process that was started here. It does what a `subprocess.Popen` does."""

    def __init__(self, process: BaseProcess) -> None:
        assert process.pid is not None, "it was started"
        self._process, self.pid = process, process.pid

    def poll(self) -> int | None:
        """Returns the exit code; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit code. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("nosync", timeout or 0.0)
        return code

    def send_signal(self, sig: int) -> None:
        """Sends a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        """Ends it at once."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Asks it to end."""
        self.send_signal(signal.SIGTERM)


def start_forked(arguments: Sequence[str], log: Path, env: Mapping[str, str]) -> ForkedProcess:
    """Runs `nosync` with arguments; what it says goes to the end of `log`. See `Daemons.start_process`."""
    process = _CONTEXT.Process(target=_run, args=(list(arguments), str(log), dict(env)))
    process.start()
    return ForkedProcess(process)


def _run(arguments: list[str], log: str, env: dict[str, str]) -> None:
    said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for fd in (1, 2):
        os.dup2(said, fd)
    os.close(said)
    os.environ.clear()
    os.environ.update(env)
    from nosync.cli import main

    main(arguments)
