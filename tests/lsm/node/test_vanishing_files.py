"""Files that vanish while they are made durable, as those of a branch that is dropped do: nothing else is taken for
durable.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

import nosync
from nosync.lsm.errors import StorageError
from nosync.lsm.layers.reader import LayerReader
from nosync.lsm.layers.writer import arrange
from nosync.lsm.manifests.manifest import Manifest, publish_manifest
from nosync.lsm.model.layer import Description, LayerId, Shard, TraceId
from nosync.lsm.model.timestamp import Epoch
from nosync.lsm.node.metadata_sync import MetadataSync
from nosync.lsm.platform.env import Env


class Meddling(Env):
    """`meddle` runs once, before a directory is synced; `failing` syncs of layers fail."""

    meddle: Callable[[], None] | None = None
    failing = 0

    def sync_dir(self, path: Path) -> None:
        meddle, self.meddle = self.meddle, None
        if meddle is not None:
            meddle()
        super().sync_dir(path)

    def sync_file(self, path: Path) -> None:
        if self.failing and "layers" in path.parts:
            self.failing -= 1
            raise OSError(errno.EIO, "Input/output error")
        super().sync_file(path)


@pytest.fixture
def env() -> Meddling:
    return Meddling()


@pytest.fixture
def store(tmp_path: Path, env: Meddling) -> nosync.Store:
    settings = nosync.StoreSettings(background=False, grace_s=0.0, retry_s=0.0)
    return nosync.open(tmp_path / "store", env=env, settings=settings)


def test_a_layer_that_is_dropped_and_published_again_meanwhile(store: nosync.Store, env: Meddling) -> None:
    """The record is of the file that is there, and that file was synced."""
    id = LayerId(TraceId("st", "code", Shard(0, 1)), Description.of_epoch(2))

    def publish(n: int) -> str:
        digest = store.directory.publish(id, arrange(pa.table({"n": [n]}), (), whose="")).digest
        store.node.note([id])
        return digest

    def drop_and_publish() -> None:
        store.node.parts.garbage.forget([id], grace=False)
        store.node.parts.garbage.collect()
        digests.append(publish(2))

    digests = [publish(1)]
    env.meddle = drop_and_publish
    store.sync()
    store.sync()
    assert digests[0] != digests[1]
    (record,) = store.node.parts.layers.of(id.trace).values()
    assert record.digest == digests[1] == LayerReader.open(store.directory.path_of(id), env, id).digest
    store.close()


def test_a_layer_that_is_dropped_meanwhile_is_not_recorded(store: nosync.Store, env: Meddling) -> None:
    id = LayerId(TraceId("st", "code", Shard(0, 1)), Description.of_epoch(2))
    store.directory.publish(id, arrange(pa.table({"n": [1]}), (), whose=""))
    store.node.note([id])
    env.meddle = store.directory.path_of(id).unlink
    store.sync()
    assert id not in store.node.durable_ids()
    assert not store.node.problems
    store.close()


def test_another_file_that_is_missing_makes_no_layer_durable(store: nosync.Store, env: Meddling) -> None:
    """After a failed sync its bytes go to a new file, by way of `tmp/`."""
    store.append("counts", t=0, rows=pa.table({"k": ["a"], "n": [1]}), key=["k"])
    store.seal(0)
    (layer,) = [Path(layer.path) for layer in store.layers()]
    before, env.failing = layer.stat().st_ino, 1
    with pytest.raises(StorageError, match="Input/output"):
        store.sync()
    tmp = store.directory.root / "tmp"
    shutil.rmtree(tmp)
    tmp.write_text("a directory that is lost is made again, and this is in its way")
    with pytest.raises(StorageError, match="Not a directory"):
        store.sync()
    assert store.safe_point() is None
    tmp.unlink()
    store.sync()
    assert store.safe_point() == 0
    assert layer.stat().st_ino != before
    store.close()


def test_a_manifest_that_is_cut_off_meanwhile_is_not_durable(tmp_path: Path, env: Meddling) -> None:
    nosync.open(tmp_path).close()
    problems: dict[str, str] = {}
    small, kept, cut = MetadataSync(tmp_path, env, problems), Manifest("b", Epoch(4), ()), Manifest("b", Epoch(5), ())
    for manifest in (kept, cut):
        publish_manifest(tmp_path, manifest, env)
    small.note([kept.path, cut.path])
    env.meddle = (tmp_path / cut.path).unlink
    assert small.sync(small.waiting()) == [kept.path]
    assert (small.durable(), small.waiting(), problems) == ([kept.path], [], {})
    publish_manifest(tmp_path, cut, env)
    small.note([cut.path])
    env.meddle = lambda: shutil.rmtree(tmp_path / kept.path.parent)
    assert small.sync(small.waiting()) == []
    assert not problems
