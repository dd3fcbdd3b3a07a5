"""Damaged and forged files of every kind that a store has, each under digests that fit, in one process with bounded
memory.

    python -m tests.helpers.fuzzing --inputs 1000000 --seed 7      all of them
    python -m tests.helpers.fuzzing --only 123456 --seed 7         one again

Every file ends as a NosyncError or as a right answer: what was read is valid, and says the same when it is written and
read again. Nothing hangs, nothing takes memory or descriptors, and no process ends by a signal: the number of the input
that is being read is kept outside of the process.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from types import FrameType
from typing import Any

import pyarrow as pa

import nosync
from nosync.lsm.errors import NosyncError
from nosync.lsm.facts.deliveries import DeliveryLog
from nosync.lsm.facts.fencing import newest_instance, take_over
from nosync.lsm.facts.or_set import Element, read_element
from nosync.lsm.facts.pins import Pins
from nosync.lsm.facts.seal_times import SealTimes
from nosync.lsm.layers.reader import LayerReader
from nosync.lsm.manifests.archive import Archive, Details
from nosync.lsm.manifests.branches import read_refs
from nosync.lsm.manifests.manifest import Manifest
from nosync.lsm.model.layer import parse_path
from nosync.lsm.node.discards import DiscardedVersions
from nosync.lsm.node.metadata_checks import check_contents
from nosync.lsm.platform.env import Env
from nosync.lsm.platform.json_file import seal_json, unseal_json
from nosync.lsm.platform.layout import MARKER, VERIFIED
from nosync.lsm.platform.store_marker import _digest_of, read_marker
from nosync.lsm.platform.verified import is_verified_here
from nosync.replication.daemon.config import DaemonConfig
from nosync.replication.daemon.members import MEMBERS_FILE, peers_of
from nosync.replication.transport.daemon_files import ADDRESS_FILE, address_of
from nosync.replication.transport.revocation import REVOKED, read_revoked
from tests.helpers.forging import forge_layer

ENV = Env()
MORE_MEMORY_BYTES = 2 << 30
"""Address space beyond what the process has when it begins."""
MORE_RESIDENT_BYTES = 512 << 20
MORE_DESCRIPTORS = 16
LONGEST_S = 30
OUTPUT = "17"
WHOLE_EVERY = 250
"""Of so many inputs one is read as part of the whole store, and of four of these one by a node."""
ODD: list[Any] = [
    None, True, -1, 0, 1, 255, 1 << 31, 1 << 62, 1 << 70, -(1 << 63), 1.5, 1e308, float("nan"), "", "x" * 300, "../../etc", "/",
    ".",
    "\x00", "\u00b2", "\u0661", "\ud800", "0of0", "1of0", "9of2", "main", [], {}, [[]], {"a": {}}, ["main"], "drop", "\x1b[2J",
]  # fmt: skip
TEXTS = [
    b"", b"{", b"null", b"[]", b"{}", b"7", b'"x"', b"[" * 5000, b'{"a":' * 5000, b"\xff\xfe", b"\x00" * 100, b"9" * 5000,
    b'{"body": {"x": 1e999}, "blake3": "", "nosync": 1}', b'{"nosync_store": 1e999}', b"\n" * 1000, b"{}\n" * 1000,
]  # fmt: skip


class OneToken(Env):
    """Gives the output of a sink the number that the reader expects."""

    def token(self) -> str:
        return f"{int(OUTPUT):x}"


# --- a store with every kind of file -------------------------------------------------------------------------------


def make_store(root: Path) -> None:
    settings = nosync.StoreSettings(background=False, archive_epochs=4)
    with nosync.open(root, settings=settings, key_groups=8) as store:
        for t in range(10):
            rows = pa.table({
                "k": range(40), "text": [f"word {i} of {t}" for i in range(40)], "xs": [[i] * (i % 3) for i in range(40)],
                "b": [None if i % 5 else b"%d" % i for i in range(40)], "f": [i / 7 for i in range(40)],
            })  # fmt: skip
            deletes = pa.table({"k": pa.array([40 + t, 99], pa.int64())}) if t else None
            store.append("words", t=t, rows=rows, deletes=deletes, key=["k"])
            store.append("log", t=t, rows=pa.table({"n": range(t, t + 20), "ok": [True, False] * 10}), key=[])
            store.seal(t)
        store.sync()
        store.node.archive_manifests()
        store.pin("p", 1)
        store.node.create_branch("b", "main", 8)
        store.node.create_branch("c", "b", 8)
        store.append("words", t=10, rows=pa.table({"k": [1], "text": ["x"], "xs": [[1]], "b": [b""], "f": [0.5]}))
        store.seal(10, fill_missing=True)
        store.compact("log")
        store.sync()
        take_over(root, "main", ENV)
        marks = DeliveryLog(root, "words", "main", read_refs(root, ENV), ENV)
        marks.begin(0)
        marks.mark(3)
        marks.schedule_redelivery(2)
        assert DeliveryLog(root, "words", "main", read_refs(root, ENV), OneToken()).own() == OUTPUT
        DiscardedVersions(root, ENV).remember({"layers/words/x/0/a.layer": "0" * 64})
    for path in (root / "manifests" / "main").glob("*[0-9].json"):
        if "-" not in path.name:
            fields, _ = unseal_json(path.read_bytes(), str(path))
            path.unlink()
            path.write_bytes(seal_json(fields | {"meta": {"at_safe_point": {"log": "keep"}, "offsets": {"a": [1]}}}))
    about = {"address": "127.0.0.1:1", "node": "n1", "pid": 1, "place": "p", "tls": ""}
    (root / ADDRESS_FILE).write_text(json.dumps(about))
    (root / MEMBERS_FILE).write_text(json.dumps({"n2": "127.0.0.1:2", "n3": "127.0.0.1:3"}))
    (root / REVOKED).write_text("ab12\n34:cd  # n2\n")


# --- what a reader makes of a file -----------------------------------------------------------------------------------


def read_layer(root: Path, path: PurePosixPath) -> None:
    reader = LayerReader.open(root / path, ENV, parse_path(path.relative_to("layers")))
    blocks = list(reader.blocks())
    for block in blocks:
        block.batch.validate(full=True)
        assert len(block.row_times()) == len(block.row_tombstones()) == block.rows
        block.data.to_pylist()
    reader.verify()
    assert sum(block.rows for block in blocks) == reader.info.rows
    assert reader.schema_until(reader.last_time).names is not None


def read_manifest(root: Path, path: PurePosixPath) -> None:
    text = ENV.read(root / path)
    check_contents(path, text)
    if "-" in path.name:
        archive = Archive.parse(text, path.parent.name, path.name, str(path))
        found = [Details.parse(archive, text, str(path)).manifest(t) for t in archive.epochs]
        assert [one.t for one in found] == list(archive.epochs)
        return
    found_one = Manifest.from_json(text, str(path))
    again = found_one.to_json()
    assert Manifest.from_json(again, str(path)).to_json() == again
    assert set(found_one.policies.values()) <= {"drop", "disk"}


def read_branches(root: Path, path: PurePosixPath) -> None:
    check_contents(path, ENV.read(root / path))
    refs = read_refs(root, ENV)
    for line in refs.names.values():
        assert [one.id for one in refs.lineage(line)][-1] == line
        refs.left(line)


def read_register(root: Path, path: PurePosixPath) -> None:
    check_contents(path, ENV.read(root / path))
    read_element(root, Element(path), ENV)
    kind = path.parts[0]
    if kind == "pins":
        assert all(pin.t >= 0 for pin in Pins(root, ENV).by_name().values())
    elif kind == "jobs":
        newest_instance(root, "main", ENV)
    else:
        marks = DeliveryLog(root, "words", "main", read_refs(root, ENV), ENV)
        assert (marks.last(), marks.first(), marks.owns(OUTPUT)) == (3, 0, True)


def read_times(root: Path, path: PurePosixPath) -> None:
    check_contents(path, ENV.read(root / path))
    assert all(t >= 0 for t in SealTimes(root, ENV).of_timeline(path.parent.name))


def read_address(root: Path, _: PurePosixPath) -> None:
    found = address_of(root)
    assert found is None or all(isinstance(found.get(name, ""), str) for name in ("address", "node", "place", "tls"))


def read_members(root: Path, _: PurePosixPath) -> None:
    peers = peers_of(DaemonConfig("n1", root, replicas=1))
    assert all(isinstance(one, str) for item in peers.items() for one in item)


def read_discarded(root: Path, _: PurePosixPath) -> None:
    assert all(isinstance(one, str) for item in DiscardedVersions(root, ENV).digests.items() for one in item)


READERS: dict[str, Callable[[Path, PurePosixPath], object]] = {
    "layers": read_layer, "manifests": read_manifest, "branches": read_branches, "pins": read_register,
    "jobs": read_register, "sinks": read_register, "times": read_times, "given-up.json": read_discarded,
    ADDRESS_FILE: read_address, MEMBERS_FILE: read_members, MARKER: lambda root, _: read_marker(root, ENV),
    VERIFIED: lambda root, _: is_verified_here(root), REVOKED: lambda root, _: read_revoked(root / REVOKED),
}  # fmt: skip


def read_whole(root: Path, *, by_node: bool) -> None:
    options: dict[str, Any] = {"settings": nosync.StoreSettings(background=False)} if by_node else {"read_only": True}
    with nosync.open(root, **options) as store:
        store.verify()
        for stage in ("words", "log"):
            for t in (0, 5, 10):
                try:
                    store.read(stage, t).validate(full=True)
                except NosyncError:
                    continue
        store.status()


# --- damage -----------------------------------------------------------------------------------------------------------


def torn(data: bytes, chance: random.Random) -> bytes:
    """Bytes that nobody wrote."""
    how = chance.randrange(6)
    if how == 0 or not data:
        return chance.choice(TEXTS)
    at = chance.randrange(len(data))
    if how == 1:
        return data[:at]
    if how == 2:
        return data[:at] + data[at:] * chance.choice([2, 50])
    if how == 3:
        return data[:at] + chance.randbytes(chance.randrange(1, 64)) + data[at:]
    found = bytearray(data)
    for _ in range(chance.choice([1, 1, 2, 8])):
        found[chance.randrange(len(found))] ^= 1 << chance.randrange(8)
    return bytes(found)


def changed(value: Any, chance: random.Random) -> Any:
    """JSON with something else somewhere in it."""
    if isinstance(value, dict) and value and chance.random() < 0.85:
        name = chance.choice(sorted(value))
        how = chance.random()
        if how < 0.1:
            return {k: v for k, v in value.items() if k != name}
        if how < 0.15:
            return {**value, chance.choice(["", "\u00b2", "x" * 200]): chance.choice(ODD)}
        return {**value, name: changed(value[name], chance)}
    if isinstance(value, list) and value and chance.random() < 0.85:
        at, how = chance.randrange(len(value)), chance.random()
        if how < 0.1:
            return value[:at] + value[at + 1 :]
        if how < 0.2:
            return value[: at + 1] * chance.choice([2, 300])
        if how < 0.25:
            return value[::-1]
        return [*value[:at], changed(value[at], chance), *value[at + 1 :]]
    if isinstance(value, int) and not isinstance(value, bool) and chance.random() < 0.5:
        return value + chance.choice([-1, 1, -value, value, 1 << 20, 1 << 40])
    if isinstance(value, str) and value and chance.random() < 0.3:
        at = chance.randrange(len(value))
        return value[:at] + chance.choice(["", "0", "/", "-", "\u0662", "of"]) + value[at + 1 :]
    return chance.choice(ODD)


def forge_small(path: Path, data: bytes, chance: random.Random) -> None:
    """A small file that says something else, under its right digest if it has one."""
    try:
        fields, rest = unseal_json(data, "here")
        fields.pop("rest_blake3", None)
    except NosyncError:
        try:
            found = changed(json.loads(data), chance)
            if path.name == MARKER and isinstance(found, dict) and chance.random() < 0.8:
                found.pop("blake3", None)
                found["blake3"] = _digest_of(found)
            new = json.dumps(found).encode()
        except ValueError:  # the list of serial numbers is none of JSON's
            new = torn(data, chance)
    else:
        if rest and chance.random() < 0.5:
            lines = rest.split(b"\n")
            at = chance.randrange(len(lines))
            try:
                lines[at] = json.dumps(changed(json.loads(lines[at]), chance)).encode()
            except ValueError:
                lines[at] = torn(lines[at], chance)
            rest = b"\n".join(lines)
        else:
            found = changed(fields, chance)
            fields = found if isinstance(found, dict) else {"body": found}
        new = seal_json(fields, rest)
    path.unlink()
    path.write_bytes(new)


def forge(path: Path, chance: random.Random) -> None:
    """A layer that is none, under its right digests."""

    def of_words(body: bytearray) -> bytearray:
        for _ in range(chance.choice([1, 1, 2, 6])):
            at = chance.randrange(len(body) // 4) * 4
            value = chance.choice([0, 1, -1, 1 << 20, 0x7FFFFFFF, -(1 << 31), chance.randrange(1 << 16)])
            body[at : at + 4] = (value & 0xFFFFFFFF).to_bytes(4, "little")
        return body

    def of_fields(said: dict[str, Any]) -> None:
        found = changed(dict(said), chance)
        if isinstance(found, dict):
            said.clear()
            said.update(found)

    how = chance.randrange(5)
    if how <= 2:
        forge_layer(path, body=of_words if how else lambda body: bytearray(torn(bytes(body), chance)))
    elif how == 3:
        forge_layer(path, fields=of_fields)
    else:
        forge_layer(path, offsets=lambda groups: groups and bytes(of_words(bytearray(groups))))


# --- the run ----------------------------------------------------------------------------------------------------------


class Fuzzer:
    """Reads one input after the other. `kept`: the descriptor of a file that says which one it is."""

    def __init__(self, root: Path, seed: int, kept: int | None) -> None:
        self._root, self._seed, self._kept = root, seed, kept
        files = [path for path in sorted(root.rglob("*")) if path.is_file()]
        relative = {PurePosixPath(path.relative_to(root)): path.read_bytes() for path in files}
        self._files = {path: data for path, data in relative.items() if path.parts[0] in READERS}
        self._by_kind: dict[str, list[PurePosixPath]] = {}
        for path in self._files:
            self._by_kind.setdefault(path.parts[0], []).append(path)
        assert self._by_kind.keys() == READERS.keys(), "the store has files of every kind"
        self.outcomes: Counter[str] = Counter()

    def run(self, index: int) -> None:
        """Reads input `index`. Raises whatever is no NosyncError."""
        if self._kept is not None:
            os.pwrite(self._kept, b"%20d" % index, 0)
        chance = random.Random(f"{self._seed}:{index}")
        kind = chance.choice(["layers", *self._by_kind])  # layers twice as often
        name = chance.choice(self._by_kind[kind])
        path = self._root / name
        try:
            self._damage(path, self._files[name], chance)
            signal.alarm(LONGEST_S)
            self._read(kind, name)
            if index % WHOLE_EVERY == 0:
                self._read_whole(by_node=index % (4 * WHOLE_EVERY) == 0)
        finally:
            signal.alarm(0)
            path.unlink(missing_ok=True)
            path.write_bytes(self._files[name])

    def _damage(self, path: Path, data: bytes, chance: random.Random) -> None:
        if chance.random() < 0.25:
            path.unlink()
            path.write_bytes(torn(data, chance))
        elif path.suffix == ".layer":
            forge(path, chance)
        else:
            forge_small(path, data, chance)

    def _read(self, kind: str, name: PurePosixPath) -> None:
        try:
            READERS[kind](self._root, name)
            self.outcomes[f"{kind} read"] += 1
        except NosyncError as error:
            str(error)
            self.outcomes[f"{kind} refused"] += 1

    def _read_whole(self, *, by_node: bool) -> None:
        """In a copy: as somebody else's, which no node of this host has looked at; a node moves away what is bad,
        besides.
        """
        with tempfile.TemporaryDirectory() as there:
            root = Path(there, "store")
            for path in self._root.rglob("*"):
                if path.is_file() and "catalog" not in path.parts:
                    target = root / path.relative_to(self._root)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(path.read_bytes())
            try:
                read_whole(root, by_node=by_node)
                self.outcomes["whole store read"] += 1
            except NosyncError:
                self.outcomes["whole store refused"] += 1


def bounded() -> tuple[int, int]:
    """Bounds the address space. Returns what is resident, and how many descriptors there are."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MORE_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, len(os.listdir("/proc/self/fd"))


