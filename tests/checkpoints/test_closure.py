"""What a query needs to go on after a batch: all of it, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nosync.checkpoints.closure import Closures, IncompleteBatchError
from nosync.checkpoints.index import FileIndex
from nosync.checkpoints.keep import files_below
from nosync.checkpoints.names import Batch
from nosync.checkpoints.spark_files import read_offsets
from nosync.lsm.errors import CorruptionError
from nosync.lsm.platform.env import Env
from tests.checkpoints.fake_query import KINDS, FakeQuery


def closures(root: Path, without: str | None = None) -> Closures:
    sizes = {path: (root / path).stat().st_size for path in files_below(root, Env()) if path != without}
    return Closures(FileIndex(sizes), *[lambda path: (root / path).read_bytes()] * 2)


def without_state(found: Closures) -> Closures:
    for path in [path for path in found.index.paths() if path.startswith("state/")]:
        found.index.discard(path)
    return found


def oracle(query: FakeQuery, t: int) -> set[str]:
    """The same by hand, for what FakeQuery writes: no index, no walk back over versions."""
    need = {"metadata", f"commits/{t}", f"offsets/{t}", "state/0/_metadata/metadata", "state/1/_metadata/metadata"}
    need |= {f"offsets/{t - 1}"} if t else set()
    compact = max((n for n in range(t + 1) if n % 4 == 3), default=None)
    need |= set() if compact is None else {f"sources/{query.source}/{compact}.compact"}
    need |= {f"sources/{query.source}/{n}" for n in range(0 if compact is None else compact + 1, t + 1)}
    version = t + 1
    base = version if query.kind == "rocksdb" else version - version % query.snapshot_every
    for operator, partition, name in query.stores:
        directory = query.directory(operator, partition, name)
        need.add(f"{directory}/_metadata/schema")
        form = "delta" if query.kind == "hdfs" else "changelog"
        for v in range(base + 1, version + 1):
            suffix = f"_{query.ids[directory, v]}" if query.kind == "v2" else ""  # type: ignore[index]
            need.add(f"{directory}/{v}{suffix}.{form}")
        if base and query.kind == "hdfs":
            need.add(f"{directory}/{base}.snapshot")
        elif base:
            suffix = f"_{query.ids[directory, base]}" if query.kind == "v2" else ""  # type: ignore[index]
            need.add(f"{directory}/{base}{suffix}.zip")
            need |= {f"{directory}/SSTs/{name}" for name in sorted(_ssts(query, directory, base, suffix))}
    return need


def _ssts(query: FakeQuery, directory: str, version: int, suffix: str) -> set[str]:
    return {f"000001-{directory.replace('/', '')}.sst", f"{version:06}-own{suffix}.sst"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_closure_is_what_the_batch_needs(tmp_path: Path, kind: str) -> None:
    query = FakeQuery(tmp_path, kind)
    query.run(9)
    found = closures(tmp_path)
    for t in range(9):
        assert set(found.of(Batch(t)).paths) == oracle(query, t), t


@pytest.mark.parametrize("kind", KINDS)
def test_without_any_file_of_it_a_batch_cannot_be_gone_on_from(tmp_path: Path, kind: str) -> None:
    query = FakeQuery(tmp_path, kind)
    query.run(5)
    need = closures(tmp_path).of(Batch(4)).paths
    opaque = {path for path in need if path.endswith("_metadata/schema")}  # nothing says how many there are
    for path in sorted(files_below(tmp_path, Env())):
        if path in need - opaque:
            if path.endswith("_metadata/metadata"):
                continue
            less = closures(tmp_path, without=path)
            try:
                rest = less.of(Batch(4)).paths
            except IncompleteBatchError:
                continue
            else:  # an earlier base serves as well
                assert path.rpartition("/")[2].endswith((".snapshot", ".zip", ".sst")), path
                assert path not in rest
        else:
            assert path in opaque or closures(tmp_path, without=path).of(Batch(4)).paths == need, path


def test_a_torn_sst_file_makes_an_earlier_base_count(tmp_path: Path) -> None:
    query = FakeQuery(tmp_path, "changelog")
    query.run(6)
    torn = tmp_path / "state/0/1/SSTs/000006-own.sst"
    torn.write_bytes(torn.read_bytes()[:-1])
    found = closures(tmp_path).of(Batch(5)).paths
    assert "state/0/1/6.zip" not in found
    assert {"state/0/1/3.zip", "state/0/1/4.changelog", "state/0/1/5.changelog", "state/0/1/6.changelog"} <= found
    plain = FakeQuery(tmp_path / "plain", "rocksdb")
    plain.run(2)
    torn = tmp_path / "plain/state/0/1/SSTs/000002-own.sst"
    torn.write_bytes(b"")
    with pytest.raises(IncompleteBatchError, match=r"state/0/1/SSTs/000002-own.sst has 0 bytes, and should have 6"):
        closures(tmp_path / "plain").of(Batch(1))
    assert closures(tmp_path / "plain").newest().batch == 0  # type: ignore[union-attr]


def test_a_batch_whose_changes_lost_their_contents_cannot_be_gone_on_from(tmp_path: Path) -> None:
    query = FakeQuery(tmp_path, "hdfs")
    query.run(5)
    (tmp_path / "state/0/0/4.delta").write_bytes(b"")
    assert closures(tmp_path).why_not(Batch(4)) == "state/0/0/4.delta: is empty"
    assert closures(tmp_path).why_not(Batch(2)) is None


def test_an_empty_snapshot_makes_an_earlier_base_count(tmp_path: Path) -> None:
    query = FakeQuery(tmp_path, "hdfs")
    query.run(7)
    (tmp_path / "state/0/0/6.snapshot").write_bytes(b"")
    found = closures(tmp_path).of(Batch(6)).paths
    assert "state/0/0/6.snapshot" not in found
    assert {f"state/0/0/{name}" for name in ("3.snapshot", "4.delta", "5.delta", "6.delta", "7.delta")} <= found


def test_the_attempt_that_was_committed_counts(tmp_path: Path) -> None:
    """With format v2 two attempts may have written a version; of a batch before the commit of its batch says which."""
    query = FakeQuery(tmp_path, "v2")
    query.run(2)
    loser = tmp_path / "state/0/0/1_dead-beef.changelog"
    loser.write_text("of another attempt")
    assert "state/0/0/1_dead-beef.changelog" not in closures(tmp_path).of(Batch(1)).paths
    winner = next((tmp_path / "state/0/0").glob("1_*-abc.changelog"))
    winner.unlink()
    with pytest.raises(IncompleteBatchError, match=r"state/0/0/1 has no file"):
        closures(tmp_path).of(Batch(1))


def test_a_partition_that_is_missing_whole_is_missed(tmp_path: Path) -> None:
    query = FakeQuery(tmp_path, "hdfs")
    query.run(2)
    for path in (tmp_path / "state/0/1").rglob("*"):
        if path.is_file():
            path.unlink()
    with pytest.raises(IncompleteBatchError, match="state/0/1/2 has no file"):
        closures(tmp_path).of(Batch(1))


def test_progress_that_is_tracked_now_and_then_leaves_batches_out(tmp_path: Path) -> None:
    """As Spark's asynchronous tracking does, of queries without state. It starts from the last offsets that are there."""
    query = FakeQuery(tmp_path, "hdfs")
    query.run(8)
    found = without_state(closures(tmp_path))
    for t in (2, 3, 5):
        for path in (f"offsets/{t}", f"commits/{t}"):
            found.index.discard(path)
    assert "offsets/1" in found.of(Batch(4)).paths
    assert "offsets/4" in found.of(Batch(6)).paths
    assert "offsets/6" in found.of(Batch(7)).paths
    assert found.newest() == found.of(Batch(7))
    found.index.discard("commits/6")  # which retention removes before the offsets that batch 7 needs
    assert "offsets/6" in found.of(Batch(7)).paths
    found.index.add("commits/6", 3)
    found.index.discard("offsets/6")  # whose commit is there: it is lost, and was not left out
    with pytest.raises(IncompleteBatchError, match="offsets/6 is not there"):
        found.of(Batch(7))


