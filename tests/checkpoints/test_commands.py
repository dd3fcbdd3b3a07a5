"""Commands and Python names for kept checkpoints, as people use them."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import nosync
from nosync.checkpoints.rewind import SinkRemembersError
from nosync.cli import main
from tests.checkpoints.fake_query import FakeQuery
from tests.helpers.checkpoints import contents


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    try:
        main([str(a) for a in arguments])
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.fixture
def kept(tmp_path: Path) -> FakeQuery:
    query = FakeQuery(tmp_path / "words", "changelog")
    query.run(5)
    query.begin()
    with nosync.checkpoints.watch(query.root, tmp_path / "data"):
        pass
    return query


def test_from_watching_to_going_on(kept: FakeQuery, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data"
    code, out, _ = run(capsys, "checkpoint", "watch", kept.root, "--once", "--store", data)
    assert code == 0
    assert "words: committed 4, safe 4" in out
    code, out, _ = run(capsys, "checkpoint", "list", "--store", data)
    assert code == 0
    assert out.splitlines()[1].split()[:3] == ["words", "4", "4"]
    code, out, _ = run(capsys, "checkpoint", "status", "words", "--store", data, "--json")
    said = json.loads(out)
    assert (said["safe"], said["committed"]) == (4, 4)
    assert [b["batch"] for b in said["batches"]] == [0, 1, 2, 3, 4]
    assert all(b["why_not"] is None and b["files"] > 10 for b in said["batches"])
    code, out, _ = run(capsys, "checkpoint", "restore", "words", tmp_path / "again", "--store", data)
    assert code == 0
    assert "goes on after batch 4" in out
    assert "batch 5 reads what it read before" in " ".join(out.split())
    code, out, _ = run(
        capsys, "checkpoint", "fork", "words", "what-if", tmp_path / "f", "--at", 2, "--store", data, "--json"
    )
    assert json.loads(out)["batch"] == 2
    assert nosync.checkpoint("what-if", data).status().safe == 2
    assert nosync.checkpoint("what-if", data).query() != nosync.checkpoint("words", data).query()


def test_pins_on_the_command_line(kept: FakeQuery, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data"
    assert "no pins" in run(capsys, "checkpoint", "pin", "words", "--store", data)[1]
    assert "good keeps batch 3" in run(capsys, "checkpoint", "pin", "words", "good", "--at", 3, "--store", data)[1]
    assert "good: batch 3" in run(capsys, "checkpoint", "pin", "words", "--store", data)[1]
    found = json.loads(run(capsys, "checkpoint", "pin", "words", "--json", "--store", data)[1])
    assert found == [{"name": "good", "batch": 3}]
    made = json.loads(run(capsys, "checkpoint", "pin", "words", "p", "--at", 2, "--json", "--store", data)[1])
    assert made == {"name": "p", "batch": 2}
    removed = run(capsys, "checkpoint", "pin", "words", "p", "--remove", "--json", "--store", data)[1]
    assert json.loads(removed) == {"removed": "p"}
    assert "taken back" in run(capsys, "checkpoint", "pin", "words", "good", "--remove", "--store", data)[1]
    code, _, err = run(capsys, "checkpoint", "pin", "words", "good", "--remove", "--store", data)
    assert code == 1
    assert "has no pin 'good'" in err


def test_a_damaged_checkpoint_hides_no_other(
    kept: FakeQuery, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    with nosync.checkpoints.watch(kept.root, data, name="another"):
        pass
    nosync.checkpoint("another", data).pin("p")
    (pin,) = (data / "checkpoints" / "another" / "pins").iterdir()
    pin.write_text("torn")
    code, out, err = run(capsys, "checkpoint", "list", "--store", data)
    assert code == 0
    assert "words" in out
    assert "another" in out
    assert "problem: another:" in " ".join(err.split())
    found = json.loads(run(capsys, "checkpoint", "list", "--json", "--store", data)[1])
    assert {one["name"]: bool(one["problem"]) for one in found} == {"words": False, "another": True}


@pytest.mark.parametrize("option", [["--remove"], ["--at", "1"]])
def test_what_is_of_a_pin_needs_its_name(
    kept: FakeQuery, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: list[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", "pin", "words", *option, "--store", str(tmp_path / "data")])
    assert ended.value.code == 2
    assert f"{option[0]} is of a PIN: say its name as well" in " ".join(capsys.readouterr().err.split())


def test_a_store_and_kept_checkpoints_share_a_directory(kept: FakeQuery, tmp_path: Path) -> None:
    both = tmp_path / "both"
    with nosync.open(both) as store:
        store.append("s", t=0, rows=pa.table({"k": [1]}), key=["k"])
        store.seal(0)
        with nosync.checkpoints.watch(kept.root, both):
            pass
        assert store.verify().ok
    with nosync.open(both) as store:
        assert store.read("s").num_rows == 1
        assert store.status().problems == {}
    assert nosync.checkpoint("words", both).status().safe == 4


def test_mistakes_are_one_line(kept: FakeQuery, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data"
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    for arguments, text in (
        (("status", "word", "--store", data), "did you mean 'words'"),
        (
            ("restore", "words", tmp_path / "r", "--at", 77, "--store", data),
            "The nearest that can be gone on from is 4",
        ),
        (("restore", "words", kept.root, "--store", data), "is there, and not empty"),
        (("status", "words"), "Missing option '--store'"),
        (("rewind", "words", tmp_path / "r", "--at", 1, "--store", data), "--sink-rewound"),
        (
            ("watch", tmp_path / "data", "--once", "--store", data),
            "is not the checkpoint of a Structured Streaming query",
        ),
        (
            ("watch", tmp_path / "nowhere", "--once", "--store", data),
            "is no directory: say the query's checkpointLocation",
        ),
        (("fork", "words", "words", tmp_path / "r", "--store", data), "is kept already"),
        (("fork", "words", "W 3", tmp_path / "r", "--store", data), "checkpoint name 'W 3' is not a valid name"),
        (("list", "--store", tmp_path / "nowhere"), "nowhere is not there"),
        (("list", "--store", ""), "it is empty"),
        (("list", "--store", kept.root / "metadata"), "is a file"),
        (("restore", "words", kept.root / "metadata", "--store", data), "is a file: say a new directory"),
        (("restore", "words", tmp_path / "link", "--store", data), "is a link: say a new directory"),
        (("restore", "words", data / "checkpoints" / "again", "--store", data), "is among the kept checkpoints of"),
        (("restore", "words", data / "again", "--store", data), "is in the store"),
        (("fork", "words", "two", data / "checkpoints" / "two", "--store", data), "is among the kept checkpoints of"),
        (("restore", "words", "", "--store", data), "it is empty"),
        (("watch", "", "--once", "--store", data), "it is empty"),
    ):
        code, out, err = run(capsys, "checkpoint", *arguments)
        assert code in (1, 2), arguments
        assert text in " ".join(err.split()), err
        assert "Traceback" not in out + err
        assert not (tmp_path / "r").exists()
    other = FakeQuery(tmp_path / "other" / "words", "hdfs")
    other.write("metadata", json.dumps({"id": "another"}))
    other.begin()
    with pytest.raises(
        nosync.InvalidInputError, match="is kept of query 4c0c1a0e.*is of query another: say another name"
    ):
        nosync.checkpoints.watch(other.root, data)


def test_rewinding_keeps_what_came_after(kept: FakeQuery, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data"
    before = contents(data / "checkpoints" / "words")
    code, out, _ = run(
        capsys, "checkpoint", "rewind", "words", tmp_path / "r", "--at", 2, "--sink-rewound", "--store", data
    )
    assert code == 0
    assert "what came after is kept as checkpoint words-before-rewind-1" in out
    assert contents(data / "checkpoints" / "words-before-rewind-1") == before
    words = nosync.checkpoint("words", data)
    assert words.status().committed == 2
    assert sorted(p.name for p in (tmp_path / "r" / "offsets").iterdir()) == ["1", "2"]
    # The query goes on with other rows under the same numbers, and is followed under the same name.
    again = FakeQuery(tmp_path / "words2", "changelog")
    for path, data_ in contents(tmp_path / "r").items():
        again.write(path, data_)
    again.batch = 2
    again.begin()
    again.write("offsets/3", 'v1\n{}\n{"logOffset": 3}')
    again.states()
    again.write("state/0/0/4.changelog", "other rows")
    again.commit()
    with nosync.checkpoints.watch(again.root, data, name="words"):
        pass
    assert nosync.checkpoint("words", data).status().safe == 3
    view = nosync.checkpoint("words", data).at(3).path
    assert (view / "state/0/0/4.changelog").read_text() == "other rows"
    assert contents(data / "checkpoints" / "words") == before, "a rewind changes nothing that is there"
    assert nosync.checkpoint("words-before-rewind-1", data).status().safe == 4


def test_a_sink_that_remembers_batches_is_found_out(kept: FakeQuery, tmp_path: Path) -> None:
    words = nosync.checkpoint("words", tmp_path / "data")
    parquet = tmp_path / "out"
    (parquet / "_spark_metadata").mkdir(parents=True)
    (parquet / "_spark_metadata" / "4").touch()
    with pytest.raises(SinkRemembersError, match="has batches up to 4 .* Those after 2 would run again"):
        words.rewind(2, tmp_path / "r", output=parquet)
    delta = tmp_path / "delta"
    (delta / "_delta_log").mkdir(parents=True)
    txn = {"txn": {"appId": words.query(), "version": 4, "lastUpdated": 0}}
    (delta / "_delta_log" / "00000000000000000004.json").write_text('{"commitInfo":{}}\n' + json.dumps(txn))
    with pytest.raises(SinkRemembersError, match="_delta_log has batches up to 4"):
        words.rewind(2, tmp_path / "r", output=delta)
    entry = delta / "_delta_log" / "00000000000000000004.json"
    txn["txn"]["appId"] = "orders-to-delta"  # as the user's own txnAppId
    entry.write_text(json.dumps(txn))
    with pytest.raises(SinkRemembersError, match="of an application with a name of its own"):
        words.rewind(2, tmp_path / "r", output=delta)
    entry.unlink()
    rows = [{"txn": {"appId": words.query(), "version": 4}}, {"txn": None}]
    saved = delta / "_delta_log" / "00000000000000000004.checkpoint.parquet"
    pq.write_table(pa.Table.from_pylist(rows), saved)
    with pytest.raises(SinkRemembersError, match="_delta_log has batches up to 4"):
        words.rewind(2, tmp_path / "r", output=delta)
    saved.write_bytes(b"PAR1")
    with pytest.raises(SinkRemembersError, match="cannot be read"):
        words.rewind(2, tmp_path / "r", output=delta)
    pq.write_table(pa.table({"add": ["a"]}), saved)
    txn["txn"]["appId"] = "6e2e3c2a-0000-4000-8000-000000000000"  # of another query
    entry.write_text(json.dumps(txn))
    assert words.status().committed == 4, "nothing was changed"
    assert words.rewind(2, tmp_path / "r", output=delta)[0].batch == 2
    with pytest.raises(nosync.InvalidInputError, match="say where the query writes to"):
        nosync.checkpoint("words", tmp_path / "data").rewind(1, tmp_path / "r2")


def test_a_restore_looks_for_batches_that_a_sink_would_skip(
    kept: FakeQuery, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Five batches are kept, and what the sixth reads."""
    log, data = tmp_path / "out" / "_spark_metadata", tmp_path / "data"
    log.mkdir(parents=True)
    (log / "5").touch()
    arguments = ["checkpoint", "restore", "words", tmp_path / "r", "--output", tmp_path / "out", "--store", data]
    (log / "6").touch()
    code, _, err = run(capsys, *arguments)
    assert code == 1
    assert "has batches up to 6" in " ".join(err.split())
    assert "Those after 5 would run again" in " ".join(err.split())
    assert not (tmp_path / "r").exists()
    (log / "6").unlink()
    assert run(capsys, *arguments)[0] == 0, "the batch after the last reads the same rows"
    with pytest.raises(SinkRemembersError, match="Those after 4 would run again"):
        nosync.checkpoint("words", data).restore(tmp_path / "r2", 3, output=tmp_path / "out")


