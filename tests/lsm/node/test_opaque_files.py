"""Files of kept checkpoints on a node: found, durable, told of once, lost, damaged and dropped."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

import pytest
from blake3 import blake3

import nosync
from nosync.lsm.node.node import Node
from nosync.lsm.platform.env import Env
from nosync.lsm.platform.opaque import OpaqueRecord, checkpoint_of
from nosync.lsm.platform.store_marker import create_store, read_marker
from nosync.lsm.settings import StoreSettings
from nosync.lsm.trace.directory import LayerDirectory
from tests.helpers.peers import Peers

WORDS = PurePosixPath("checkpoints/words")


class Clock(Env):
    """Counts what is synced; time passes when the test says so."""

    def __init__(self) -> None:
        self.now_s, self.synced, self.failing = 100.0, list[Path](), set[str]()

    def monotonic_s(self) -> float:
        return self.now_s

    def sync_file(self, path: Path) -> None:
        if path.name in self.failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self.synced.append(path)
        super().sync_file(path)


@pytest.fixture
def env() -> Clock:
    return Clock()


def open_node(root: Path, env: Env) -> tuple[Node, Peers]:
    directory = LayerDirectory(root, 4, env)
    settings = StoreSettings(background=False, merge=False)
    node, peers = Node(directory, read_marker(root, env), settings, replicated=True), Peers(0, 0)
    node.listen(peers)
    return node, peers


@pytest.fixture
def node(tmp_path: Path, env: Clock) -> Iterator[tuple[Node, Peers]]:
    create_store(tmp_path / "data", 4, env)
    made, peers = open_node(tmp_path / "data", env)
    yield made, peers
    with suppress(nosync.CatalogError):  # it was closed by the test
        made.abandon()


def write(root: Path, path: PurePosixPath, data: bytes) -> OpaqueRecord:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_bytes(data)
    return OpaqueRecord(path, blake3(data).hexdigest(), len(data))


def test_files_are_found_synced_and_told_of_once(node: tuple[Node, Peers], env: Clock) -> None:
    opaque, peers, root = node[0].opaque, node[1], node[0].directory.root
    chance = random.Random(3)
    made = [
        write(root, WORDS / f"state/0/{i % 7}/{i}.delta", chance.randbytes(chance.choice((0, 5, 3 << 20))))
        for i in range(40)
    ]
    opaque.step()
    assert sorted(opaque.records(), key=lambda r: r.path) == sorted(made, key=lambda r: r.path)
    assert sorted(peers.announced) == sorted(str(record.path) for record in made)
    assert {root / record.path for record in made} <= set(env.synced)
    opaque.step()
    assert len(peers.announced) == 40, "once each"
    late = write(root, WORDS / "commits/3", b"v1")
    opaque.step()
    assert late not in opaque.records(), "all is listed now and then"
    opaque.note([late.path])
    opaque.step()
    assert late in opaque.records()


def test_the_next_start_knows_them_without_reading_them(node: tuple[Node, Peers], env: Clock) -> None:
    root = node[0].directory.root
    made = write(root, WORDS / "commits/0", b"v1\n{}")
    node[0].opaque.step()
    node[0].abandon()
    (root / made.path).write_bytes(b"v1\n[]")  # of the same size: it is believed until a peer cannot use it
    again, peers = open_node(root, env)
    try:
        assert again.opaque.records() == [made]
        again.opaque.step()
        assert peers.announced == []
        again.opaque.suspect(made.path)
        again.opaque.step()
        assert again.opaque.records() == []
        assert peers.gone == [(str(made.path), False)]
        assert not (root / made.path).exists()
        assert [p.read_bytes() for p in (root / "quarantine").iterdir()] == [b"v1\n[]"]
    finally:
        again.abandon()


def test_what_is_gone_is_lost_and_what_is_dropped_is_not(node: tuple[Node, Peers], env: Clock) -> None:
    opaque, peers, root = node[0].opaque, node[1], node[0].directory.root
    a, b, c = (write(root, WORDS / f"offsets/{i}", b"x" * i) for i in range(3))
    opaque.step()
    (root / a.path).unlink()
    env.now_s += 61
    opaque.step()
    assert peers.gone == [(str(a.path), False)]
    opaque.removes(lambda: [b.path])
    opaque.step()
    assert (root / b.path).exists(), "peers have not said yet what they hold"
    env.now_s += 6
    opaque.step()
    assert peers.gone == [(str(b.path), True)]
    assert not (root / b.path).exists()
    assert opaque.records() == [c]
    opaque.drop([PurePosixPath("NOSYNC"), PurePosixPath("../outside"), PurePosixPath("checkpoints/words/LOCK")])
    assert (root / "NOSYNC").exists(), "no other file goes"


def test_a_cut_file_is_not_believed(node: tuple[Node, Peers], env: Clock) -> None:
    opaque, peers, root = node[0].opaque, node[1], node[0].directory.root
    made = write(root, WORDS / "state/0/0/1.delta", b"0123456789")
    opaque.step()
    os.truncate(root / made.path, 4)
    env.now_s += 61
    opaque.step()
    assert opaque.records() == []
    assert peers.gone == [(str(made.path), False)]


def test_after_a_failed_fsync_it_is_another_inode_and_nobody_was_told_before(
    node: tuple[Node, Peers], env: Clock
) -> None:
    opaque, peers, root = node[0].opaque, node[1], node[0].directory.root
    made, other = write(root, WORDS / "commits/0", b"v1"), write(root, WORDS / "commits/1", b"v1\n{}")
    inode = (root / made.path).stat().st_ino
    env.failing = {"0"}
    opaque.step()
    assert opaque.records() == [other]
    assert "Input/output error" in node[0].problems[str(made.path)]
    env.failing = set()
    opaque.step()
    assert made in opaque.records()
    assert (root / made.path).stat().st_ino != inode
    assert str(made.path) not in node[0].problems
    assert peers.announced == [str(other.path), str(made.path)]


def test_links_and_names_of_nobody(node: tuple[Node, Peers], tmp_path: Path, env: Clock) -> None:
    opaque, root = node[0].opaque, node[0].directory.root
    (tmp_path / "secret").write_text("secret")
    write(root, WORDS / "commits/0", b"v1")
    (root / WORDS / "commits/1").symlink_to(tmp_path / "secret")
    (root / "checkpoints/other").symlink_to(tmp_path)
    os.mkfifo(root / WORDS / "commits/2")
    strange = write(root, WORDS / "commits/na\u00efve", b"v1")
    write(root, WORDS / "LOCK", b"")
    write(root, WORDS / ".x.tmp", b"")
    env.now_s += 61
    opaque.step()
    assert [record.path.name for record in opaque.records()] == ["0"]
    assert "only: its name has characters" in node[0].problems[str(strange.path)]
    assert len(node[0].problems) == 1


@pytest.mark.parametrize(
    ("path", "checkpoint"),
    [
        ("checkpoints/words/commits/0", "words"),
        ("checkpoints/words.12/state/0/1/left-keyToNumValues/_metadata/schema", "words"),
        ("checkpoints/words/state/0/0/SSTs/000008-1f-6.sst", "words"),
        ("checkpoints/words/metadata.crc", "words"),
        ("checkpoints/words/LOCK", None),
        ("checkpoints/words/x/LOCK", "words"),
        ("checkpoints/words", None),
        ("checkpoints/words/../../NOSYNC", None),
        ("checkpoints/words/.x", None),
        ("checkpoints/words/x.tmp", None),
        ("checkpoints/words.0/x", None),
        ("checkpoints//x", None),
        ("checkpoints/words//x", None),
        ("checkpoints/Words/x", None),
        ("checkpoints/words/a\nb", None),
        ("checkpoints/words/x/", None),
        ("checkpoints/words/" + "/".join("a" * 9), None),
        ("checkpoints/words/" + "a" * 300, None),
        ("layers/a/b", None),
    ],
)
def test_only_names_that_a_checkpoint_has_are_names(path: str, checkpoint: str | None) -> None:
    assert checkpoint_of(path) == checkpoint
