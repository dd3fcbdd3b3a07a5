"""The door over real HTTP: what Spark's client asks, and what nobody should."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import nosync
from nosync.checkpoints.door.api import Door
from nosync.checkpoints.door.app import DoorApp
from nosync.checkpoints.door.exchange import Limits
from nosync.checkpoints.door.served_checkpoints import DoorSettings, ServedCheckpoints
from nosync.checkpoints.door.server import Server
from nosync.lsm.platform.env import Env
from nosync.testing.daemon_cluster import eventually
from tests.checkpoints.door.client import Client, Refused


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    with nosync.checkpoints.serve(tmp_path / "data") as opened:
        yield opened


@pytest.fixture
def client(door: Door) -> Client:
    return Client(door.address("words"))


def test_a_file_on_its_way(client: Client, tmp_path: Path) -> None:
    client.make_dirs("offsets")
    client.create("offsets/.0.tmp", b"what it reads")
    assert client.list("offsets") == [".0.tmp"]
    client.rename("offsets/.0.tmp", "offsets/0")
    assert client.list("offsets") == ["0"]
    assert client.read("offsets/0") == b"what it reads"
    assert client.read("offsets/0", offset=5, length=2) == b"it"
    assert client.read("offsets/0", offset=13) == b""
    assert client.read("offsets/0", offset=10, length=99) == b"ads"
    status = client.status("offsets/0")
    assert (status["type"], status["length"]) == ("FILE", 13)
    kept = tmp_path / "data" / "checkpoints" / "words" / "offsets" / "0"
    eventually("the file is kept", kept.exists, 10.0)
    assert client.delete("offsets/0")
    assert not client.delete("offsets/0")
    assert client.list("offsets") == []
    assert kept.read_bytes() == b"what it reads", "what Spark removes is kept"


def test_a_large_file_goes_through_in_pieces(client: Client) -> None:
    data = bytes(range(256)) * 40_000
    client.create("state/0/0/SSTs/a.sst", data)
    client.create("state/0/0/SSTs/b.sst", (data[i : i + 99_999] for i in range(0, len(data), 99_999)))  # chunked
    assert client.read("state/0/0/SSTs/a.sst") == data
    assert client.read("state/0/0/SSTs/b.sst", offset=1234, length=5_000_000) == data[1234:5_001_234]


def test_what_is_asked_without_a_path_is_the_same_for_all(door: Door) -> None:
    for address in (door.address("words"), f"webhdfs://127.0.0.1:{door.port}"):
        client = Client(address)
        client.path = ""
        assert client.done(client.send("GET", "/webhdfs/v1/?op=GETHOMEDIRECTORY&user.name=a")) == {"Path": "/"}
        defaults = client.done(client.send("GET", "/webhdfs/v1/?op=GETSERVERDEFAULTS&user.name=a"))
        assert defaults["FsServerDefaults"]["replication"] == 1


@pytest.mark.few(10, "make checkpoints")
@pytest.mark.parametrize("op", ["GETFILESTATUS", "LISTSTATUS", "OPEN", "NONSENSE", "", "GETCONTENTSUMMARY"])
@pytest.mark.parametrize("path", ["", "/", "/words", "/words/metadata", "/0000/words", "/%00", "/../.."])
def test_without_the_secret(client: Client, path: str, op: str) -> None:
    client.publish("metadata", b"{}")
    with pytest.raises(Refused) as refused:
        client.done(client.send("GET", f"/webhdfs/v1{path}?op={op}&user.name=hdfs"))
    assert (refused.value.status, refused.value.name) == (403, "AccessControlException")
    assert "words" not in refused.value.message


def test_a_destination_without_the_secret(client: Client) -> None:
    client.create("x", b"1")
    for destination in (
        "/words/y",
        "/y",
        "",
        client.path + "/../other/y",
        client.path.replace("words", "other") + "/y",
    ):
        with pytest.raises(Refused) as refused:
            client.do("PUT", "x", "RENAME", destination=destination, renameoptions="NONE")
        assert refused.value.name in ("AccessControlException", "IllegalArgumentException")
    assert client.list("") == ["x"]


@pytest.mark.parametrize(
    ("method", "path", "op", "parameters", "status", "name"),
    [
        ("GET", "x", "GETFILESTATUS", {}, 404, "FileNotFoundException"),
        ("GET", "x", "GETFILELINKSTATUS", {}, 404, "FileNotFoundException"),
        ("GET", "x", "LISTSTATUS", {}, 404, "FileNotFoundException"),
        ("GET", "x", "OPEN", {}, 404, "FileNotFoundException"),
        ("GET", "there", "OPEN", {"offset": 99}, 403, "IOException"),
        ("GET", "there", "OPEN", {"offset": -1}, 400, "IllegalArgumentException"),
        ("GET", "there", "OPEN", {"length": "1e3"}, 400, "IllegalArgumentException"),
        ("GET", "there", "OPEN", {"offset": "9" * 40}, 400, "IllegalArgumentException"),
        ("GET", "d", "OPEN", {}, 403, "AccessControlException"),
        ("PUT", "there", "MKDIRS", {}, 403, "FileAlreadyExistsException"),
        ("PUT", "there/d", "MKDIRS", {}, 403, "ParentNotDirectoryException"),
        ("PUT", "x", "RENAME", {"destination": "y", "renameoptions": "NONE"}, 404, "FileNotFoundException"),
        ("PUT", "there", "RENAME", {"destination": "d/e/f", "renameoptions": "NONE"}, 404, "FileNotFoundException"),
        ("PUT", "there", "RENAME", {"renameoptions": "NONE"}, 400, "IllegalArgumentException"),
        ("PUT", "there", "RENAME", {"destination": "y", "renameoptions": "TO_TRASH"}, 400, "IllegalArgumentException"),
        ("DELETE", "d", "DELETE", {}, 403, "PathIsNotEmptyDirectoryException"),
        ("DELETE", "d", "DELETE", {"recursive": "perhaps"}, 400, "IllegalArgumentException"),
        ("DELETE", "", "DELETE", {"recursive": "false"}, 403, "AccessControlException"),
        ("PUT", "", "CREATE", {}, 403, "AccessControlException"),
        ("PUT", "there", "GETFILESTATUS", {}, 405, "IllegalArgumentException"),
        ("GET", "there", "DELETE", {}, 405, "IllegalArgumentException"),
        ("POST", "there", "MKDIRS", {}, 405, "IllegalArgumentException"),
        ("POST", "there", "APPEND", {}, 400, "UnsupportedOperationException"),
        ("POST", "there", "TRUNCATE", {"newlength": 0}, 400, "UnsupportedOperationException"),
        ("GET", "there", "GETCONTENTSUMMARY", {}, 400, "UnsupportedOperationException"),
        ("PUT", "there", "CREATESYMLINK", {"destination": "/etc"}, 400, "UnsupportedOperationException"),
        ("PUT", "there", "SETPERMISSION", {}, 400, "UnsupportedOperationException"),
        ("GET", "there", "", {}, 400, "IllegalArgumentException"),
        ("GET", "a\0b", "GETFILESTATUS", {}, 400, "IllegalArgumentException"),
        ("GET", "x" * 300, "GETFILESTATUS", {}, 400, "IllegalArgumentException"),
    ],
)
def test_what_is_refused(
    client: Client, method: str, path: str, op: str, parameters: dict[str, object], status: int, name: str
) -> None:
    client.create("there", b"12345")
    client.create("d/x", b"")
    if "destination" in parameters and op == "RENAME":
        parameters = parameters | {"destination": f"{client.path}/{parameters['destination']}"}
    with pytest.raises(Refused) as refused:
        client.do(method, path, op, **parameters)
    assert (refused.value.status, refused.value.name) == (status, name)
    assert client.read("there") == b"12345", "the door lives"


def test_a_door_that_knows_no_others_takes_no_file_that_is_beside_one(client: Client) -> None:
    with pytest.raises(Refused, match="knows no other doors") as refused:
        client.do("PUT", "state/0/0/1.delta", "REFER", through="n2", node="n2", token="t", size="3", digest="d")
    assert refused.value.status == 400
    for method, op in (("DELETE", "RELEASE"), ("GET", "SPOOLED")):
        with pytest.raises(Refused, match="no such file"):
            client.do(method, "no-token", op, through="n2")


def test_the_older_form_of_a_rename_says_yes_or_no(client: Client) -> None:
    client.create("x", b"1")
    client.create("y", b"2")
    for source, target, done in (("x", "y", False), ("nothing", "z", False), ("x", "z", True)):
        answer = client.do("PUT", source, "RENAME", destination=f"{client.path}/{target}")
        assert answer == {"boolean": done}
    assert (client.read("y"), client.read("z")) == (b"2", b"1")


def test_files_of_two_checkpoints_do_not_mix(door: Door, client: Client) -> None:
    client.create("x", b"1")
    other = Client(door.address("other"))
    with pytest.raises(Refused, match="within its checkpoint"):
        client.do("PUT", "x", "RENAME", destination=f"{other.path}/x", renameoptions="NONE")
    with pytest.raises(Refused) as refused:
        other.status("x")
    assert refused.value.status == 404
    root = Client(door.address("words").rpartition("/")[0])
    assert root.status("")["type"] == "DIRECTORY"
    assert root.list("") == ["words"]
    with pytest.raises(Refused) as refused:
        root.delete("")
    assert refused.value.name == "AccessControlException"


def test_a_checkpoint_that_is_kept_is_not_removed(client: Client, tmp_path: Path) -> None:
    client.make_dirs("")
    assert client.delete(""), "nothing of it is kept"
    client.publish("metadata", b'{"id": "a"}')
    eventually("it is kept", (tmp_path / "data/checkpoints/words/metadata").exists, 10.0)
    with pytest.raises(Refused, match="take another name"):
        client.delete("")
    assert client.read("metadata") == b'{"id": "a"}'


def test_a_live_directory_that_is_lost_while_the_door_is_open(client: Client, tmp_path: Path) -> None:
    live = tmp_path / "data" / "checkpoint-live" / "words"
    client.publish("metadata", json.dumps({"id": "a"}).encode())
    eventually("it is kept", (tmp_path / "data/checkpoints/words/metadata").exists, 10.0)
    live.rename(tmp_path / "lost")
    assert json.loads(client.read("metadata")) == {"id": "a"}


def test_a_directory_of_another_query_is_told(tmp_path: Path) -> None:
    for name, id in (("checkpoints", "a"), ("checkpoint-live", "b")):
        (tmp_path / name / "words").mkdir(parents=True)
        (tmp_path / name / "words" / "metadata").write_text(json.dumps({"id": id}))
    with nosync.checkpoints.serve(tmp_path) as door, pytest.raises(Refused, match="is of query b") as refused:
        Client(door.address("words")).status("metadata")
    assert (refused.value.status, refused.value.name) == (403, "IOException")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Client]:
    """Returns a client of a door that is short of patience, and takes small files alone."""
    server = Server("127.0.0.1", 0, head_timeout_s=0.3)
    checkpoints = ServedCheckpoints(tmp_path / "data", server.address, Env(), DoorSettings())
    server.start(DoorApp(checkpoints, "ab" * 16, Limits(body_bytes=1000, body_timeout_s=0.3)))
    yield Client(f"{server.address}/{'ab' * 16}/words")
    server.close()
    checkpoints.close()


def raw(client: Client, data: bytes) -> bytes:
    """Sends bytes, and returns all that comes until the door closes the connection."""
    with socket.create_connection((client.connection.host, client.connection.port), timeout=10) as connection:
        connection.sendall(data)
        found = b""
        while piece := connection.recv(65536):
            found += piece
        return found


def put(client: Client, headers: str) -> bytes:
    target = f"/webhdfs/v1{client.path}/x?op=CREATE&body=true"
    return f"PUT {target} HTTP/1.1\r\nHost: x\r\n{headers}\r\n".encode()


def leaves_nothing(client: Client, tmp_path: Path) -> bool:
    return client.list("") == [] and list((tmp_path / "data/checkpoint-live/.writing").iterdir()) == []


def test_a_body_that_is_too_large(small: Client, tmp_path: Path) -> None:
    small.make_dirs("")
    small.create("fits", b"x" * 1000)
    assert small.delete("fits")
    for request in (
        put(small, "Content-Length: 1001\r\n"),
        put(small, "Content-Length: 99999999999999999999\r\n"),
        put(small, "Transfer-Encoding: chunked\r\n") + b"400\r\n" + b"x" * 1024 + b"\r\n",
    ):
        answer = raw(small, request)
        assert b" 413 " in answer.splitlines()[0]
        assert b"at most 1,000 bytes" in answer
    assert leaves_nothing(small, tmp_path)


def test_half_sent_requests(small: Client, tmp_path: Path) -> None:
    small.make_dirs("")
    began = time.monotonic()
    assert raw(small, b"") == b"", "nothing is asked"
    assert raw(small, b"GET /webhdfs/v1/ HT") == b"", "half a head"
    answer = raw(small, put(small, "Content-Length: 10\r\n") + b"half")
    assert b" 408 " in answer.splitlines()[0]
    assert b"did not come in time" in answer
    assert time.monotonic() - began < 8
    with socket.create_connection((small.connection.host, small.connection.port)) as gone:
        gone.sendall(put(small, "Content-Length: 10\r\n") + b"half")
    eventually("the half file is gone", lambda: leaves_nothing(small, tmp_path), 10.0)


def test_half_a_head_after_a_whole_request(small: Client) -> None:
    small.make_dirs("")
    connection = small.connection.sock
    connection.sendall(b"GET /webhdfs/v1/?op=GETH")
    assert connection.recv(1000) == b"", "the door closes it"


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 200,  # TLS
        b"GET " + b"/x" * 60_000 + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"GET /webhdfs/v1/ HTTP/1.1\r\n" + b"A: b\r\n" * 30_000 + b"\r\n",
        b"PUT /x HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"PUT /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_what_is_no_http(small: Client, data: bytes) -> None:
    try:
        answer = raw(small, data)
        assert re.match(rb"HTTP/1.1 4\d\d |$", answer)
    except ConnectionResetError:
        pass  # it did not read to the end of it
    small.make_dirs("")
    assert small.list("") == []


def test_a_long_query_and_odd_parameters(client: Client) -> None:
    client.create("x", b"1")
    target = f"/webhdfs/v1{client.path}/x?op=GETFILESTATUS"
    for query in ("&a" * 100, "&a=%ff", "&%00=%00"):
        answer = client.send("GET", target + query)
        answer.read()
        assert answer.status in (200, 400)
    assert (
        client.done(client.send("GET", target.replace("GETFILESTATUS", "getfilestatus")))["FileStatus"]["length"] == 1
    )


def test_a_name_of_a_file_that_needs_encoding(client: Client) -> None:
    client.publish("a b/ä+%25&=?#x", b"1")
    assert client.list("a b") == ["ä+%25&=?#x"]
    assert client.read("a b/ä+%25&=?#x") == b"1"


def test_where_a_file_is_sent(client: Client) -> None:
    answer = client.ask("PUT", "x", "CREATE", overwrite="true")
    answer.read()
    location = urlsplit(answer.getheader("Location") or "")
    assert answer.status == 307
    assert location.netloc == f"{client.connection.host}:{client.connection.port}"
    assert location.path == f"/webhdfs/v1{client.path}/x"


def test_who_has_sent_a_half_of_a_file_is_answered_when_the_door_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever ends the door is shown no trace of a task that was cancelled."""
    with nosync.checkpoints.serve(tmp_path / "data") as door:
        client = Client(door.address("words"))
        connection = socket.create_connection((client.connection.host, client.connection.port), timeout=30)
        connection.sendall(put(client, "Content-Length: 100\r\n") + b"a half")
        writing = tmp_path / "data/checkpoint-live/.writing"
        eventually("it has begun", lambda: writing.is_dir() and any(writing.iterdir()))
    with connection:
        assert b"503" in connection.recv(65536).splitlines()[0]
    assert not any("Traceback" in (record.exc_text or "") or record.exc_info for record in caplog.records)
    assert not list(writing.iterdir())
