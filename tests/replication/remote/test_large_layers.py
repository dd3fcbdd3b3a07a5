"""Large layers, which are objects of their own, in parts."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa

from nosync.lsm.layers.format import decode
from nosync.replication.remote.bucket import Bucket
from nosync.replication.remote.copying import copy_directory
from nosync.replication.remote.restore import restore
from nosync.replication.remote.settings import RemoteSettings
from nosync.testing.simulated_bucket import SimulatedBucket
from tests.conftest import OpenStore
from tests.helpers.remotes import QUIET, Copies, open_quiet


def test_large_layers_are_objects_of_their_own_in_parts(open_store: OpenStore, bucket: Bucket) -> None:
    store = open_quiet(open_store)
    copies = Copies(store, bucket, large_bytes=1000)
    rows = pa.table({"k": list(range(3000)), "n": list(range(3000))})
    store.append("big", t=0, rows=rows, key=["k"])
    store.seal(0)
    store.sync()
    copies.push()
    (placed,) = [one for one in copies.contents().files() if one.version.size_bytes > 10_000]
    parts = bucket.list(f"{placed.place.object}/")
    assert len(parts) == -(-placed.version.size_bytes // 1000)
    assert all(part.size_bytes <= 1000 for part in parts)
    whole = b"".join(bucket.get(part.name) for part in parts)
    assert decode(pa.py_buffer(whole), "it").digest == placed.version.digest
    assert copies.level.status().safe_point == 0


def test_a_layer_that_is_damaged_between_its_parts_is_no_copy(open_store: OpenStore, tmp_path: Path) -> None:
    store, bucket = open_quiet(open_store), SimulatedBucket()
    copies = Copies(store, bucket, large_bytes=20_000, flush_bytes=20_000)
    chance = random.Random(1)
    store.append("counts", t=0, rows=pa.table({"k": [f"{chance.getrandbits(128):x}" for _ in range(5000)]}), key=["k"])
    store.seal(0)
    store.sync()
    uploader = copies.flush_once()
    assert uploader.writer.objects_begun()
    (path,) = (tmp_path / "store" / "layers" / "counts").rglob("*.layer")
    data = bytearray(path.read_bytes())
    data[-len(data) // 4] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)
    copies.level.push(1.0)
    status = copies.level.status()
    assert status.safe_point is None
    assert path.name in status.problem
    assert not uploader.writer.objects_begun()


def test_a_backup_of_a_layer_of_many_packs(open_store: OpenStore, tmp_path: Path) -> None:
    bucket, settings = SimulatedBucket(), RemoteSettings("memory://test", large_bytes=1000, flush_bytes=1000)
    with open_quiet(open_store) as store:
        rows = pa.table({"k": list(range(3000)), "n": list(range(3000))})
        store.append("big", t=0, rows=rows, key=["k"])
        store.seal(0)
    report = copy_directory(tmp_path / "store", bucket, settings)
    assert (report.epoch, report.sent_bytes > 20_000) == (0, True)
    restore(bucket, tmp_path / "restored")
    with open_store("restored", settings=QUIET) as restored:
        assert restored.read("big").num_rows == 3000
