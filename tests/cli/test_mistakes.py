"""Mistakes on the command line that were once taken without a word: nothing is done, and one line says why."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow as pa
import pytest

import nosync
from tests.cli.test_commands import run
from tests.helpers.remotes import epochs


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    with nosync.open(tmp_path / "s", settings=nosync.StoreSettings(background=False)) as store:
        epochs(store, range(4))
    return tmp_path / "s"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["backup", "s", ""], "it is empty: give a directory"),
        (["daemon", "--node", "n1", "--data", "d", "--checkpoint", "a=b", "--checkpoint", "a=c", "--check"],
         "--checkpoint names checkpoint a twice"),
        (["peers", "s", "--add", "n2=127.0.0.1:1", "--add", "n2=127.0.0.1:2"], "--add names node n2 twice"),
        (["peers", "s", "--add", "n2=127.0.0.1:1", "--remove", "n2"], "n2 is in --add and in --remove"),
        (["run", ".", "--store", "s", "--dry-run", "--branch", "b"], "--dry-run says what a run would do"),
        (["run", ".", "--store", "s", "--branch", "b", "--retain", "3"], "--retain is for runs"),
        (["rewind", "s", "1", "--keep-as", ""], "--keep-as has no name: give one, or --drop"),
        (["rewind", "s", "1", "--keep-as", "b", "--drop"], "--drop keeps nothing: leave out --keep-as"),
    ],
    ids=lambda given: given[0] if isinstance(given, list) else "",
)  # fmt: skip
def test_what_contradicts_itself_is_refused(
    path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], why: str
) -> None:
    before = sorted(entry.name for entry in path.parent.iterdir())
    code, _, said = run(capsys, *arguments)
    assert (code, "Traceback" in said) == (2, False)
    assert why in " ".join(said.split())
    assert sorted(entry.name for entry in path.parent.iterdir()) == before
    with nosync.open(path) as store:
        assert (store.last_sealed(), list(store.node.timelines.refs.names)) == (3, ["main"])


@pytest.mark.parametrize("ending", ["import sys\nsys.exit(0)", "def make():\n    import sys\n    sys.exit(0)"])
def test_a_module_that_ends_the_program_is_no_success(
    path: Path, capsys: pytest.CaptureFixture[str], ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"ends_{len(ending)}"
    (path.parent / f"{name}.py").write_text(f"{ending}\n")
    monkeypatch.syspath_prepend(str(path.parent))
    code, out, said = run(capsys, "recover", str(path), "--flow", f"{name}:make")
    assert (code, out) == (1, "")
    assert f"--flow {name}:make" in said


def test_copies_in_a_directory_are_read_by_their_url(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"file://{path.parent}/copies"
    assert run(capsys, "backup", str(path), url)[0] == 0
    code, out, _ = run(capsys, "get", url, "counts", "--as-of", "1", "--json")
    assert code == 0
    assert {row["k"]: row["n"] for row in json.loads(out)} == {"a0": 0, "a1": 1, "all": 1}
    code, _, said = run(capsys, "compact", url)
    assert code == 1
    assert f"make one, nosync restore {url} DIR" in " ".join(said.split())


def test_times_that_no_calendar_has_are_shown(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    far = pa.array([2**60], pa.timestamp("us"))
    rows = pa.table({
        "k": [1], "at": far, "day": pa.array([10_000_000], pa.int32()).cast(pa.date32()),
        "all": pa.array([far.to_numpy()], pa.list_(pa.timestamp("us"))),
    })  # fmt: skip
    with nosync.open(path.parent / "far") as store:
        store.append("a", t=0, rows=rows, key=["k"])
        store.seal(0)
    code, out, said = run(capsys, "get", "far", "a", "--json")
    assert code == 0, said
    (row,) = json.loads(out)
    assert row["at"] == f"{2**60:,} us since 1970"
    assert (row["day"], row["all"]) == ("10,000,000 days since 1970", [row["at"]])
    for more in ([], ["--csv"]):
        assert run(capsys, "get", "far", "a", *more)[0] == 0


def test_a_torn_pin_is_a_problem_with_a_remedy_and_status_goes_on(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with nosync.open(path) as store:
        store.pin("audit", 2)
    (pin,) = (path / "pins").iterdir()
    pin.write_text("[")
    code, out, _ = run(capsys, "status", str(path), "--json")
    assert code == 0
    found = json.loads(out)
    assert (found["last_sealed"], found["pins"]) == (3, {})
    assert "until it is removed, or put back from a backup" in found["problems"]["pins"]
    code, _, said = run(capsys, "pin", str(path))
    assert code == 1
    assert "until it is removed, or put back from a backup" in " ".join(said.split())
    pin.unlink()
    assert "problems" not in run(capsys, "status", str(path))[1]


def test_what_is_said_is_what_was_asked(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, why in (
        (["get", "s", "counts", "--columns", ","], "names no column"),
        (["changes", "s", "counts", "--from", "3", "--to", "1"], "--from 3 must not be after epoch 1"),
        (["changes", "s", "counts", "--from", "9"], "--from 9 must not be after epoch 3"),
    ):
        code, _, said = run(capsys, *arguments)
        assert code == 1
        assert why in " ".join(said.split())
    code, out, _ = run(capsys, "rewind", "s", "3", "--keep-as", "kept")
    assert code == 0
    assert "what was recorded of later ones is kept as branch kept" in out
    assert "deleted" in run(capsys, "rewind", "s", "3")[1]


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_file_may_have_a_name_that_is_no_text(path: Path, capsys: pytest.CaptureFixture[str], suffix: str) -> None:
    name = os.fsdecode(b"e\xff." + suffix.encode())
    code, _, said = run(capsys, "export", "s", "counts", name)
    assert code == 0, said
    assert (path.parent / name).stat().st_size > 0


def test_a_page_takes_the_place_of_a_page_alone(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with nosync.open(path) as store:
        store.rewind(1, "b")
    (path.parent / "real.parquet").write_text("rows")
    code, _, said = run(capsys, "diff", "s", "counts", "main", "b", "--html", "real.parquet")
    assert code == 1
    assert "is there, and is no page by its name" in " ".join(said.split())
    assert (path.parent / "real.parquet").read_text() == "rows"
    for _ in range(2):
        code, out, said = run(capsys, "diff", "s", "counts", "main", "b", "--html", "page.html", "--json")
        assert code == 0, said
    assert json.loads(out)["bytes"] == (path.parent / "page.html").stat().st_size


def test_a_damaged_manifest_comes_with_a_remedy_that_works(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What only reads may not set it aside."""
    manifest = path / "manifests/main/2.json"
    data = bytearray(manifest.read_bytes())
    data[len(data) // 2] ^= 4
    manifest.unlink()
    manifest.write_bytes(data)
    for command in (["status", "s"], ["get", "s", "counts", "--as-of", "1"]):
        code, _, said = run(capsys, *command)
        assert code == 1
        assert "opened for writing (a job, or `nosync compact STORE`), the store sets it aside" in " ".join(
            said.split()
        )
    assert run(capsys, "compact", "s")[0] == 0
    assert run(capsys, "get", "s", "counts", "--as-of", "1")[0] == 0
    assert "advance(2) with the same rows" in " ".join(run(capsys, "status", "s")[2].split())
