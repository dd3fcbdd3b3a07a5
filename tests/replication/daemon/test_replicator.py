"""Files that come from another node: kept whole and verified, or refused and asked for again; nothing ends the session."""

from __future__ import annotations

import errno
import queue
import sys
import threading
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from types import SimpleNamespace

import pyarrow as pa
import pytest

import nosync
from nosync.proto.v1 import replication_pb2 as pb
from nosync.replication.daemon.incoming_files import PART_KEPT_S
from nosync.replication.daemon.links import cancel_when_closed
from nosync.replication.daemon.shared_replica import LOG_AGAIN_S
from nosync.replication.protocol.file_names import FileName, FileVersion
from nosync.replication.protocol.messages import PROTOCOL_VERSION, FileRequest, InventoryRequest, NotFound
from nosync.replication.protocol.sessions import SILENT_S
from nosync.replication.transport.codec import CHUNK_BYTES, Chunk, Decoder, Encoder
from nosync.testing.daemon_cluster import eventually
from tests.helpers.receiver import Receiver


def test_a_file_that_comes_is_kept(receiver: Receiver, theirs: tuple[FileVersion, Path]) -> None:
    held, path = theirs
    receiver.announce(held)
    receiver.send(held, path)
    receiver.node.sync()
    assert receiver.durable == [held.name]
    assert (receiver.root / held.name).read_bytes() == path.read_bytes()


def test_after_a_session_broke_the_rest_of_a_file_is_enough(
    receiver: Receiver, large: tuple[FileVersion, Path]
) -> None:
    held, path = large
    receiver.announce(held)
    assert receiver.wanted() == [FileRequest(held)]
    receiver.send(held, path, most=2)
    receiver.replicator.close_session(receiver.session)
    assert len(list((receiver.root / "tmp").iterdir())) == 1, "what came is kept"
    receiver.connect()
    receiver.announce(held)
    assert receiver.wanted() == [FileRequest(held, 2 * CHUNK_BYTES)]
    receiver.send(held, path, offset=2 * CHUNK_BYTES)
    receiver.node.sync()
    assert receiver.durable == [held.name]
    assert (receiver.root / held.name).read_bytes() == path.read_bytes()
    assert not list((receiver.root / "tmp").iterdir())


def test_a_beginning_that_was_damaged_is_found_and_all_is_fetched_again(
    receiver: Receiver, large: tuple[FileVersion, Path]
) -> None:
    held, path = large
    receiver.announce(held)
    receiver.send(held, path, most=2)
    receiver.replicator.close_session(receiver.session)
    (part,) = (receiver.root / "tmp").iterdir()
    with part.open("r+b") as file:
        file.seek(70_000)
        file.write(b"flipped!")
    receiver.connect()
    receiver.announce(held)
    receiver.send(held, path, offset=2 * CHUNK_BYTES)
    assert receiver.replicator.counters.refused_files == 1
    assert not list((receiver.root / "tmp").iterdir())
    receiver.session.outbox.clear()
    receiver.replicator._shared.act(receiver.replicator._replica.tick(receiver.env.monotonic_s() + 5))
    assert receiver.wanted() == [FileRequest(held)], "from the beginning"
    receiver.send(held, path)
    receiver.node.sync()
    assert receiver.durable == [held.name]


def test_a_part_that_nobody_sends_the_rest_of_goes(receiver: Receiver, large: tuple[FileVersion, Path]) -> None:
    held, path = large
    receiver.announce(held)
    receiver.send(held, path, most=1)
    receiver.replicator.close_session(receiver.session)
    receiver.replicator._incoming.drop_old_parts()
    assert len(list((receiver.root / "tmp").iterdir())) == 1
    receiver.env.now_s += PART_KEPT_S + 1
    receiver.replicator._incoming.drop_old_parts()
    assert not list((receiver.root / "tmp").iterdir())
    receiver.connect()
    receiver.announce(held)
    assert receiver.wanted() == [FileRequest(held)]


