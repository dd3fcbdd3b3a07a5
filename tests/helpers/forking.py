"""Starts commands of nosync by a fork of a process that has imported everything. For tests: a daemon takes a second of
processor time to import what it needs, and tests start hundreds.

What is started is a process of its own that runs `nosync.cli.main`, with its own output, environment and exit code.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import nosync
from nosync.cli import main
from nosync.lsm.platform.process import leave_out_pandas

_POLL_S = 0.01


class ForkedProcess:
    """A process that was started here. It does what a `subprocess.Popen` does."""

    def __init__(self, forker: Forker, pid: int) -> None:
        self._forker, self.pid = forker, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Returns the exit code; None while it runs."""
        if self.returncode is None:
            self.returncode = self._forker.ask({"wait": self.pid})["code"]
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit code. Raises subprocess.TimeoutExpired."""
        end_s = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() >= end_s:
                raise subprocess.TimeoutExpired("nosync", timeout or 0.0)
            time.sleep(_POLL_S)
        return code

    def send_signal(self, sig: int) -> None:
        """Sends a signal, if it still runs: its number is not given to another process before its code was asked for."""
        if self.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        """Ends it at once."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Asks it to end."""
        self.send_signal(signal.SIGTERM)


class Forker:
    """The process that has imported everything, and forks. Several threads may use it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())], pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": str(Path(nosync.__file__).parents[1])},
            )  # fmt: skip
        self._socket, self._said, self._lock = ours, ours.makefile("rb"), threading.Lock()

    def start(self, arguments: Sequence[str], log: Path, env: Mapping[str, str]) -> ForkedProcess:
        """Runs `nosync` with arguments; what it says goes to the end of `log`."""
        asked = {"run": list(arguments), "log": str(log), "env": dict(env), "cwd": os.getcwd()}
        return ForkedProcess(self, int(self.ask(asked)["pid"]))

    def ask(self, what: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what the process answers."""
        with self._lock:
            self._socket.sendall(json.dumps(what).encode() + b"\n")
            answer = self._said.readline()
        if not answer:
            raise RuntimeError("the process that starts daemons for tests has ended")
        return dict(json.loads(answer))

    def close(self) -> None:
        """Ends the process that forks, and nothing that it started."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._process.wait()


def _serve(fd: int) -> list[str]:
    """Forks for who asks at a socket. Returns in each child, with the arguments that it has to run with."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tests end it
    with socket.socket(fileno=fd) as asking, asking.makefile("rb") as lines:
        for line in lines:
            asked = json.loads(line)
            if "wait" in asked:
                answer = {"code": _code_of(asked["wait"])}
            else:
                pid = os.fork()
                if not pid:
                    break
                answer = {"pid": pid}
            asking.sendall(json.dumps(answer).encode() + b"\n")
        else:
            os._exit(0)
    _become(asked)
    return list(asked["run"])


def _code_of(pid: int) -> int | None:
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def _become(asked: Mapping[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for fd, to in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(fd, to)
    for fd in (nothing, log):
        os.close(fd)
    os.environ.clear()
    os.environ.update(asked["env"])
    time.tzset()
    os.chdir(asked["cwd"])


def _import_all() -> None:
    leave_out_pandas()  # as a daemon does
    for name in ("nosync.cli", "nosync.replication.daemon.process", "nosync.replication.remote.level", "uvicorn"):
        with suppress(ImportError):  # of an extra
            importlib.import_module(name)


if __name__ == "__main__":
    _import_all()
    arguments = _serve(int(sys.argv[1]))
    sys.argv[:] = ["nosync", *arguments]
    main(arguments)
