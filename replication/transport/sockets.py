"""Unix sockets: the way in of who owns a data directory, and without TLS of peers that run on this machine as the same
user.

A socket is reached by who may open it, which the system checks on every connection. So nothing secret goes over it that
whoever took a daemon's port could be told, and what strangers do on that port holds up nobody here.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import weakref
from collections.abc import Callable
from pathlib import Path

from nosync.lsm.errors import ReplicationError
from nosync.lsm.platform.env import Env, storage_errors

SOCKET_FILE = "daemon.sock"
"""In the data directory, mode 0600."""
_STATE_VARIABLE = "XDG_STATE_HOME"


class SocketPath:
    """The address of a socket, for gRPC. It goes by a descriptor of the directory: a socket's path may have 107 bytes
    only.
    """

    def __init__(self, path: Path) -> None:
        """Raises ReplicationError where there is no such directory."""
        try:
            directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ReplicationError(f"cannot reach a daemon by {path}: {error.strerror}") from error
        self._close = weakref.finalize(self, os.close, directory)  # also where whoever used the address forgets it
        self.target = f"unix:/proc/self/fd/{directory}/{path.name}"

    def close(self) -> None:
        """Closes the directory of the socket. To be called after whoever used the address has ended."""
        self._close()


def answers(path: Path) -> bool:
    """Returns whether a socket is there itself, no link to one, and this user may open it, and a process listens."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return False
        address = SocketPath(path)
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(1.0)
                probe.connect(address.target.removeprefix("unix:"))
        finally:
            address.close()
    except (OSError, ReplicationError):
        return False
    return True


def listen_at(path: Path, env: Env, listen: Callable[[str], object]) -> None:
    """Has a server listen on a socket that nobody else can open. What was there of a process that was killed is
    replaced.

    It is made in a directory that only this user can enter, and moved once it has its mode. Raises StorageError.
    """
    aside = path.with_name(f".{env.token()}")
    # When gRPC ends it removes this name by the descriptor, which may stand for another directory by then: none has it.
    made = aside / f"nosync-{aside.name[1:]}"
    with storage_errors("listen on", path):
        aside.mkdir(mode=0o700)
        try:
            address = SocketPath(made)
            try:
                listen(address.target)
            except RuntimeError as error:  # as gRPC says it
                raise ReplicationError(f"cannot listen on {path}: its file system has no sockets ({error})") from None
            finally:
                address.close()
            made.chmod(0o600)
            made.replace(path)
        finally:
            made.unlink(missing_ok=True)
            aside.rmdir()


def sockets_of_user() -> Path:
    """Returns where daemons of this user on this machine find each other, if they are not told of another directory."""
    state = os.environ.get(_STATE_VARIABLE)
    try:
        return (Path(state) if state else Path.home() / ".local" / "state") / "nosync"
    except RuntimeError as error:  # there is no home
        raise ReplicationError(
            f"this user has no home directory ({error}), where peers without TLS find each other: give --sockets DIR"
        ) from error


class Meeting:
    """A directory of this user's where daemons without TLS find each other, by the ports on which they listen."""

    def __init__(self, directory: Path, env: Env) -> None:
        self.directory, self._env = directory, env

    def listen_at(self, port: int, listen: Callable[[str], object]) -> Path:
        """Raises ReplicationError where another daemon of this user has this port, StorageError."""
        path = self.socket_of(port)
        if answers(path):
            raise ReplicationError(
                f"another daemon of this user listens on port {port}, of another address of this machine perhaps: "
                f"without TLS they find each other by ports ({path}), so --listen on another port"
            )
        listen_at(path, self._env, listen)
        return path

    def socket_of(self, port: int) -> Path:
        return self.directory / f"{port}.sock"

    def is_made(self) -> bool:
        return os.path.lexists(self.directory)

    def make(self) -> None:
        """Raises ReplicationError where it cannot be made, or is not of this user alone."""
        try:
            self.directory.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                self.directory.mkdir(mode=0o700)
        except OSError as error:
            raise ReplicationError(
                f"cannot make {self.directory}, where peers without TLS meet: {error.strerror}: give --sockets DIR, or "
                "--tls"
            ) from error
        self.check()

    def check(self) -> None:
        """Raises ReplicationError where others could put sockets of theirs into it."""
        try:
            found = os.lstat(self.directory)
        except OSError as error:
            raise ReplicationError(
                f"cannot look into {self.directory}, where peers without TLS meet: {error}"
            ) from error
        is_private = stat.S_ISDIR(found.st_mode) and not stat.S_IMODE(found.st_mode) & 0o077
        if not is_private or found.st_uid != os.geteuid():
            raise ReplicationError(
                f"{self.directory}, where peers without TLS meet, is not a directory of this user alone: expected mode "
                "0700 and this user as its owner. Mend that, or give --sockets another one"
            )
