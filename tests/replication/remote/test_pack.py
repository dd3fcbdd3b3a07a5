"""Packs and indexes as bytes: what was written is read, and nothing else is."""

from __future__ import annotations

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from nosync.lsm.errors import CorruptionError, FormatVersionError, NosyncError
from nosync.replication.protocol.file_names import FileName, FileVersion
from nosync.replication.remote import pack
from nosync.replication.remote.names import LogPosition, NodeNames
from nosync.replication.remote.pack import (
    TRAILER_BYTES,
    Contents,
    PackBuilder,
    Place,
    Placed,
    Reached,
    Step,
    decode_index,
    decode_step,
    encode_index,
    encode_pack,
    index_bytes,
)

NAMES = NodeNames("embedded")
AT = LogPosition(3, 7)
NAME = NAMES.pack(AT)


def version(text: str, data: bytes = b"x") -> FileVersion:
    return FileVersion(FileName(text), blake3(data).hexdigest(), len(data))


def layer(t: int, data: bytes = b"layer") -> FileVersion:
    return version(f"layers/counts/raw/0/{t}-{t + 1}-0.layer", data)


def a_pack() -> tuple[bytes, Step]:
    builder = PackBuilder()
    for t in range(3):
        builder.add(layer(t, b"rows of %d" % t), b"rows of %d" % t)
    builder.add(version("manifests/main/0.json", b"{}"), b"{}")
    large = Placed(layer(9), Place(NAMES.object(3, 1), part_bytes=1000))
    step = Step(AT, [*builder.placed(NAME), large], ["branches/1.json"], Reached({"main": 2}, 1))
    return bytes(encode_pack(builder.body, step, "store", "embedded")), step


def test_a_pack_says_what_was_put_into_it() -> None:
    data, step = a_pack()
    assert decode_step(data, NAME, "store", "it") == step
    size = index_bytes(data[-TRAILER_BYTES:], "it") + TRAILER_BYTES
    assert decode_step(data[-size:], NAME, "store", "it") == step
    for placed in step.added[:4]:
        at = placed.place.offset
        assert blake3(data[at : at + placed.version.size_bytes]).hexdigest() == placed.version.digest


def test_an_index_and_the_packs_after_it_say_what_is_held() -> None:
    _, step = a_pack()
    contents = Contents(LogPosition(3, 6), [Placed(version("branches/1.json"), Place(NAMES.pack(LogPosition(1, 1))))])
    contents.apply(step)
    again = decode_index(encode_index(contents, "store", "embedded"), "store", "it")
    assert list(again.files()) == list(contents.files()) == sorted(step.added, key=lambda placed: placed.version)
    assert (again.at, again.reached) == (AT, Reached({"main": 2}, 1))
    later = Step(
        AT.next,
        [Placed(layer(0, b"other"), Place(NAMES.pack(AT.next)))],
        ["layers/counts/raw/0/1-2-0.layer"],
        Reached(),
    )
    again.apply(later)
    held = again.inventory.get("layers/counts/raw/0/0-1-0.layer")
    assert held is not None
    assert held.digest == layer(0, b"other").digest
    assert again.in_use()[NAMES.pack(AT)] == len(b"rows of 2") + len(b"{}")


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_no_flipped_bit_in_the_index_is_taken_for_anything(at: int, flip: int) -> None:
    data, _ = a_pack()
    size = index_bytes(data[-TRAILER_BYTES:], "it") + TRAILER_BYTES
    end = bytearray(data[-size:])
    end[at % len(end)] ^= flip
    changed = bytes(end)
    try:
        found = decode_step(changed, NAME, "store", "it")
    except NosyncError:
        return
    assert at % len(end) >= len(end) - TRAILER_BYTES  # padding of the trailer alone says nothing
    assert found == a_pack()[1]


@given(st.binary(max_size=300))
def test_no_bytes_of_strangers_are_taken_for_an_index(data: bytes) -> None:
    with pytest.raises(NosyncError):
        decode_index(data, "store", "it")


@pytest.mark.parametrize(
    "path", ["../x", "/etc/passwd", "layers/../../x", "manifests/main/x.json", "NOSYNC", "catalog/1", "layers/a/b/c/d"]
)
def test_names_that_no_store_writes_are_refused(path: str) -> None:
    step = Step(AT, [Placed(FileVersion(FileName(path), "0" * 64, 1), Place(NAME))], [], Reached())
    data = bytes(encode_pack(bytearray(), step, "store", "embedded"))
    with pytest.raises(CorruptionError, match="no name of a store's file"):
        decode_step(data, NAME, "store", "it")


@pytest.mark.parametrize("object", ["NOSYNC.json", "nodes/../x/packs/00000001-000000000001.pack", "x", ""])
def test_objects_that_no_node_has_are_refused(object: str) -> None:
    step = Step(AT, [Placed(layer(1), Place(object, part_bytes=5))], [], Reached())
    data = bytes(encode_pack(bytearray(), step, "store", "embedded"))
    with pytest.raises(CorruptionError, match="an object, that none has"):
        decode_step(data, NAME, "store", "it")


def test_those_of_another_store_and_of_a_newer_version(monkeypatch: pytest.MonkeyPatch) -> None:
    data, _ = a_pack()
    with pytest.raises(CorruptionError, match="is of store 'store', expected other"):
        decode_step(data, NAME, "other", "it")
    monkeypatch.setattr(pack, "LOG_FORMAT", 2)
    newer, _ = a_pack()
    monkeypatch.setattr(pack, "LOG_FORMAT", 1)
    with pytest.raises(FormatVersionError, match="is of format 2"):
        decode_step(newer, NAME, "store", "it")


def test_equal_contents_have_equal_bytes() -> None:
    assert a_pack()[0] == a_pack()[0]
