"""The output of a file sink as of a batch: its log, its files, and what cannot be said any more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import nosync
from nosync.checkpoints.file_sink import output_at
from nosync.checkpoints.names import Batch
from nosync.lsm.errors import CorruptionError, InvalidInputError, NotAvailableError
from nosync.lsm.platform.env import Env
from tests.checkpoints.fake_query import FakeQuery


def write_output(root: Path, batches: int, compact_at: int | None = None, scheme: str = "file://") -> None:
    """Writes what a file sink writes: a file a batch, and an entry of the log."""
    log = root / "_spark_metadata"
    log.mkdir(parents=True)
    lines = []
    for t in range(batches):
        name = f"day={t % 2}/part-{t} of%20.parquet"
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(f"rows of {t}")
        path = str(root / name).replace("%", "%25").replace(" ", "%20")
        lines.append(json.dumps({"path": f"{scheme}{path}", "size": 9, "action": "add"}))
        if t == compact_at:
            (log / f"{t}.compact").write_text("\n".join(["v1", *lines]))
        else:
            (log / str(t)).write_text(f"v1\n{lines[-1]}")
    for t in range(compact_at or 0):
        (log / str(t)).unlink()


def read_output(root: Path) -> list[str]:
    """Returns the contents of the files that the log names."""
    found = []
    for entry in sorted((root / "_spark_metadata").iterdir()):
        version, *lines = entry.read_text().split("\n")
        assert version == "v1"
        for line in lines:
            path = json.loads(line)["path"].removeprefix("file:").replace("///", "/")
            found.append(Path(path.replace("%20", " ").replace("%25", "%")).read_text())
    return sorted(found)


def made(output: Path, target: Path, t: int) -> int:
    with output_at(output, target, Batch(t), Env()) as files:
        return files


@pytest.mark.parametrize("scheme", ["file://", "file:", ""])
def test_the_output_has_what_was_there_after_the_batch(tmp_path: Path, scheme: str) -> None:
    write_output(tmp_path / "out", 5, scheme=scheme)
    assert made(tmp_path / "out", tmp_path / "new", 2) == 3
    assert read_output(tmp_path / "new") == [f"rows of {t}" for t in range(3)]
    assert str(tmp_path / "out") not in (tmp_path / "new/_spark_metadata/1").read_text()
    assert read_output(tmp_path / "out") == [f"rows of {t}" for t in range(5)]


def test_the_output_is_the_one_that_spark_wrote_under_whatever_name(tmp_path: Path) -> None:
    write_output(tmp_path / "out", 3)
    (tmp_path / "link").symlink_to(tmp_path / "out")
    for n, output in enumerate((tmp_path / "x/../out", tmp_path / "link")):
        assert made(output, tmp_path / f"new{n}", 1) == 2
        assert read_output(tmp_path / f"new{n}") == ["rows of 0", "rows of 1"]


def test_a_path_may_have_colons(tmp_path: Path) -> None:
    output = tmp_path / "run:1" / "a b"
    write_output(output, 3)
    assert made(output, tmp_path / "file:new", 1) == 2
    assert read_output(tmp_path / "file:new") == ["rows of 0", "rows of 1"]
    entry = output / "_spark_metadata/1"
    entry.write_text("v1\n" + json.dumps({"path": str(output / "x")}))  # without a scheme, as older versions have it
    (output / "x").write_text("rows of 1")
    assert made(output, tmp_path / "plain", 1) == 2


def test_what_fails_leaves_no_output(tmp_path: Path) -> None:
    write_output(tmp_path / "out", 3)
    with pytest.raises(RuntimeError), output_at(tmp_path / "out", tmp_path / "new", Batch(1), Env()):
        raise RuntimeError
    (tmp_path / "out/_spark_metadata/1").write_text("v1\nno JSON")
    with pytest.raises(CorruptionError):
        made(tmp_path / "out", tmp_path / "new", 2)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_log_that_was_compacted(tmp_path: Path) -> None:
    write_output(tmp_path / "out", 14, compact_at=9)
    assert made(tmp_path / "out", tmp_path / "new", 11) == 12
    assert sorted(p.name for p in (tmp_path / "new/_spark_metadata").iterdir()) == ["10", "11", "9.compact"]
    assert made(tmp_path / "out", tmp_path / "nine", 9) == 10
    with pytest.raises(NotAvailableError, match="after batch 4: it was compacted up to batch 9. Go on from batch 9"):
        made(tmp_path / "out", tmp_path / "four", 4)
    with pytest.raises(NotAvailableError, match="batch 14 wrote nothing there"):
        made(tmp_path / "out", tmp_path / "late", 20)
    assert not (tmp_path / "four").exists()


def test_mistakes(tmp_path: Path) -> None:
    write_output(tmp_path / "out", 2)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/x").touch()
    with pytest.raises(InvalidInputError, match="is there, and not empty"):
        made(tmp_path / "out", tmp_path / "full", 1)
    with pytest.raises(InvalidInputError, match="not the output of a file sink"):
        made(tmp_path / "full", tmp_path / "new", 1)
    for path, error, text in (
        ("s3a://bucket/x", CorruptionError, "_spark_metadata/1: .*s3a://bucket/x is not on a file system of this host"),
        ("/elsewhere/x", InvalidInputError, "lists /elsewhere/x, which is not in it: give the path"),
        ("file:///etc/passwd", InvalidInputError, "lists /etc/passwd, which is not in it"),
        (f"{tmp_path}/out/../full/x", InvalidInputError, "which is not in it"),
    ):
        (tmp_path / "out/_spark_metadata/1").write_text("v1\n" + json.dumps({"path": path}))
        with pytest.raises(error, match=text):
            made(tmp_path / "out", tmp_path / f"new{len(path)}", 1)
    (tmp_path / "empty").mkdir()
    write_output(tmp_path / "other", 2)
    assert made(tmp_path / "other", tmp_path / "empty", 1) == 2, "an empty directory is as good as none"
    with pytest.raises(InvalidInputError, match="/proc is"):
        made(tmp_path / "other", Path("/proc"), 1)


def test_a_rewind_and_a_fork_make_it(tmp_path: Path) -> None:
    query = FakeQuery(tmp_path / "words", "hdfs")
    query.run(5)
    with nosync.checkpoints.watch(query.root, tmp_path / "data"):
        pass
    write_output(tmp_path / "out", 5)
    words = nosync.checkpoint("words", tmp_path / "data")
    words.fork(tmp_path / "f", 3, name="w2", output=tmp_path / "out", new_output=tmp_path / "forked")
    assert read_output(tmp_path / "forked") == [f"rows of {t}" for t in range(4)]
    both = {"output": tmp_path / "out", "new_output": tmp_path / "again"}
    with pytest.raises(InvalidInputError, match="is there, and not empty"):
        words.fork(tmp_path / "f", 3, name="w3", **both)
    with pytest.raises(InvalidInputError, match="not a valid name"):
        words.fork(tmp_path / "f3", 3, name="W 3", **both)
    for taken in ("w2", "Bad Name", ""):
        with pytest.raises(InvalidInputError):
            words.rewind(2, tmp_path / "r", keep_as=taken, **both)
    assert not any((tmp_path / name).exists() for name in ("again", "f3", "r"))
    with pytest.raises(InvalidInputError, match="say both output= and new_output="):
        words.fork(tmp_path / "f2", 3, new_output=tmp_path / "x")
    words.rewind(2, tmp_path / "r", output=tmp_path / "out", new_output=tmp_path / "rewound")
    assert read_output(tmp_path / "rewound") == [f"rows of {t}" for t in range(3)]
    assert words.status().committed == 2