def on_alarm(_: int, __: FrameType | None) -> None:
    raise AssertionError(f"reading it takes more than {LONGEST_S} s")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--inputs", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int)
    parser.add_argument("--kept", type=Path)
    given = parser.parse_args()
    signal.signal(signal.SIGALRM, on_alarm)
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory, "store")
        make_store(root)
        kept = None if given.kept is None else os.open(given.kept, os.O_RDWR | os.O_CREAT, 0o600)
        fuzzer = Fuzzer(root, given.seed, kept)
        read_whole(root, by_node=False)
        resident, descriptors = bounded()
        began_s = told_s = time.monotonic()
        for index in [given.only] if given.only is not None else range(given.inputs):
            try:
                fuzzer.run(index)
            except BaseException:
                print(
                    f"input {index} of seed {given.seed}: python -m tests.helpers.fuzzing --seed {given.seed} --only {index}"
                )
                raise
            if time.monotonic() > told_s + 10.0:
                told_s = time.monotonic()
                rate = (index + 1) / (told_s - began_s)
                print(f"{index + 1:,} of {given.inputs:,} inputs, {rate:,.0f} a second", file=sys.stderr, flush=True)
        more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - resident
        assert more < MORE_RESIDENT_BYTES, f"{more >> 20} MiB more were resident"
        left = len(os.listdir("/proc/self/fd")) - descriptors
        assert left <= MORE_DESCRIPTORS, f"{left} descriptors are left open"
    print(json.dumps(fuzzer.outcomes, sort_keys=True))


if __name__ == "__main__":
    main()