def test_with_state_no_batch_is_left_out(tmp_path: Path) -> None:
    query = FakeQuery(tmp_path, "hdfs")
    query.run(6)
    found = closures(tmp_path)
    for path in ("offsets/4", "commits/4"):
        found.index.discard(path)
    with pytest.raises(IncompleteBatchError, match="offsets/4 is not there"):
        found.of(Batch(5))


def test_a_source_of_files_that_has_none_yet_has_none_of_those_that_come(tmp_path: Path) -> None:
    """A source that is none of files has no offsets of a log: what it wrote when it began stays."""
    query = FakeQuery(tmp_path, "hdfs")
    query.run(4)
    for n in range(3):
        (tmp_path / "sources/1").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"sources/1/{n}").write_text("v1\n")
        (tmp_path / "sources/2").mkdir(parents=True, exist_ok=True)
    (tmp_path / "sources/2/0").write_text("v1\n{}")
    for t, end in enumerate((None, None, 0, 2)):
        offsets = tmp_path / f"offsets/{t}"
        own = "-" if end is None else f'{{"logOffset":{end}}}'
        offsets.write_text(offsets.read_text().rstrip("\n") + f'\n{own}\n{{"topic":{{"0":{t}}}}}\n')
    found = closures(tmp_path)
    for t, wanted in enumerate(([], [], ["0"], ["0", "1", "2"])):
        paths = found.of(Batch(t)).paths
        assert sorted(path for path in paths if path.startswith("sources/1")) == [f"sources/1/{n}" for n in wanted]
        assert "sources/2/0" in paths