def test_small_layers_go_over_with_a_dictionary_and_come_as_they_were(tmp_path: Path) -> None:
    with nosync.open(tmp_path / "n2", settings=nosync.StoreSettings(merge=False)) as store:
        for t in range(150):
            rows = pa.table({"k": [f"key-{t}-{i}" for i in range(5)], "v": [t * i for i in range(5)]})
            store.append("s", t=t, rows=rows, key=["k"])
        paths = [Path(layer.path) for layer in store.layers()]
    encoder, decoder = Encoder(), Decoder()
    sent_bytes = []
    for path in paths:
        name = str(path.relative_to(tmp_path / "n2"))
        held = FileVersion(FileName(name), "0" * 64, path.stat().st_size)
        with path.open("rb") as file:
            frames = list(encoder.chunks(FileRequest(held), file))
        came = [chunk for frame in frames if isinstance(chunk := decoder.decode(frame), Chunk)]
        assert b"".join(chunk.data for chunk in came) == path.read_bytes()
        sent_bytes.append(sum(frame.ByteSize() for frame in frames))
    assert sum(sent_bytes[-50:]) < sum(sent_bytes[:50]) * 0.65, "a dictionary of what they have in common"
    for data in (b"x" * 100_000, b"no dictionary"):
        with pytest.raises(nosync.ReplicationError, match="a dictionary"):
            Decoder().decode(pb.Frame(dictionary=pb.Dictionary(data=data)))


def test_what_stands_in_its_place_is_verified_before_it_counts(
    receiver: Receiver, theirs: tuple[FileVersion, Path]
) -> None:
    """A task's file of the same name, that a crash of the machine damaged: that another one came whole says nothing of
    it.
    """
    held, path = theirs
    receiver.announce(held)
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 3] ^= 1
    (receiver.root / held.name).parent.mkdir(parents=True)
    (receiver.root / held.name).write_bytes(damaged)
    receiver.send(held, path)
    receiver.node.sync()
    assert receiver.durable == []
    assert len(list((receiver.root / "quarantine").iterdir())) == 1
    receiver.replicator._replica.tick(receiver.env.monotonic_s() + 5)  # it is asked for again
    receiver.send(held, path)
    receiver.node.sync()
    assert receiver.durable == [held.name]


@pytest.mark.parametrize("operation", ["create", "link"])
def test_a_full_disk_refuses_a_file_and_not_the_session(
    receiver: Receiver, theirs: tuple[FileVersion, Path], operation: str
) -> None:
    held, path = theirs
    receiver.announce(held)
    receiver.env.fail(operation, errno.ENOSPC, times=1)
    receiver.send(held, path)
    assert receiver.replicator.counters.refused_files == 1
    assert receiver.session.is_open
    assert not list((receiver.root / "tmp").iterdir())
    receiver.replicator._replica.tick(receiver.env.monotonic_s() + 5)
    receiver.send(held, path)
    receiver.node.sync()
    assert receiver.durable == [held.name]


