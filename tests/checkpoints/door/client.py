"""A small WebHDFS client, which does what Hadoop's does: it asks, and sends a file to where it is sent on."""

from __future__ import annotations

import http.client
import json
import uuid
from typing import Any
from urllib.parse import quote, urlencode, urlsplit


class Refused(Exception):
    """A RemoteException. Attributes: `status`, `java_class`, `message`."""

    def __init__(self, status: int, said: dict[str, str]) -> None:
        super().__init__(f"{status} {said}")
        self.status, self.java_class, self.message = status, said["javaClassName"], said["message"]
        assert said["exception"] == self.java_class.rpartition(".")[2]

    @property
    def name(self) -> str:
        return self.java_class.rpartition(".")[2]


class Client:
    """Does operations below one address."""

    def __init__(self, address: str) -> None:
        found = urlsplit(address)
        assert found.hostname is not None
        self.path = found.path
        self.connection = http.client.HTTPConnection(found.hostname, found.port, timeout=30)

    def ask(self, method: str, path: str, op: str, body: Any = None, **parameters: object) -> http.client.HTTPResponse:
        at = f"{self.path}/{path}" if path else self.path
        query = urlencode({"op": op, "user.name": "anybody", **parameters})
        return self.send(method, f"/webhdfs/v1{quote(at)}?{query}", body)

    def send(self, method: str, target: str, body: Any = None) -> http.client.HTTPResponse:
        self.connection.request(method, target, body=body)
        answer = self.connection.getresponse()
        assert answer.getheader("Content-Type") is None
        return answer

    def done(self, answer: http.client.HTTPResponse) -> Any:
        """Returns what an answer says. Raises Refused."""
        text = answer.read()
        if answer.status >= 300:
            raise Refused(answer.status, json.loads(text)["RemoteException"])
        return json.loads(text) if text else None

    def do(self, method: str, path: str, op: str, **parameters: object) -> Any:
        return self.done(self.ask(method, path, op, **parameters))

    def status(self, path: str) -> dict[str, Any]:
        return dict(self.do("GET", path, "GETFILESTATUS")["FileStatus"])

    def list(self, path: str) -> list[str]:
        return [found["pathSuffix"] for found in self.do("GET", path, "LISTSTATUS")["FileStatuses"]["FileStatus"]]

    def read(self, path: str, **parameters: object) -> bytes:
        answer = self.ask("GET", path, "OPEN", **parameters)
        if answer.status != 200:
            self.done(answer)
        return answer.read()

    def make_dirs(self, path: str) -> None:
        assert self.do("PUT", path, "MKDIRS") == {"boolean": True}

    def create(self, path: str, data: Any, *, overwrite: bool = True) -> None:
        first = self.ask("PUT", path, "CREATE", overwrite=str(overwrite).lower())
        if first.status != 307:
            self.done(first)
        first.read()
        location = urlsplit(first.getheader("Location") or "")
        second = self.send("PUT", f"{location.path}?{location.query}", data)
        if second.status != 201:
            self.done(second)
        second.read()

    def rename(self, source: str, target: str, *, overwrite: bool = False) -> None:
        option = "OVERWRITE" if overwrite else "NONE"
        self.do("PUT", source, "RENAME", destination=f"{self.path}/{target}", renameoptions=option)

    def publish(self, path: str, data: bytes, *, overwrite: bool = False) -> None:
        """Writes a file as Spark does: to a hidden name, which is renamed."""
        directory, _, name = path.rpartition("/")
        hidden = f"{directory}/.{name}.{uuid.uuid4()}.tmp".lstrip("/")
        self.make_dirs(directory)
        self.create(hidden, data)
        self.rename(hidden, path, overwrite=overwrite)

    def delete(self, path: str, *, recursive: bool = True) -> bool:
        return bool(self.do("DELETE", path, "DELETE", recursive=str(recursive).lower())["boolean"])