def test_schemas_that_an_operator_names_are_needed(tmp_path: Path) -> None:
    """Of the newest of its metadata alone, wherever the checkpoint was then."""
    query = FakeQuery(tmp_path, "hdfs")
    query.run(3)
    said = {
        "operatorInfo": {"operatorId": 0, "operatorName": "transformWithState"},
        "stateStoreInfo": [
            {
                "storeName": "default", "numColsPrefixKey": 0, "numPartitions": 2,
                "stateSchemaFilePaths": ["file:/elsewhere/state/0/_stateSchema/default/0_4e2c5dbf"],
            }
        ],
    }  # fmt: skip
    (tmp_path / "state/0/_metadata/metadata").unlink()
    (tmp_path / "state/0/_metadata/v2").mkdir()
    (tmp_path / "state/0/_metadata/v2/0").write_text("v2\n" + json.dumps(said))
    with pytest.raises(IncompleteBatchError, match="state/0/_stateSchema/default/0_4e2c5dbf is not there"):
        closures(tmp_path).of(Batch(2))
    schema = tmp_path / "state/0/_stateSchema/default/0_4e2c5dbf"
    schema.parent.mkdir(parents=True)
    schema.write_text("v3\n{}")
    assert "state/0/_stateSchema/default/0_4e2c5dbf" in closures(tmp_path).of(Batch(2)).paths


def test_offsets_of_a_continuous_query_say_nothing_of_the_query() -> None:
    assert read_offsets(b'v1\n\n{"0":17}', "offsets/1").log_ends == {}


def test_a_query_without_state_needs_its_logs(tmp_path: Path) -> None:
    query = FakeQuery(tmp_path, "hdfs")
    query.run(3)
    found = without_state(closures(tmp_path))
    assert set(found.of(Batch(1)).paths) == {
        "metadata", "commits/1", "offsets/1", "offsets/0", "sources/0/0", "sources/0/1",
    }  # fmt: skip


@pytest.mark.parametrize("damage", [b"", b"v1", b"no version", b"v1\n[1]", b'v1\n{"stateUniqueIds": 3}', b"\xff\xfe"])
def test_damaged_small_files_are_named(tmp_path: Path, damage: bytes) -> None:
    query = FakeQuery(tmp_path, "v2")
    query.run(1)
    (tmp_path / "commits/0").write_bytes(damage)
    if damage == b"v1":  # a commit of an early Spark says nothing else
        assert closures(tmp_path).of(Batch(0)).batch == 0
        return
    with pytest.raises(CorruptionError, match="commits/0"):
        closures(tmp_path).of(Batch(0))


def test_a_batch_that_goes_on_from_a_snapshot_needs_it(tmp_path: Path) -> None:
    """Spark does not go on from an older base, though all changelogs since are there: its error is "lineage is incomplete"."""
    query = FakeQuery(tmp_path, "v2")
    query.run(5)
    for path in (tmp_path / "state/0/0").glob("3_*.zip"):
        path.unlink()
    assert closures(tmp_path).of(Batch(1)).batch == 1
    with pytest.raises(IncompleteBatchError, match=r"state/0/0/3 has no snapshot"):
        closures(tmp_path).of(Batch(4))
