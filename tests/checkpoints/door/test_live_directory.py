"""The directory that a query goes on from, made out of what is kept where it is not there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from nosync.checkpoints.door.intake import Intake
from nosync.checkpoints.door.live_directory import prepare
from nosync.checkpoints.generations import keeps_of
from nosync.checkpoints.keep import Keep, open_generation
from nosync.checkpoints.names import Batch
from nosync.checkpoints.rewind import begin_generation
from nosync.lsm.errors import InvalidInputError, NotAvailableError
from nosync.lsm.platform.env import Env
from nosync.lsm.platform.layout import PLACE_FILE
from tests.checkpoints.fake_query import KINDS, FakeQuery
from tests.helpers.checkpoints import contents

ADDRESS = "webhdfs://127.0.0.1:7502/secret/q"


@pytest.fixture
def live(tmp_path: Path) -> Path:
    (tmp_path / "live").mkdir()
    return tmp_path / "live" / "q"


def take(directory: Path, data: Path) -> Keep:
    keep = Keep(data, "q", Env())
    Intake(directory, keep, 100, lambda: None).take_all()
    return keep


def opened(data: Path, live: Path) -> Keep:
    """Returns the keep, after the directory was made ready."""
    return prepare(open_generation(data, "q", Env()), live, ADDRESS)


def test_a_new_checkpoint_begins_empty(tmp_path: Path, live: Path) -> None:
    opened(tmp_path / "data", live)
    assert list(live.iterdir()) == []


@pytest.mark.parametrize("kind", KINDS)
def test_goes_on_after_the_safe_batch(tmp_path: Path, live: Path, kind: str) -> None:
    query = FakeQuery(live, kind)
    query.run(5)
    query.begin()
    keep = take(live, tmp_path / "data")
    there = contents(live)
    shutil.rmtree(live)
    opened(tmp_path / "data", live)
    found = contents(live)
    assert found.keys() >= keep.closures.of(Batch(4)).paths | {"offsets/5"}
    assert found == {path: there[path] for path in found}


def test_a_directory_that_is_there_stays(tmp_path: Path, live: Path) -> None:
    query = FakeQuery(live, "v2")
    query.run(3)
    take(live, tmp_path / "data")
    query.run()
    query.begin()
    query.states()
    there = contents(live)
    opened(tmp_path / "data", live)
    assert contents(live) == there


def test_a_directory_that_is_older_than_the_keep_is_put_aside(tmp_path: Path, live: Path) -> None:
    """The query ran on another host meanwhile."""
    query = FakeQuery(live, "changelog")
    query.run(3)
    shutil.copytree(live, tmp_path / "old")
    query.run(3)
    take(live, tmp_path / "data")
    shutil.rmtree(live)
    shutil.copytree(tmp_path / "old", live)
    opened(tmp_path / "data", live)
    assert (live / "commits" / "5").exists()
    aside = [path for path in live.parent.iterdir() if path.name.endswith(".old")]
    assert len(aside) == 1
    assert contents(aside[0]) == contents(tmp_path / "old")


def test_what_a_batch_left_that_was_not_committed_is_gone_from_the_keep(tmp_path: Path, live: Path) -> None:
    """Else the states that the batch writes when it runs again would not be taken: their names are there."""
    query = FakeQuery(live, "changelog")
    query.run(3)
    query.begin()
    query.states()
    keep = take(live, tmp_path / "data")
    keep.take(live, ["state/0/0/4.changelog"])  # who took it died before the commit came
    shutil.rmtree(live)
    keep = opened(tmp_path / "data", live)
    assert "state/0/0/4.changelog" not in keep.index
    assert not (keep.root / "state/0/0/4.changelog").exists()
    assert "offsets/3" in keep.index
    assert (live / "offsets" / "3").exists()
    assert keeps_of(tmp_path / "data", Env()) == ["q"]


def test_a_commit_that_cannot_be_gone_on_from_stays_behind(tmp_path: Path, live: Path) -> None:
    query = FakeQuery(live, "changelog")
    query.run(4)
    keep = take(live, tmp_path / "data")
    keep.remove(["state/0/0/4.changelog"])
    shutil.rmtree(live)
    keep = opened(tmp_path / "data", live)
    assert keep.committed() == keep.safe() == 2
    assert max(int(path.name) for path in (live / "commits").iterdir()) == 2
    assert "commits/3" in Keep(tmp_path / "data", "q", Env()).index, "in the generation before"
    assert open_generation(tmp_path / "data", "q", Env()).generation == keep.generation == 1


def test_nothing_of_what_is_kept_can_be_gone_on_from(tmp_path: Path, live: Path) -> None:
    query = FakeQuery(live, "changelog")
    query.run(2)
    keep = take(live, tmp_path / "data")
    keep.remove(["state/0/0/1.changelog"])
    shutil.rmtree(live)
    with pytest.raises(NotAvailableError, match="no batch can be gone on from"):
        opened(tmp_path / "data", live)
    assert not live.exists()


@pytest.mark.parametrize("has_log", [True, False])
def test_a_query_that_committed_nothing_begins_again_with_its_offsets(
    tmp_path: Path, live: Path, has_log: bool
) -> None:
    query = FakeQuery(live, "changelog")
    query.begin()
    query.states()
    keep = take(live, tmp_path / "data")
    if not has_log:
        keep.remove(["sources/0/0"])
    there = contents(live)
    shutil.rmtree(live)
    opened(tmp_path / "data", live)
    expected = ["metadata", "offsets/0", "sources/0/0"] if has_log else ["metadata"]
    assert contents(live) == {path: there[path] for path in expected}


@pytest.mark.parametrize("kind", KINDS)
def test_a_directory_that_lost_contents_with_the_power_is_not_gone_on_from(
    tmp_path: Path, live: Path, kind: str
) -> None:
    query = FakeQuery(live, kind)
    query.run(3)
    take(live, tmp_path / "data")
    query.run()
    torn = next(path for path in sorted(live.glob("state/0/0/*")) if path.name.startswith("4"))
    torn.write_bytes(b"")
    keep = opened(tmp_path / "data", live)
    assert keep.safe() == 2
    assert [path.name for path in (live / "commits").iterdir()] == ["2"]
    assert all(path.stat().st_size for path in live.rglob("*") if path.is_file())


@pytest.mark.parametrize("ran_meanwhile", [True, False])
def test_offsets_that_were_taken_back_while_the_door_was_closed(
    tmp_path: Path, live: Path, ran_meanwhile: bool
) -> None:
    query = FakeQuery(live, "changelog")
    query.run(2)
    query.begin()
    take(live, tmp_path / "data")
    query.remove("offsets/2")
    query.remove("sources/0/2")
    query.batch -= 1

    def run() -> None:
        query.begin('v1\n{"conf": {}}\n{"logOffset": 2, "more": 1}')
        query.states()
        query.commit()

    if ran_meanwhile:
        run()
    keep = opened(tmp_path / "data", live)
    assert keep.generation == 1
    if not ran_meanwhile:
        run()
    intake = Intake(live, keep, 100, lambda: None)
    intake.take_all()
    assert (intake.problem, keep.safe()) == (None, 2)
    assert keep.read("offsets/2") == (live / "offsets/2").read_bytes()
    assert opened(tmp_path / "data", live).generation == 1, "it is the same afterwards"


@pytest.mark.parametrize("lacking", ["metadata", "state"])
def test_what_came_in_part_is_not_taken_for_a_new_checkpoint(tmp_path: Path, live: Path, lacking: str) -> None:
    query = FakeQuery(tmp_path / "elsewhere", "changelog")
    query.run(4)
    data, keep = tmp_path / "data", take(query.root, tmp_path / "data")
    if lacking == "state":  # of the generation that counts; the one before is garbage
        begin_generation(keep, Batch(3))
        shutil.rmtree(keep.root)
        (data / PLACE_FILE).write_text("{}")
        for path in (data / "checkpoints" / "q.1").rglob("4.changelog"):
            path.unlink()
    else:
        (keep.root / "metadata").unlink()
    with pytest.raises(NotAvailableError, match="is kept, and metadata of the generation that counts is not"):
        opened(data, live)
    assert not live.exists()


def test_a_query_that_begins_again_is_not_taken_for_the_one_before(tmp_path: Path, live: Path) -> None:
    """What its first batch was to read is not all kept, so it decides anew."""
    FakeQuery(live, "changelog").begin('v1\n{"conf": {}}\n{"logOffset": 3}')
    take(live, tmp_path / "data")
    shutil.rmtree(live)
    keep = opened(tmp_path / "data", live)
    assert "offsets/0" not in keep.index
    FakeQuery(live, "changelog").run()
    Intake(live, keep, 100, lambda: None).take_all()
    assert keep.closures.why_not(Batch(0)) is None


def test_another_query_is_refused(tmp_path: Path, live: Path) -> None:
    FakeQuery(live, "changelog").run(2)
    take(live, tmp_path / "data")
    (live / "metadata").unlink()
    (live / "metadata").write_text(json.dumps({"id": "another"}))
    with pytest.raises(InvalidInputError, match="of query another"):
        opened(tmp_path / "data", live)
    (live / "metadata").write_text("no JSON")
    with pytest.raises(InvalidInputError, match="says no query"):
        opened(tmp_path / "data", live)


@pytest.mark.parametrize("is_lost", [True, False])
def test_schemas_are_those_of_the_address(tmp_path: Path, live: Path, is_lost: bool) -> None:
    query = FakeQuery(live, "changelog")
    query.run()
    before = "webhdfs://127.0.0.1:1/other/q"
    said = {
        "operatorInfo": {"operatorId": 0, "operatorName": "x"},
        "stateStoreInfo": [
            {
                "storeName": "default",
                "numPartitions": 2,
                "stateSchemaFilePaths": [f"{before}/state/0/_stateSchema/default/0_a"],
            }
        ],
    }
    query.write("state/0/_stateSchema/default/0_a", "v3\n{}")
    query.write("state/0/_metadata/v2/0", "v2\n" + json.dumps(said))
    query.write(
        "state/0/_metadata/v2/0.crc",
        json.dumps({"algorithm": "none", "value": 0, "mainFileSize": len("v2\n" + json.dumps(said))}),
    )
    keep = take(live, tmp_path / "data")
    if is_lost:
        shutil.rmtree(live)
    opened(tmp_path / "data", live)
    text = (live / "state/0/_metadata/v2/0").read_text()
    assert f'"{ADDRESS}/state/0/_stateSchema/default/0_a"' in text
    assert not (live / "state/0/_metadata/v2/0.crc").exists()
    assert before.encode() in keep.read("state/0/_metadata/v2/0")


@pytest.mark.parametrize("steps", range(12))
def test_killed_while_the_directory_is_made(
    tmp_path: Path, live: Path, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next start does it again, and the keep has lost nothing that is safe."""
    query = FakeQuery(live, "changelog", partitions=1)
    query.run(3)
    query.begin()
    query.states()
    take(live, tmp_path / "data").take(live, ["state/0/0/4.changelog", "state/1/0/left-keyToNumValues/4.changelog"])
    shutil.rmtree(live)
    left = steps

    def dying(method: Callable[..., None]) -> Callable[..., None]:
        def step(self: Env, *arguments: Path) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
            method(self, *arguments)

        return step

    with monkeypatch.context() as patched:
        for name in ("link", "unlink", "make_dirs"):
            patched.setattr(Env, name, dying(getattr(Env, name)))
        with pytest.raises(KeyboardInterrupt):
            opened(tmp_path / "data", live)
    keep = opened(tmp_path / "data", live)
    assert keep.safe() == 2
    assert (live / "offsets" / "3").exists()
    assert not [path for path in keep.index.paths() if "/4." in path]