def test_what_a_full_disk_left_ends_no_session_and_no_clock(
    receiver: Receiver, large: tuple[FileVersion, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing a file writes what is buffered, which fails too; then the clock, and who dials, must go on."""
    held, path = large
    receiver.announce(held)
    create = receiver.env.create

    class Full:
        def __init__(self, path: Path) -> None:
            self._file = create(path)

        def write(self, data: bytes) -> int:
            return self._file.write(data)

        def close(self) -> None:
            self._file.close()
            raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(receiver.env, "create", Full)
    receiver.send(held, path, most=1)
    receiver.replicator.close_session(receiver.session)
    receiver.env.fail("unlink", errno.EIO)
    receiver.env.now_s += PART_KEPT_S + 1
    receiver.replicator._incoming.drop_old_parts()
    assert not receiver.replicator._incoming._parts


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (nosync.CorruptionError("bits were flipped"), "bits were flipped"),
        (KeyError("x"), "unexpected KeyError: 'x'"),
    ],
)
def test_peers_hear_from_a_node_that_cannot_read_its_manifests(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, error: Exception, shown: str
) -> None:
    def damaged() -> frozenset[str]:
        raise error

    monkeypatch.setattr(receiver.node, "optional_stages", damaged)
    ticks = threading.Semaphore(0)
    monkeypatch.setattr(receiver.replicator, "_tick", ticks.release)
    receiver.replicator.start()
    try:
        assert all(ticks.acquire(timeout=10) for _ in range(3))
        assert receiver.node.problems["nosync-replication"] == shown
    finally:
        receiver.replicator.stop()


class Sender(Receiver):
    """Node n1, which holds a layer of several pieces that n2 wants."""

    def __init__(self, root: Path, held: FileVersion, path: Path) -> None:
        super().__init__(root)
        self.held, self.path = held, root / held.name
        self.path.parent.mkdir(parents=True)
        self.path.write_bytes(path.read_bytes())
        self.node.sync()
        assert self.durable == [held.name]

    def asked(self) -> list[str]:
        """What goes out when n2 wants the file: the kinds of the frames."""
        self.session.outbox.clear()
        one = pb.Held(name=self.held.name, digest=self.held.digest, size_bytes=self.held.size_bytes)
        self.receive(pb.Frame(want=pb.Want(files=[one])))
        found = []
        for frame in self.replicator.frames_of(self.session):
            if frame.WhichOneof("kind") in ("chunk", "not_there"):
                found.append(str(frame.WhichOneof("kind")))
            if not self.session.outbox and self.is_done(frame):
                return found
        return found

    def is_done(self, frame: pb.Frame) -> bool:
        return frame.HasField("not_there") or frame.chunk.offset + CHUNK_BYTES >= self.held.size_bytes


@pytest.fixture
def sender(tmp_path: Path, large: tuple[FileVersion, Path]) -> Iterator[Sender]:
    found = Sender(tmp_path / "n1", *large)
    yield found
    found.node.announcer.listen(None)
    found.node.abandon()


@pytest.mark.parametrize("by_bytes", [-200_000, 5])
def test_a_file_that_is_shorter_or_longer_than_it_was_is_not_sent_and_no_more_held(
    sender: Sender, by_bytes: int
) -> None:
    """Sent as it is, the rest would be waited for, or the stream ended by bytes beyond the end, each time anew."""
    contents = sender.path.read_bytes()
    sender.path.write_bytes(contents[:by_bytes] if by_bytes < 0 else contents + b"x" * by_bytes)
    assert sender.asked() == ["not_there"]
    sender.node.make_durable_now()
    assert sender.durable == []
    assert len(list((sender.root / "quarantine").iterdir())) == 1
    assert sender.session.is_open


def test_a_file_that_is_asked_for_again_is_looked_at(sender: Sender) -> None:
    """Who got it could not use it, perhaps for bits that were flipped here, of which nothing else would tell."""
    with sender.path.open("r+b") as file:
        file.seek(CHUNK_BYTES + 70_000)
        file.write(b"flipped!")
    assert set(sender.asked()) == {"chunk"}
    sender.node.make_durable_now()
    assert sender.durable == [sender.held.name], "asked for once, it may be whole"
    sender.asked()
    sender.node.make_durable_now()
    assert sender.durable == []
    assert sender.asked() == ["not_there"]


def test_a_file_that_ends_in_the_middle_is_asked_for_anew(receiver: Receiver, large: tuple[FileVersion, Path]) -> None:
    held, path = large
    receiver.announce(held)
    receiver.send(held, path, most=2)
    receiver.receive(pb.Frame(not_there=pb.NotThere(name=held.name)))
    assert not list((receiver.root / "tmp").iterdir())
    receiver.session.outbox.clear()
    receiver.replicator._shared.act(receiver.replicator._replica.tick(receiver.env.monotonic_s() + 5))
    assert receiver.wanted() == [FileRequest(held)]
    receiver.send(held, path)
    receiver.node.sync()
    assert receiver.durable == [held.name]
    assert receiver.replicator.counters.refused_files == 0


def test_the_rest_of_what_is_gone_is_no_use(receiver: Receiver, large: tuple[FileVersion, Path]) -> None:
    """Without asking anew it would be waited for as long as anything else comes from there."""
    held, path = large
    receiver.announce(held)
    receiver.send(held, path, most=2)
    receiver.replicator.close_session(receiver.session)
    receiver.connect()
    receiver.announce(held)
    receiver.replicator._incoming._drop_part(held.name)
    receiver.send(held, path, offset=2 * CHUNK_BYTES)
    receiver.session.outbox.clear()
    receiver.replicator._shared.act(receiver.replicator._replica.tick(receiver.env.monotonic_s() + 5))
    assert receiver.wanted() == [FileRequest(held)], "all of it, although pieces still come"


def test_a_long_list_of_wanted_files_is_looked_at_once(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each was compared with all others: 50,000 in one frame took minutes, with the lock held."""
    held = [FileVersion(FileName(f"layers/s{n}/raw/0/0-1-0.layer"), "0" * 64, 1) for n in range(300)]
    receiver.replicator._shared.act(receiver.replicator._replica.holds(held))
    receiver.session.outbox.clear()
    compared: list[None] = []

    def counted(self: FileRequest, other: object) -> bool:
        compared.append(None)
        return self is other

    monkeypatch.setattr(FileRequest, "__eq__", counted)
    receiver.receive(pb.Frame(want=pb.Want(files=[pb.Held(name=h.name, digest=h.digest, size_bytes=1) for h in held])))
    assert len(receiver.session.outbox) == 300
    assert len(compared) <= 300


def _waits(thread: threading.Thread) -> bool:
    """Returns whether a thread waits for an event or a condition."""
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code is threading.Condition.wait.__code__


def test_each_message_goes_out_at_once(receiver: Receiver) -> None:
    """Also on the side that dials, where another thread waits for the session to end."""
    session, sent, ended = receiver.session, queue.SimpleQueue[pb.Frame](), threading.Event()

    def send() -> None:
        for frame in receiver.replicator.frames_of(session):
            sent.put(frame)

    threads = [
        threading.Thread(target=cancel_when_closed, args=(session, SimpleNamespace(cancel=ended.set)), daemon=True),
        threading.Thread(target=send, daemon=True),
    ]
    for thread in threads:
        thread.start()
        eventually("they wait in this order", lambda thread=thread: _waits(thread))  # type: ignore[misc]
    while not sent.empty():
        sent.get()
    for number in range(5):
        session.put([NotFound(f"layers/s/raw/0/{number}-{number + 1}-0.layer")])
        sent.get(timeout=20)  # nothing else is said meanwhile
    session.close()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert ended.is_set()


def test_what_was_verified_as_it_came_is_recorded_as_it_is(
    receiver: Receiver, theirs: tuple[FileVersion, Path]
) -> None:
    held, path = theirs
    receiver.announce(held)
    receiver.send(held, path)
    receiver.node.sync()
    (record,) = receiver.node.durable_records()
    assert (record.digest, record.rows, record.size_bytes) == (held.digest, 100, path.stat().st_size)


def test_what_came_and_is_gone_before_it_is_durable_is_no_problem(
    receiver: Receiver, theirs: tuple[FileVersion, Path]
) -> None:
    held, path = theirs
    receiver.announce(held)
    receiver.send(held, path)
    (receiver.root / held.name).unlink()
    for _ in range(2):  # at first the node has only seen that it cannot be made durable
        receiver.node.parts.upkeep.drain()
        receiver.env.now_s += 60.0
    assert receiver.durable == []
    assert receiver.node.problems == {}
    receiver.node.sync()


def test_a_refusal_is_not_logged_with_every_dial(receiver: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    """A node that is no member any more dials twice a second."""
    hello = pb.Hello(node="n9", incarnation="1", store_id="s", replicas=2, version=PROTOCOL_VERSION)

    def refused() -> int:
        session = receiver.replicator.open_session()
        receiver.replicator.received(session, pb.Frame(hello=hello))
        assert not session.is_open
        return caplog.text.count("node n9 is not a member")

    assert [refused() for _ in range(3)] == [1, 1, 1]
    receiver.env.now_s += LOG_AGAIN_S
    assert refused() == 2


def test_an_inventory_in_many_frames_keeps_its_session_however_long_it_takes(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = receiver.env.monotonic_s()
    monkeypatch.setattr(receiver.env, "monotonic_s", lambda: now_s)
    receiver.replicator._tick()
    for _ in range(20):
        now_s += SILENT_S / 2
        receiver.receive(pb.Frame(summary=pb.Summary(seq=0)))
        receiver.replicator._tick()
        assert receiver.session.is_open
        asked = [sent for sent in receiver.session.outbox if isinstance(sent, InventoryRequest)]
        assert len(asked) == 1  # what was asked for is what is coming
    now_s += SILENT_S + 1
    receiver.replicator._tick()
    assert not receiver.session.is_open


def test_a_manifest_that_could_not_be_read_is_announced_later(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, fails = receiver.env.read, [True]

    def failing(path: Path) -> bytes:
        if fails and path.name == "0.json":
            raise OSError(errno.EMFILE, "Too many open files")
        return read(path)

    monkeypatch.setattr(receiver.env, "read", failing)
    path = PurePosixPath("manifests/main/0.json")
    store = nosync.Store(receiver.node.directory, receiver.node.settings, receiver.node)
    store.append("s", t=0, rows=pa.table({"k": [1]}), key=["k"])
    store.seal(0)
    receiver.node.sync()
    assert receiver.node.small.is_durable(path)
    for _ in range(2):
        receiver.replicator._tick()
        assert str(path) not in receiver.replicator._replica.mine
        assert "Too many open files" in receiver.node.problems[f"announcing {path}"]
    fails.clear()
    receiver.replicator._tick()
    assert str(path) in receiver.replicator._replica.mine
    assert receiver.node.problems == {}


def test_a_disk_that_is_full_where_files_arrive_is_told_until_it_is_not(
    receiver: Receiver, large: tuple[FileVersion, Path]
) -> None:
    held, path = large
    receiver.announce(held)
    receiver.env.fail("create", errno.ENOSPC, matches=lambda path: path.parent.name == "tmp")
    receiver.send(held, path)
    assert f"{held.name}: cannot write" in receiver.node.problems["files that come from peers"]
    assert "the disk is full" in receiver.node.problems["files that come from peers"]
    receiver.env.now_s += 2.0
    receiver.replicator._tick()
    assert "files that come from peers" in receiver.node.problems, "it is still to come"
    receiver.send(held, path)
    assert receiver.node.problems == {}
    receiver.node.sync()
    assert receiver.durable == [held.name]


def test_files_that_begin_and_never_end_take_few_descriptors(tmp_path: Path) -> None:
    receiver = Receiver(tmp_path / "s")
    receiver.announce()
    for number in range(200):
        chunk = pb.Chunk(name=f"pins/p-{number}.json", digest="a" * 64, offset=0, size_bytes=60_000, data=b"x")
        receiver.receive(pb.Frame(chunk=chunk))
    assert len(receiver.session.incoming) == 64
    assert len(list((tmp_path / "s" / "tmp").iterdir())) == 64
    assert "pins/p-199.json" in receiver.session.incoming, "those that began last go on"
