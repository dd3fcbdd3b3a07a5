"""A checkpoint that is asked for comes with all that peers had when it was asked for."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from blake3 import blake3

from nosync.replication.daemon import replicator
from nosync.replication.protocol import replica
from nosync.replication.protocol.file_names import FileName, FileVersion
from nosync.replication.protocol.messages import InventoryRequest
from nosync.testing.daemon_cluster import eventually
from tests.helpers.receiver import Receiver


def test_an_answer_that_was_on_its_way_is_not_the_last_word(tmp_path: Path) -> None:
    receiver = Receiver(tmp_path / "n1")
    written = tmp_path / "written"
    written.write_bytes(b"v1\n{}")
    held = FileVersion(
        FileName("checkpoints/words/offsets/4"), blake3(written.read_bytes()).hexdigest(), written.stat().st_size
    )

    def asked() -> int:
        return sum(isinstance(sent, InventoryRequest) for sent in receiver.session.outbox)

    receiver.announce()  # so n1 knows n2, and asks it from now on only when it needs to
    found: list[tuple[bool, int]] = []
    before = asked()
    with receiver.replicator._shared.lock:  # somebody asked just before
        receiver.replicator._shared.act(receiver.replicator._replica.want_all())
    assert asked() == before + 1
    asking = threading.Thread(
        target=lambda: found.append(receiver.replicator.fetch_checkpoint("checkpoints/words", 20.0))
    )
    asking.start()
    try:
        # The answer to that was made before n2 wrote the offsets.
        receiver.announce()
        eventually("it asks once more", lambda: asked() == before + 2)
        receiver.announce(held)
        eventually("it wants the file", lambda: [one.held for one in receiver.wanted()] == [held])
        receiver.send(held, written)
        receiver.node.sync()
        receiver.node.opaque.step()
        asking.join(20)
        assert found == [(True, 1)]
    finally:
        asking.join(25)
        receiver.node.announcer.listen(None)
        receiver.node.abandon()


def test_a_peer_of_which_nothing_was_heard_for_a_moment_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "MEET_S", 0.0)  # it is not just after the start
    monkeypatch.setattr(replicator, "BACK_S", 20.0)
    receiver = Receiver(tmp_path / "n1")
    written = tmp_path / "written"
    written.write_bytes(b"v1\n{}")
    held = FileVersion(
        FileName("checkpoints/words/offsets/4"), blake3(written.read_bytes()).hexdigest(), written.stat().st_size
    )
    receiver.announce()
    receiver.replicator.close_session(receiver.session)
    found: list[tuple[bool, int]] = []
    asking = threading.Thread(
        target=lambda: found.append(receiver.replicator.fetch_checkpoint("checkpoints/words", 30.0))
    )
    asking.start()
    try:
        receiver.connect()
        receiver.announce(held)
        eventually("it wants the file", lambda: [one.held for one in receiver.wanted()] == [held])
        receiver.send(held, written)
        receiver.node.sync()
        receiver.node.opaque.step()

        def is_answered() -> bool:
            receiver.announce(held)
            return bool(found)

        eventually("it has it", is_answered)
        assert found == [(True, 1)]
    finally:
        asking.join(35)
        receiver.node.announcer.listen(None)
        receiver.node.abandon()