def test_the_state_at_a_batch_has_a_directory(kept: FakeQuery, tmp_path: Path) -> None:
    words = nosync.checkpoint("words", tmp_path / "data")
    made = words.at(3)
    assert sorted(p.name for p in (made.path / "commits").iterdir()) == ["3"]
    assert words.at(3).path == made.path


def test_so_many_batches_are_shown(kept: FakeQuery, tmp_path: Path) -> None:
    words = nosync.checkpoint("words", tmp_path / "data")
    shown = {last: [b.batch for b in words.status(last).batches] for last in (None, 0, 2, 5, 6, 100)}
    every = [0, 1, 2, 3, 4]
    assert shown == {None: every, 0: [], 2: [3, 4], 5: every, 6: every, 100: every}


def test_mistakes_of_a_diff_are_told_before_spark_starts(
    kept: FakeQuery, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, text in (
        (("1", "99"), "cannot go on from batch 99"),
        (("1", "2", "--option", "operatorId"), "--option 'operatorId' is not KEY=VALUE"),
        (("1", "x"), "'x' is not a valid integer"),
    ):
        code, _, err = run(capsys, "checkpoint", "diff", "words", *arguments, "--store", tmp_path / "data")
        assert code in (1, 2)
        assert text in " ".join(err.split())


def test_objects_say_what_they_are(kept: FakeQuery, tmp_path: Path) -> None:
    words = nosync.checkpoint("words", tmp_path / "data")
    assert repr(words) == "Checkpoint('words', committed=4, newest=4)"
    assert "batch 4: can be gone on from" in repr(words.status())
    assert words.pin("before-upgrade").batch == 4
    assert words.status().batches[-1].pins == ("before-upgrade",)


def test_directories_are_said_as_urls_or_refused(
    kept: FakeQuery, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "data"
    assert run(capsys, "checkpoint", "restore", "words", f"file://{tmp_path}/made", "--store", data)[0] == 0
    assert (tmp_path / "made" / "offsets").is_dir()
    assert run(capsys, "checkpoint", "watch", f"file://{kept.root}", "--once", "--store", data)[0] == 0
    for arguments in (["restore", "words", "s3a://b/x"], ["watch", "s3a://b/x"], ["watch", "hdfs://n/x", "--once"]):
        code, _, err = run(capsys, "checkpoint", *arguments, "--store", data)
        assert code != 0
        assert "is not on this host" in " ".join(err.split())
    assert not [p for p in tmp_path.iterdir() if ":" in p.name]
    (tmp_path / "file").touch()
    code, _, err = run(
        capsys, "checkpoint", "rewind", "words", tmp_path / "file", "--at", 2, "--sink-rewound", "--store", data
    )
    assert (code, "is a file" in " ".join(err.split())) == (1, True)
    assert nosync.checkpoint("words", data).status().committed == 4
