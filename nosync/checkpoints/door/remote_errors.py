"""What the Hadoop client is told when something cannot be done: it throws the Java exception of that name."""

from __future__ import annotations

import json

_HADOOP, _HADOOP_FS = "org.apache.hadoop.security.", "org.apache.hadoop.fs."


class RemoteError(Exception):
    """An answer that the client turns into a Java exception. `status`: the HTTP status that goes with it."""

    def __init__(self, status: int, java_class: str, message: str, *, ends_connection: bool = False) -> None:
        super().__init__(message)
        self.status, self.java_class, self.message = status, java_class, message
        self.ends_connection = ends_connection
        """Says that the rest of the request is not read."""

    def body(self) -> bytes:
        """Returns the JSON of WebHDFS for an exception."""
        name = self.java_class.rpartition(".")[2]
        said = {"exception": name, "javaClassName": self.java_class, "message": self.message}
        return json.dumps({"RemoteException": said}).encode()


def not_found(path: str) -> RemoteError:
    """Returns the error for a file that is not there."""
    return RemoteError(404, "java.io.FileNotFoundException", f"/{path}: there is no such file or directory")


def already_exists(path: str) -> RemoteError:
    """Returns the error for a name that is taken."""
    return RemoteError(403, f"{_HADOOP_FS}FileAlreadyExistsException", f"/{path}: is there already")


def no_directory(path: str) -> RemoteError:
    """Returns the error for a file where a directory has to be."""
    return RemoteError(403, f"{_HADOOP_FS}ParentNotDirectoryException", f"/{path}: a part of it is no directory")


def not_empty(path: str) -> RemoteError:
    """Returns the error for a directory that has something in it."""
    return RemoteError(403, f"{_HADOOP_FS}PathIsNotEmptyDirectoryException", f"/{path}: is not empty")


def denied(message: str, *, ends_connection: bool = False) -> RemoteError:
    """Returns the error for what the caller may not do."""
    return RemoteError(403, f"{_HADOOP}AccessControlException", message, ends_connection=ends_connection)


def illegal(message: str) -> RemoteError:
    """Returns the error for a request that means nothing."""
    return RemoteError(400, "java.lang.IllegalArgumentException", message)


def unsupported(message: str) -> RemoteError:
    """Returns the error for what the door does not do."""
    return RemoteError(400, "java.lang.UnsupportedOperationException", message)


def refused(message: str, status: int = 403, *, ends_connection: bool = False) -> RemoteError:
    """Returns the error for what goes wrong otherwise."""
    return RemoteError(status, "java.io.IOException", message, ends_connection=ends_connection)
