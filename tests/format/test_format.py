"""The layer file: round trips, every flipped bit, every truncation, golden files."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from nosync.lsm.errors import CorruptionError, DeterminismError, FormatVersionError, NosyncError
from nosync.lsm.layers.format import MAGIC, TRAILER_BYTES
from nosync.lsm.layers.reader import LayerReader
from nosync.lsm.layers.writer import arrange, publish_rows
from nosync.lsm.manifests.archive import Archive, Details, publish_archive
from nosync.lsm.manifests.manifest import Entry, Manifest
from nosync.lsm.model.layer import Description, Digest, LayerId, Shard, TraceId
from nosync.lsm.model.timestamp import Epoch, pack
from nosync.lsm.platform.env import Env

ENV = Env()
ID = LayerId(TraceId("counts", "raw", Shard(0)), Description.of_epoch(7))
GOLDEN = Path(__file__).parent / "golden"


def _publish(root: Path, rows: pa.Table, deletes: pa.Table | None = None, id: LayerId = ID) -> Path:
    (root / "tmp").mkdir(exist_ok=True)
    publish_rows(root, id, arrange(rows, ["word"], whose="test", deletes=deletes), 16, ENV)
    return root / "layers" / id.path


def _small(root: Path) -> Path:
    return _publish(root, pa.table({"word": ["a", "b"], "n": [1, 2]}), pa.table({"word": ["c"]}))


def _read_everything(path: Path) -> list[dict[str, object]]:
    reader = LayerReader.open(path, ENV, ID)
    reader.verify()
    return [row for block in reader.blocks() for row in block.batch.to_pylist()]


def test_round_trip_with_nested_values(tmp_path: Path) -> None:
    rows = pa.table(
        {
            "word": ["x", None, "y"],
            "tags": pa.array([["a", None], None, []], pa.list_(pa.string())),
            "where": pa.array([{"lat": 1.5}, None, {"lat": None}], pa.struct([("lat", pa.float64())])),
            "coded": pa.array(["p", "q", "p"]).dictionary_encode(),
        }
    )
    reader = LayerReader.open(_publish(tmp_path, rows), ENV, ID)
    (block,) = reader.blocks()
    key = lambda row: str(row["word"])  # noqa: E731
    assert sorted(block.data.to_pylist(), key=key) == sorted(rows.to_pylist(), key=key)
    assert reader.info.rows == 3
    assert reader.group_offsets[-1] == 3
    assert reader.schema.field("coded").type == pa.string()


def test_the_body_is_mapped_not_copied(tmp_path: Path) -> None:
    path = _publish(tmp_path, pa.table({"word": [str(i) for i in range(50_000)], "n": range(50_000)}))
    before = pa.total_allocated_bytes()
    reader = LayerReader.open(path, ENV, ID)
    (block,) = reader.blocks()
    assert block.rows == 50_000
    assert pa.total_allocated_bytes() - before < 10_000


def test_an_empty_layer_is_a_layer(tmp_path: Path) -> None:
    reader = LayerReader.open(_publish(tmp_path, pa.table({"word": pa.array([], pa.string())})), ENV, ID)
    reader.verify()
    assert (reader.info.rows, reader.block_count, list(reader.group_offsets)) == (0, 0, [0] * 17)


def test_equal_rows_in_any_order_give_equal_bytes(tmp_path: Path) -> None:
    words = [f"w{i}" for i in range(100)]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one = _publish(tmp_path / "a", pa.table({"word": words, "n": range(100)}))
    other = _publish(tmp_path / "b", pa.table({"n": list(range(100))[::-1], "word": words[::-1]}))
    assert one.read_bytes() == other.read_bytes()


def test_every_flipped_bit_raises(tmp_path: Path) -> None:
    path = _small(tmp_path)
    good = path.read_bytes()
    expected = _read_everything(path)
    for at in range(len(good)):
        for bit in (0, 7):
            bad = bytearray(good)
            bad[at] ^= 1 << bit
            path.write_bytes(bad)
            with pytest.raises((CorruptionError, FormatVersionError)) as caught:
                _read_everything(path)
            assert str(path) in str(caught.value), f"byte {at}"
    path.write_bytes(good)
    assert _read_everything(path) == expected


def test_every_truncation_and_every_extension_raises(tmp_path: Path) -> None:
    path = _small(tmp_path)
    good = path.read_bytes()
    for size in range(len(good)):
        path.write_bytes(good[:size])
        with pytest.raises(CorruptionError):
            _read_everything(path)
    path.write_bytes(good + b"\0")
    with pytest.raises(CorruptionError):
        _read_everything(path)


def test_a_newer_format_says_to_upgrade(tmp_path: Path) -> None:
    path = _small(tmp_path)
    data = bytearray(path.read_bytes())
    data[8] = 99
    at = len(data) - TRAILER_BYTES + 16
    data[at] = 99
    path.write_bytes(data)
    with pytest.raises(FormatVersionError, match="upgrade nosync"):
        LayerReader.open(path, ENV, ID)


def test_a_file_under_another_layers_name_is_refused(tmp_path: Path) -> None:
    path = _small(tmp_path)
    other = LayerId(ID.trace, Description.of_epoch(8))
    shutil.copy(path, path.with_name(other.file_name))
    with pytest.raises(CorruptionError, match="expected stage counts shard 0 timestamp 8"):
        LayerReader.open(path.with_name(other.file_name), ENV, other)


def test_publishing_twice(tmp_path: Path) -> None:
    path = _small(tmp_path)
    before = path.read_bytes()
    _small(tmp_path)  # the same: fine
    with pytest.raises(DeterminismError, match="stage counts shard 0 timestamp 7") as caught:
        _publish(tmp_path, pa.table({"word": ["a"], "n": [9]}))
    assert path.read_bytes() == before
    assert caught.value.recorded_digest != caught.value.rejected_digest
    assert {caught.value.stage, caught.value.shard, caught.value.t} == {"counts", "0", "7"}
    assert not list((tmp_path / "tmp").iterdir())


def test_the_same_rows_laid_out_otherwise_are_the_same_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version of Arrow may write other bytes for equal rows; that is no conflict."""
    path = _small(tmp_path)
    before = path.read_bytes()
    options = pa.ipc.IpcWriteOptions(metadata_version=pa.ipc.MetadataVersion.V4)
    original = pa.ipc.new_file
    monkeypatch.setattr(pa.ipc, "new_file", lambda sink, schema: original(sink, schema, options=options))
    _small(tmp_path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("golden", sorted(GOLDEN.glob("*.layer")), ids=lambda path: path.name)
def test_golden_files_of_every_version_stay_readable(golden: Path) -> None:
    expected = json.loads(golden.with_suffix(".json").read_text())
    reader = LayerReader.open(golden, ENV)
    reader.verify()
    rows = [row for block in reader.blocks() for row in block.batch.to_pylist()]
    assert json.loads(json.dumps(rows, default=str)) == expected["rows"]
    assert json.loads(reader.info.to_json()) == expected["description"]
    assert reader.digest == expected["digest"]


def test_version_1_is_still_written_byte_for_byte(tmp_path: Path) -> None:
    """If this fails, the format changed: give it a new version, keep reading the old one, add golden files."""
    assert len(list(GOLDEN.glob("*.layer"))) >= 2
    written = _small(tmp_path)
    assert written.read_bytes() == (GOLDEN / "v1-fresh.layer").read_bytes()


def archive_of_two_codes(root: Path) -> Archive:
    """Of four epochs, in which a stage's code changes, and an input begins to be released."""
    manifests = []
    for t in range(4, 8):
        counts = LayerId(TraceId("counts", "c0de1" if t < 6 else "c0de2", Shard(1, 4)), Description.of_epoch(t))
        words = LayerId(TraceId("words", "5ead", Shard(0, 4)), Description.of_epoch(t))
        entries = (
            Entry(counts, Digest(f"{t:064x}"), t, pack(4 if t < 6 else 6), 1),
            Entry(words, Digest(f"{t + 100:064x}"), 0, pack(0), 0),
        )
        meta = {"offsets": {"words": 10 * t}, "at_safe_point": {} if t < 5 else {"words": "drop"}}
        manifests.append(Manifest("main", Epoch(t), entries, meta))
    (root / "tmp").mkdir(exist_ok=True)
    archive = publish_archive(root, manifests, ENV)
    assert archive is not None
    assert [Details(archive, root, ENV).manifest(t) for t in archive.epochs] == manifests
    return archive


def test_archives_are_still_written_byte_for_byte_and_read(tmp_path: Path) -> None:
    archive = archive_of_two_codes(tmp_path)
    golden = GOLDEN / "v1-archive-4-7.json"
    assert (tmp_path / archive.path).read_bytes() == golden.read_bytes()
    assert [(run.first, run.last, dict(run.policies)) for run in archive.runs] == [
        (4, 4, {}), (5, 5, {"words": "drop"}), (6, 7, {"words": "drop"}),
    ]  # fmt: skip
    assert Archive.read(tmp_path, "main", "4-7.json", ENV).runs == archive.runs


def test_no_error_of_a_dependency_escapes(tmp_path: Path) -> None:
    path = tmp_path / "x.layer"
    for junk in (b"", b"x", MAGIC, MAGIC * 40, bytes(200), b"\xff" * 5_000):
        path.write_bytes(junk)
        with pytest.raises(NosyncError):
            LayerReader.open(path, ENV)
