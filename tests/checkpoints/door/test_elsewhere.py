"""Files that are on the host where they were written: they have their names here, and come when they are needed."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
from blake3 import blake3

from nosync.checkpoints.door.elsewhere import Reference, SpreadFiles, Target
from nosync.checkpoints.door.intake import Intake
from nosync.checkpoints.door.other_doors import SpooledElsewhere
from nosync.checkpoints.door.remote_errors import RemoteError
from nosync.checkpoints.door.spool import KEPT_S, Spool
from nosync.checkpoints.keep import Keep
from nosync.lsm.errors import CorruptionError, ReplicationError
from nosync.lsm.platform.env import Env


class Host:
    """Another host: contents by token. `is_away`: nobody gets them."""

    def __init__(self) -> None:
        self.has: dict[str, bytes] = {}
        self.released: list[str] = []
        self.is_away = False

    def write(self, data: bytes) -> Reference:
        token = f"t{len(self.has)}"
        self.has[token] = data
        return Reference("n2", token, len(data), blake3(data).hexdigest())

    def fetch(self, reference: Reference, target: Target, patience_s: float) -> None:
        if self.is_away:
            raise ReplicationError("n2 is away")
        target.write(self.has[reference.token])

    def release(self, reference: Reference) -> None:
        self.released.append(reference.token)


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def published() -> list[str]:
    return []


@pytest.fixture
def files(tmp_path: Path, host: Host, published: list[str]) -> SpreadFiles:
    (tmp_path / "live").mkdir()
    (tmp_path / "writing").mkdir()
    return SpreadFiles(tmp_path / "live", tmp_path / "writing", Env(), published.append, host)


def names(files: SpreadFiles, path: str = "state") -> list[str]:
    return [found["pathSuffix"] for found in files.list(path)]


def read(files: SpreadFiles, path: str) -> bytes:
    fd, size_bytes = files.open(path)
    with open(fd, "rb") as file:
        return file.read(size_bytes)


def write(files: SpreadFiles, path: str, data: bytes, *, may_overwrite: bool = True) -> None:
    with files.create(path, may_overwrite=may_overwrite) as file:
        file.write(data)


def test_a_file_elsewhere_has_its_name_and_size_here(files: SpreadFiles, host: Host, published: list[str]) -> None:
    files.refer("state/.a.tmp", host.write(b"there"), may_overwrite=False)
    write(files, "state/b", b"here")
    assert names(files) == [".a.tmp", "b"]
    files.rename("state/.a.tmp", "state/a", may_overwrite=False)
    assert names(files) == ["a", "b"]
    assert (files.status("state/a")["length"], files.status("state/a")["type"]) == (5, "FILE")
    assert [found["length"] for found in files.list("state/a")] == [5]
    assert [found["pathSuffix"] for found in files.list("")] == ["state"], "what the door has to know is not seen"
    assert published == ["state/.a.tmp", "state/b", "state/a"]
    files.bring("state/a")
    files.bring("state/b")  # it is here
    assert read(files, "state/a") == b"there"
    assert (names(files), list(files.all_elsewhere())) == (["a", "b"], [])
    files.release_all()
    assert host.released == ["t0"]


def test_the_last_one_that_is_written_counts(files: SpreadFiles, host: Host) -> None:
    first, second = host.write(b"first"), host.write(b"second")
    files.refer("state/a", first, may_overwrite=True)
    files.refer("state/a", second, may_overwrite=True)
    assert files.status("state/a")["length"] == 6
    write(files, "state/a", b"here")
    files.bring("state/a")
    assert read(files, "state/a") == b"here"
    files.refer("state/a", host.write(b"there again"), may_overwrite=True)
    assert files.status("state/a")["length"] == 11
    write(files, "state/.x.tmp", b"renamed")
    files.rename("state/.x.tmp", "state/a", may_overwrite=True)
    files.bring("state/a")
    assert read(files, "state/a") == b"renamed"
    files.refer("state/c", host.write(b"c"), may_overwrite=True)
    files.rename("state/c", "state/a", may_overwrite=True)
    files.bring("state/a")
    assert read(files, "state/a") == b"c"
    files.release_all()
    assert sorted(host.released) == ["t0", "t1", "t2", "t3"]


def test_without_leave_no_name_is_taken_twice(files: SpreadFiles, host: Host) -> None:
    files.refer("state/a", host.write(b"first"), may_overwrite=False)
    write(files, "state/b", b"here")
    for path in ("state/a", "state/b"):
        with pytest.raises(RemoteError, match="is there already"):
            files.refer(path, host.write(b"second"), may_overwrite=False)
        with pytest.raises(RemoteError, match="is there already"):
            write(files, path, b"second", may_overwrite=False)
    with pytest.raises(RemoteError, match="is there already"):
        files.rename("state/b", "state/a", may_overwrite=False)
    with pytest.raises(RemoteError, match="is there already"):
        files.rename("state/a", "state/b", may_overwrite=False)
    with pytest.raises(RemoteError, match="no such file"):
        files.rename("state/nothing", "state/a", may_overwrite=True)
    assert files.status("state/a")["length"] == 5, "what had the name has it still"
    with pytest.raises(RemoteError, match="no directory"):
        files.refer("state/b/c", host.write(b""), may_overwrite=True)


def test_what_is_deleted_is_not_needed_elsewhere(files: SpreadFiles, host: Host) -> None:
    files.refer("state/0/a", host.write(b"a"), may_overwrite=True)
    files.refer("state/1/b", host.write(b"b"), may_overwrite=True)
    assert files.delete("state/0/a", is_recursive=False)
    assert not files.delete("state/0/a", is_recursive=False)
    assert files.delete("state", is_recursive=True)
    assert list(files.all_elsewhere()) == []
    files.release_all()
    assert sorted(host.released) == ["t0", "t1"]


def test_a_directory_of_files_elsewhere_is_not_empty(files: SpreadFiles, host: Host) -> None:
    files.refer("state/0/a", host.write(b"a"), may_overwrite=True)
    with pytest.raises(RemoteError, match="not empty"):
        files.delete("state/0", is_recursive=False)
    assert names(files, "state/0") == ["a"]
    files.delete("state/0/a", is_recursive=False)
    assert files.delete("state/0", is_recursive=False)


def test_a_host_that_was_away_is_told_later(files: SpreadFiles, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()

    def away(reference: Reference) -> None:
        asked.append(reference.token)
        raise ReplicationError("n2 is away")

    for name in ("a", "b", "c"):
        files.refer(f"state/{name}", host.write(b"x"), may_overwrite=True)
        files.bring(f"state/{name}")
    with monkeypatch.context() as patched:
        patched.setattr(host, "release", away)
        files.release_all()
    assert asked == ["t0"], "it is not asked again and again while it is away"
    files.release_all()
    files.release_all()
    assert sorted(host.released) == ["t0", "t1", "t2"]


@pytest.mark.parametrize("left", [b"", b'{"node": "n'])
def test_what_a_power_cut_left_of_a_name_goes_unless_a_batch_needs_it(
    files: SpreadFiles, host: Host, tmp_path: Path, left: bytes
) -> None:
    for path in ("state/0/0/1.delta", "state/0/0/2.delta", "state/0/0/3.delta"):
        files.refer(path, host.write(b"x"), may_overwrite=True)
    write(files, "commits/0", b"v1\n{}")
    for version in (1, 2):
        (tmp_path / "live" / ".door" / "elsewhere" / "state/0/0" / f"{version}.delta").write_bytes(left)
    with pytest.raises(CorruptionError):
        names(files, "state/0/0")
    files.drop_torn()
    assert sorted(files.all_elsewhere()) == ["state/0/0/1.delta", "state/0/0/3.delta"]
    with pytest.raises(CorruptionError, match=r"1\.delta"):  # the door finds so that its query has to go back
        files.bring("state/0/0/1.delta")
    files.drop("state/0/0/1.delta")
    assert names(files, "state/0/0") == ["3.delta"]


@pytest.mark.parametrize("how", ["written here", "written elsewhere", "deleted"])
def test_what_changes_while_a_file_comes_counts(
    files: SpreadFiles, host: Host, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    fetch = host.fetch

    def changing(reference: Reference, target: Target, patience_s: float) -> None:
        fetch(reference, target, patience_s)
        if how == "written here":
            write(files, "state/a", b"newer")
        elif how == "written elsewhere":
            files.refer("state/a", host.write(b"newer"), may_overwrite=True)
        else:
            files.delete("state/a", is_recursive=False)
        monkeypatch.setattr(host, "fetch", fetch)

    monkeypatch.setattr(host, "fetch", changing)
    files.refer("state/a", host.write(b"older"), may_overwrite=True)
    files.bring("state/a")
    files.bring("state/a")
    if how == "deleted":
        assert names(files) == []
    else:
        assert read(files, "state/a") == b"newer"


def test_what_comes_is_what_was_written(files: SpreadFiles, host: Host) -> None:
    files.refer("state/a", host.write(b"as it was"), may_overwrite=True)
    host.has["t0"] = b"another"
    with pytest.raises(CorruptionError, match="came from n2 with digest"):
        files.bring("state/a")
    host.has["t0"] = b"as it was"
    files.bring("state/a")
    assert read(files, "state/a") == b"as it was"


def test_what_no_batch_needs_is_not_waited_for(files: SpreadFiles, host: Host, tmp_path: Path) -> None:
    """A lost host had a state of an attempt that failed, and a snapshot of a version whose changes are here."""
    commit = "v2\n" + json.dumps({"nextBatchWatermarkMs": 0, "stateUniqueIds": {"0": [["good"]]}})
    write(files, "state/0/0/1_good.changelog", b"x")
    for path in ("state/0/0/1_bad.changelog", "state/0/0/1_good.zip"):
        files.refer(path, host.write(b"lost"), may_overwrite=True)
    host.is_away = True
    keep = Keep(tmp_path / "data", "q", Env())
    intake = Intake(tmp_path / "live", keep, 100, lambda: None, files)
    write(files, "commits/0", commit.encode())
    intake.take_all()
    assert (intake.problem, intake.lacks) == (None, None)
    assert "commits/0" in keep.index
    assert names(files, "state/0/0") == ["1_good.changelog"]


def test_what_a_batch_needs_is_waited_for(files: SpreadFiles, host: Host, tmp_path: Path) -> None:
    files.refer("state/0/0/1.delta", host.write(b"needed"), may_overwrite=True)
    write(files, "commits/0", b"v1\n{}")
    host.is_away = True
    keep = Keep(tmp_path / "data", "q", Env())
    intake = Intake(tmp_path / "live", keep, 100, lambda: None, files)
    intake.take_all()
    assert "n2 is away" in str(intake.problem)
    assert "state/0/0/1.delta" in str(intake.lacks)
    assert "commits/0" not in keep.index, "a commit enters after what belongs to it"
    host.is_away = False
    intake.step(0.0)
    assert (intake.problem, intake.lacks) == (None, None)
    assert keep.read("state/0/0/1.delta") == b"needed"
    assert "commits/0" in keep.index


def test_a_spool_keeps_what_was_asked_for_lately(tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    spool = Spool(tmp_path / "spool", tmp_path / "w", Env())
    references = []
    for data in (b"old", b"new"):
        with spool.create() as (part, file):
            file.write(data)
            file.flush()
            references.append(spool.keep("q", part, file, "n1"))
    old, new = (tmp_path / "spool" / "q" / reference.token for reference in references)
    assert (old.read_bytes(), references[0].size_bytes, references[0].digest) == (b"old", 3, blake3(b"old").hexdigest())
    found = new.stat()
    os.utime(old, (found.st_mtime - KEPT_S - 9, found.st_mtime - KEPT_S - 9))
    spool.remove_old()
    assert not old.exists()
    assert new.exists()
    for do in (spool.open, spool.release):
        with pytest.raises(RemoteError, match="no such file"):
            do("q", "../q/" + references[1].token)
    spool.release("q", references[1].token)
    spool.release("q", references[1].token)
    assert not new.exists()
    assert not list((tmp_path / "w").iterdir())


def test_a_large_file_has_time_to_come(tmp_path: Path) -> None:
    class Doors:
        waited_s: float

        def receive(self, target: Target, *asked: object, patience_s: float) -> int:
            self.waited_s = patience_s
            target.write(b"x")
            return 200

    doors = Doors()
    source = SpooledElsewhere(doors, "words")  # type: ignore[arg-type]
    for size_bytes, least_s in ((1, 5.0), (10 << 30, 10_000.0)):
        source.fetch(Reference("n2", "t", size_bytes, ""), io.BytesIO(), 5.0)
        assert least_s <= doors.waited_s < least_s + 300