def test_entries_of_logs_that_nobody_read_are_gone_from_the_keep(tmp_path: Path, live: Path) -> None:
    """The query that goes on may put other files into the entries of these numbers."""
    query = FakeQuery(live, "changelog")
    query.run(3)
    query.begin()
    for number in (4, 5):
        query.write(f"sources/0/{number}", "v1\nwhat was read by no batch")
    query.write("sources/1/0", "where another kind of source began")
    take(live, tmp_path / "data")
    shutil.rmtree(live)
    keep = opened(tmp_path / "data", live)
    assert {"sources/0/3.compact", "sources/1/0"} <= set(keep.index.paths())
    assert not {"sources/0/4", "sources/0/5"} & set(keep.index.paths())


def test_offsets_that_cannot_be_read_again_are_gone_from_the_keep(tmp_path: Path, live: Path) -> None:
    query = FakeQuery(live, "changelog")
    query.run(2)
    query.begin()
    take(live, tmp_path / "data").remove(["sources/0/2"])
    shutil.rmtree(live)
    keep = opened(tmp_path / "data", live)
    assert not (live / "offsets" / "2").exists()
    assert "offsets/2" not in keep.index


def test_a_directory_is_not_gone_on_from_after_the_query_went_on_elsewhere(tmp_path: Path, live: Path) -> None:
    """It has more batches than the keep, and others than the query had by then."""
    data = tmp_path / "data"
    query = FakeQuery(live, "hdfs")
    query.run(3)
    take(live, data)
    live.rename(tmp_path / "here")
    elsewhere = prepare(open_generation(data, "q", Env()), live, ADDRESS, is_shared=True)
    assert elsewhere.generation == 1, "nobody's files meet those of the host before"
    assert (live / ".door" / "generation").read_text() == "1"
    shutil.rmtree(live)
    (tmp_path / "here").rename(live)
    query.run(2)  # a driver that did not know
    keep = opened(data, live)
    assert keep.generation == 1
    assert sorted(path.name for path in (live / "commits").iterdir()) == ["2"]
    assert opened(data, live) is not None
    assert (live / "commits" / "2").exists(), "of this generation it stays"


def test_a_directory_of_which_a_part_is_lost_is_not_gone_on_from(tmp_path: Path, live: Path) -> None:
    data = tmp_path / "data"
    query = FakeQuery(live, "hdfs")
    query.run(3)
    take(live, data)
    query.run(1)
    kept = open_generation(data, "q", Env())
    assert prepare(kept, live, ADDRESS, is_shared=True, lacks=lambda: None) is kept
    assert (live / "commits" / "3").exists()
    prepare(kept, live, ADDRESS, is_shared=True, lacks=lambda: "state/0/0/4.delta")
    assert sorted(path.name for path in (live / "commits").iterdir()) == ["2"]
