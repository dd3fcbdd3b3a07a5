"""What peers may ask and say is bounded, and nobody is kept waiting by one who does not listen."""

from __future__ import annotations

import contextlib

import pytest

import nosync
from nosync.lsm.platform.env import MOST_SMALL_BYTES
from nosync.proto.v1 import replication_pb2 as pb
from nosync.replication.protocol.file_names import FileName, FileVersion
from nosync.replication.protocol.inventory import Inventory, missing
from nosync.replication.protocol.messages import InventoryRequest
from nosync.replication.transport.codec import LARGEST_FILE_BYTES, Decoder
from tests.helpers.receiver import Receiver


def test_an_inventory_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nosync.replication.transport.codec.MOST_NAMES", 10)
    decoder, roots = Decoder(), [pb.Group(name=f"layers/s/raw/{n}", root="1:0") for n in range(4)]
    for _ in range(3):
        assert decoder.decode(pb.Frame(summary=pb.Summary(groups=roots))) is None
    with pytest.raises(nosync.ReplicationError, match="goes on after 10 names"):
        decoder.decode(pb.Frame(summary=pb.Summary(groups=roots)))


def test_who_asks_and_does_not_listen_is_disconnected(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nosync.replication.daemon.session.MOST_WAITING", 50)
    for n in range(60):
        receiver.receive(pb.Frame(want=pb.Want(files=[pb.Held(name=f"branches/{n}.json", digest="0" * 64)])))
    assert not receiver.session.is_open
    assert not receiver.session.outbox


@pytest.mark.parametrize("what", ["inventory", "summary"])
def test_before_a_hello_nothing_is_kept(receiver: Receiver, what: str) -> None:
    """A stranger's inventory of a million names took 634 MB, and another stream the same again."""
    held = [pb.Held(name=f"branches/{n}.json", digest="0" * 64) for n in range(1000)]
    groups = [pb.Group(name=f"layers/s/raw/{n}", root="1:0") for n in range(1000)]
    frame = {
        "inventory": pb.Frame(inventory=pb.Inventory(held=held)),
        "summary": pb.Frame(summary=pb.Summary(groups=groups)),
    }[what]
    session = receiver.replicator.open_session()
    with pytest.raises(nosync.ReplicationError, match=f"begins with {what}, and not with a Hello"):
        receiver.replicator.received(session, frame)
    assert (session.decoder._parts, session.decoder._groups) == ([], [])
    receiver.session.close()
    receiver.receive(frame)
    assert receiver.session.decoder._parts_bytes == 0, "nor once it has ended"


def test_an_inventory_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nosync.replication.transport.codec.MOST_INVENTORY_BYTES", 4000)
    decoder = Decoder()
    part = pb.Inventory(held=[pb.Held(name=f"branches/{n}.json", digest="0" * 64) for n in range(10)])
    for _ in range(2):  # what was whole does not count for the next one
        assert decoder.decode(pb.Frame(inventory=part)) is None
        last = pb.Inventory(last=True)
        last.MergeFrom(part)
        assert decoder.decode(pb.Frame(inventory=last)) is not None
    for _ in range(4):
        decoder.decode(pb.Frame(inventory=part))
    with pytest.raises(nosync.ReplicationError, match="an inventory of more than 4,000 bytes"):
        decoder.decode(pb.Frame(inventory=part))


@pytest.mark.parametrize(
    "name", ["manifests/main/0.json", "manifests/main/0-999.json", "branches/7.json", "pins/x-1.json"]
)
def test_nobody_has_a_manifest_of_a_tebibyte(name: str) -> None:
    """It was asked for, and would have come until the disk was full: only layers are large."""
    for size, is_taken in ((MOST_SMALL_BYTES, True), (MOST_SMALL_BYTES + 1, False), (LARGEST_FILE_BYTES, False)):
        held = pb.Held(name=name, digest="0" * 64, size_bytes=size)
        frames = (
            pb.Frame(change=pb.Change(seq=1, added=[held])),
            pb.Frame(inventory=pb.Inventory(held=[held])),
            pb.Frame(want=pb.Want(files=[held])),
            pb.Frame(chunk=pb.Chunk(name=name, digest="0" * 64, size_bytes=size, data=b"x")),
        )
        for frame in frames:
            with contextlib.nullcontext() if is_taken else pytest.raises(nosync.ReplicationError, match="size"):
                Decoder().decode(frame)
    Decoder().decode(pb.Frame(inventory=pb.Inventory(held=[pb.Held(name="layers/s/raw/0/0-1-0.layer", digest="0" * 64,
                                                                   size_bytes=LARGEST_FILE_BYTES)])))  # fmt: skip


def test_a_question_names_each_group_once_and_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that named a group 400,000 times took 988 MB, and nothing else was answered for 38 s."""
    monkeypatch.setattr("nosync.replication.transport.codec.MOST_GROUPS_ASKED", 3)
    names = [f"layers/s/raw/{n}" for n in range(3)]
    assert Decoder().decode(pb.Frame(ask_inventory=pb.AskInventory(groups=names))) == InventoryRequest(tuple(names))
    for groups, message in ((["branches"] * 2, "named twice"), ([*names, "branches"], "4 groups of files at once")):
        frames = (
            pb.Frame(ask_inventory=pb.AskInventory(groups=groups)),
            pb.Frame(inventory=pb.Inventory(groups=groups, last=True)),
        )
        for frame in frames:
            with pytest.raises(nosync.ReplicationError, match=message):
                Decoder().decode(frame)


@pytest.mark.parametrize("groups", [(), ("branches", "layers/s/raw/0")])
def test_answers_that_nobody_reads_are_bounded_in_bytes(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, groups: tuple[str, ...]
) -> None:
    held = [FileVersion(FileName(f"layers/s/raw/0/{n}-{n + 1}-0.layer"), "0" * 64, 1) for n in range(500)]
    held += [FileVersion(FileName(f"layers/s{n}/raw/0/0-1-0.layer"), "0" * 64, 1) for n in range(500)]
    receiver.replicator._shared.act(receiver.replicator._replica.holds(held))
    while receiver.session.outbox:
        receiver.session.take()
    monkeypatch.setattr("nosync.replication.daemon.session.MOST_WAITING_BYTES", 50_000)
    asked = 0
    while receiver.session.is_open:
        assert len(receiver.session.outbox) <= 1 or receiver.session.waiting_bytes <= 50_000
        receiver.receive(pb.Frame(ask_inventory=pb.AskInventory(groups=groups)))
        asked += 1
        assert asked < 100
    assert asked >= 1
    assert not receiver.session.outbox


def test_one_answer_goes_out_however_large_and_what_went_out_counts_no_more(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = [FileVersion(FileName(f"layers/s{n}/raw/0/0-1-0.layer"), "0" * 64, 1) for n in range(500)]
    receiver.replicator._shared.act(receiver.replicator._replica.holds(held))
    while receiver.session.outbox:
        receiver.session.take()
    assert receiver.session.waiting_bytes == 0
    monkeypatch.setattr("nosync.replication.daemon.session.MOST_WAITING_BYTES", 1000)
    for _ in range(5):
        receiver.receive(pb.Frame(ask_inventory=pb.AskInventory()))
        assert receiver.session.waiting_bytes > 1000
        assert receiver.session.take() is not None
    assert receiver.session.is_open


def test_how_far_peers_are_behind_is_not_found_out_anew_for_everyone_who_asks(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All names are compared for it, with the lock held: who asked again and again kept the node from its peers."""
    found: list[None] = []

    def counted(mine: Inventory, theirs: Inventory) -> list[FileVersion]:
        found.append(None)
        return missing(mine, theirs)

    monkeypatch.setattr("nosync.replication.protocol.copies.missing", counted)
    for n in range(3):
        held = FileVersion(FileName(f"branches/{n}.json"), "0" * 64, 7)
        receiver.replicator._shared.act(receiver.replicator._replica.holds([held]))
        for _ in range(20):
            (peer,) = receiver.replicator.peers()
            assert (peer.behind_files, peer.behind_bytes) == (n + 1, 7 * (n + 1))
        assert len(found) == n + 1
    receiver.receive(pb.Frame(summary=pb.Summary(seq=1, groups=[pb.Group(name="branches", root=receiver.root_of("branches"))],
                                                 last=True)))  # fmt: skip
    (peer,) = receiver.replicator.peers()
    assert peer.behind_files == 0
