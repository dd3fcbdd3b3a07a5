"""Small files from other nodes: what no store writes under such a name never gets it, and is told of as damage where it
lies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

import nosync
from nosync.lsm.errors import CorruptionError, NosyncError
from nosync.lsm.node.metadata_checks import check_contents, first_said_otherwise
from nosync.lsm.node.node import Node
from nosync.lsm.platform.env import Env
from nosync.lsm.platform.json_file import seal_json
from nosync.replication.protocol.file_names import FileName, FileVersion
from tests.conftest import OpenStore
from tests.helpers.depth import examples
from tests.helpers.receiver import Receiver

LAYERS = [
    {"stage": "s", "fingerprint": "f", "shard": "0of2", "lower": 1 << 20, "upper": 2 << 20, "digest": "ab", "rows": 3,
     "origin": 0, "copies": 1},
]  # fmt: skip
MANIFEST = {"line": "main", "t": 1, "layers": LAYERS, "meta": {}}
CREATE = {"do": "create", "name": "b", "line": "b-1", "parent": "main", "at": 0, "changed": ["s"]}
GOOD: dict[str, dict[str, Any]] = {
    "manifests/main/1.json": MANIFEST,
    "branches/1.json": CREATE,
    "branches/2.json": {"do": "promote", "name": "b", "keep_as": None},
    "branches/3.json": {"do": "delete", "name": "b"},
    "pins/p-00.json": {"name": "p", "t": 0},
    "times/main/1-00.json": {"line": "main", "epochs": [[1, 1_783_000_000_000_000, None, None]]},
    "times/main/0-1-00.json": {"line": "main", "epochs": [[0, 17, -5, 5], [1, 18, None, None]]},
    "pins/p-00.gone.json": {"gone": "p-00.json"},
}
ODD = [None, -1, 1 << 70, True, "", "../../x", "A b", [], {}, [None], 0.5, "0of0", {"a": 1}]


def read_all(root: Path) -> None:
    """What every process of a store does with its small files."""
    with nosync.open(root, read_only=True) as store:
        assert store.last_sealed() is not None
        assert store.pins() is not None
        store.status()


@pytest.mark.parametrize("name", GOOD)
def test_what_a_store_writes_is_taken(name: str) -> None:
    check_contents(PurePosixPath(name), seal_json(GOOD[name]))


def changed(fields: Any, draw: st.DrawFn) -> Any:
    """The same with one value, somewhere, another one or gone."""
    if isinstance(fields, dict) and fields and draw(st.integers(0, 9)):
        key = draw(st.sampled_from(sorted(fields)))
        if draw(st.booleans()):
            return {k: v for k, v in fields.items() if k != key}
        return fields | {key: changed(fields[key], draw)}
    if isinstance(fields, list) and fields and draw(st.booleans()):
        return [changed(fields[0], draw), *fields[1:]]
    return draw(st.sampled_from(ODD))


@settings(max_examples=examples(40))
@given(st.data(), st.sampled_from(sorted(set(GOOD) - {"pins/p-00.gone.json"})))
def test_whatever_is_changed_is_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, name: str
) -> None:
    text = seal_json(changed(GOOD[name], data.draw))
    with contextlib.suppress(CorruptionError):
        check_contents(PurePosixPath(name), text)
    root = tmp_path_factory.mktemp("store")
    with nosync.open(root) as store:
        store.append("s", t=0, rows=pa.table({"k": [1]}), key=["k"])
        store.seal(0)
    (root / "outside").mkdir()
    final = root / name
    final.parent.mkdir(exist_ok=True)
    final.write_bytes(text)
    try:
        read_all(root)
        with nosync.open(root) as store:
            store.append("s", t=1, rows=pa.table({"k": [2]}), key=["k"])
    except NosyncError:
        pass  # it says what is wrong; a bare exception would not be caught here
    assert (root / "outside").is_dir()


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[Receiver]:
    found = Receiver(tmp_path / "n1")
    yield found
    found.node.announcer.listen(None)
    found.node.abandon()


BAD = {
    "branches/1.json": [CREATE | {"line": "../../victim"}, {"do": "create", "x": 1}, CREATE | {"name": "main"}],
    "branches/2.json": [{"do": "explode", "name": "b"}],
    "manifests/main/1.json": [{"x": 1}, MANIFEST | {"t": 2}, MANIFEST | {"line": "other"}, MANIFEST | {"layers": [{}]}],
    "pins/p-00.json": [{"name": "../p", "t": 0}, {"t": 0}],
}


@pytest.mark.parametrize(("name", "fields"), [(name, one) for name, several in BAD.items() for one in several])
def test_what_no_store_writes_gets_no_name_here(receiver: Receiver, name: str, fields: dict[str, Any]) -> None:
    text = seal_json(fields)
    source = receiver.root.parent / "source"
    source.write_bytes(text)
    held = FileVersion(FileName(name), blake3(text).hexdigest(), len(text))
    receiver.announce(held)
    receiver.send(held, source)
    assert not (receiver.root / name).exists()
    assert receiver.replicator.counters.refused_files == 1
    assert list((receiver.root / "tmp").iterdir()) == []


def test_an_archive_whose_lines_are_not_epochs_is_refused() -> None:
    run = {"first": 0, "policies": {}, "traces": [["s", "f", "0of2", 0, 1]]}
    head = {"line": "main", "first": 0, "last": 1, "runs": [run]}
    line = b'{"digests":["ab"],"meta":{},"rows":[1]}\n'
    path = PurePosixPath("manifests/main/0-1.json")
    check_contents(path, seal_json(head, line * 2))
    for bad in (
        b"{}\n",
        b'{"digests":["ab","cd"],"meta":{},"rows":[1]}\n',
        b'{"digests":[1],"meta":{},"rows":[1]}\n',
        b"[\n",
    ):
        with pytest.raises(CorruptionError, match="at epoch 1"):
            check_contents(path, seal_json(head, line + bad))
    for runs in ([], [run | {"first": 1}], [run | {"traces": [["s", "f", "x", 0, 1]]}], [run, run]):
        with pytest.raises(CorruptionError, match="not an archive"):
            check_contents(path, seal_json(head | {"runs": runs}, line * 2))


def test_an_archive_of_another_history_is_told_from_the_manifests_here(open_store: OpenStore) -> None:
    settings = nosync.StoreSettings(background=False, grace_s=0.0, archive_epochs=4)
    mine, same, other = (open_store(name, settings=settings) for name in ("mine", "same", "other"))
    for t in range(14):
        for store, value in ((mine, t), (same, t), (other, t if t < 6 else -t)):
            one_more_with(store, t, value)
    for store in (same, other):
        store.sync()
        assert isinstance(store.node, Node)
        for _ in range(2):
            store.node.archive_manifests()
    archives = sorted((other.directory.root / "manifests/main").glob("*-*.json"))
    assert [path.name for path in archives] == ["0-3.json", "4-7.json"]

    def found(store: nosync.Store, name: str) -> int | None:
        path = PurePosixPath("manifests/main", name)
        text = (store.directory.root / path).read_bytes()
        return first_said_otherwise(mine.directory.root, path, text, Env())

    assert [found(same, path.name) for path in archives] == [None, None]
    assert [found(other, path.name) for path in archives] == [None, 6]
    assert found(other, "13.json") is None, "single ones are compared by their digests"
    (mine.directory.root / "manifests/main/6.json").write_text("damaged")
    assert found(other, "4-7.json") == 7


def one_more_with(store: nosync.Store, t: int, value: int) -> None:
    store.append("counts", t=t, rows=pa.table({"k": [1], "v": [value]}), key=["k"])
    store.seal(t)
