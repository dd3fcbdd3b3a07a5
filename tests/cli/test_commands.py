"""The command line as a user meets it: what it prints, what it refuses, how it exits."""

from __future__ import annotations

import datetime
import decimal
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import nosync
from nosync.cli import main
from nosync.cli.console import rows_of
from nosync.lsm.manifests.branches import ChangedStages


@pytest.fixture
def path(tmp_path: Path) -> str:
    with nosync.open(tmp_path / "s", settings=nosync.StoreSettings(background=False)) as store:
        for t in range(5):
            rows = pa.table({"origin": ["JFK", "LGA"], "carrier": ["AA", "AA"], "n": [t, 10 * t], "tags": [[1], []]})
            store.append("delays", t=t, rows=rows, key=["origin", "carrier"])
            store.seal(t)
    return str(tmp_path / "s")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = 0
    try:
        main(arguments)
    except SystemExit as stop:
        code = int(stop.code or 0)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    code, out, _ = run(capsys, *arguments, "--json")
    assert code == 0
    return json.loads(out)


def test_status(capsys: pytest.CaptureFixture[str], path: str) -> None:
    found = answer(capsys, "status", path)
    assert (found["safe_point"], found["last_sealed"], found["missing"]) == (4, 4, 0)
    assert found["stages"]["delays"]["layers"] == 5
    code, out, _ = run(capsys, "status", path)
    assert code == 0
    assert "safe point" in out
    assert "delays" in out


def test_layers(capsys: pytest.CaptureFixture[str], path: str) -> None:
    found = answer(capsys, "layers", path)
    assert [layer["lower"] for layer in found] == [0, 1, 2, 3, 4]
    assert {layer["shard"] for layer in found} == {0}
    expected = {"stage", "shard", "shards", "lower", "upper", "since", "rows", "bytes", "digest", "level", "path"}
    assert expected <= found[0].keys()
    assert {layer["level"] for layer in found} == {"disk"}
    assert all(Path(layer["path"]).stat().st_size == layer["bytes"] for layer in found)
    assert "[4, 5)" in run(capsys, "layers", path, "--stage", "delays")[1]


def test_get(capsys: pytest.CaptureFixture[str], path: str) -> None:
    found = answer(capsys, "get", path, "delays", "--as-of", "2", "--key", "origin=LGA")
    assert found == [{"origin": "LGA", "carrier": "AA", "n": 20, "tags": []}]
    code, out, _ = run(capsys, "get", path, "delays", "--limit", "1")
    assert code == 0
    assert "1 more of 2 rows" in out
    assert len(answer(capsys, "get", path, "delays", "--limit", "1")) == 1


def test_data_is_shown_as_it_is_and_taken_as_it_is_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    texts = ["C:\\[/x]", r"a\[red]b", "[bold]", "trailing\\", "Zürich"]
    with nosync.open(tmp_path / "s") as store:
        rows = pa.table({"k": texts, "v": [0.1 + 0.2, 12345678901.23, 1e300, -0.0, 1.0]})
        store.append("s", t=0, rows=rows, key=["k"])
        store.append("by_value", t=0, rows=rows.select(["v", "k"]), key=["v"])
        store.append("by_list", t=0, rows=pa.table({"k": [1], "l": [[1]]}), key=["k"])
        store.seal(0)
    code, out, _ = run(capsys, "get", str(tmp_path / "s"), "s")
    assert code == 0
    for text in [*texts, "0.30000000000000004", "12345678901.23", "1e+300"]:
        assert text in out
    (found,) = answer(capsys, "get", str(tmp_path / "s"), "by_value", "--key", "v=0.30000000000000004")
    assert found["k"] == texts[0]
    for keys, message in ((["k=1", "k=2"], "given twice"), (["l=[1]"], "is not a list")):
        options = [word for key in keys for word in ("--key", key)]
        code, _, err = run(capsys, "get", str(tmp_path / "s"), "by_list", *options)
        assert code == 1
        assert message in " ".join(err.split())


def test_a_locale_without_a_letter_gets_its_number(tmp_path: Path) -> None:
    with nosync.open(tmp_path / "s") as store:
        store.append("s", t=0, rows=pa.table({"k": ["Zürich"]}), key=["k"])
        store.seal(0)
    plain = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "nosync.cli", "get", str(tmp_path / "s"), "s"]
    done = subprocess.run(command, env=plain, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert b"Z\\xfcrich" in done.stdout


def test_get_csv(capfd: pytest.CaptureFixture[str], path: str) -> None:
    main(["get", path, "delays", "--csv", "--columns", "origin,n,tags", "--key", "origin=JFK"])
    assert capfd.readouterr().out == '"origin","n","tags"\n"JFK",4,"[1]"\n'


def test_pin_and_compact(capsys: pytest.CaptureFixture[str], path: str) -> None:
    assert answer(capsys, "pin", path) == {}
    found = answer(capsys, "compact", path)
    assert (found["layers"], found["merges"]) == ({"before": 5, "after": 1}, 1)
    assert answer(capsys, "pin", path, "before", "2") == {"before": 2}
    assert answer(capsys, "compact", path, "--retain", "0")["merges"] == 1
    assert answer(capsys, "get", path, "delays", "--as-of", "2", "--key", "origin=JFK")[0]["n"] == 2
    assert answer(capsys, "pin", path, "before", "--remove") == {}
    run(capsys, "compact", path, "--retain", "0")
    code, _, err = run(capsys, "get", path, "delays", "--as-of", "2")
    assert code == 1
    assert "merged away" in err


def test_verify(capsys: pytest.CaptureFixture[str], path: str) -> None:
    assert answer(capsys, "verify", path)["layers"] == 5
    victim = Path(answer(capsys, "layers", path)[3]["path"])
    data = bytearray(victim.read_bytes())
    data[100] ^= 1
    victim.write_bytes(data)
    code, _, err = run(capsys, "verify", path)
    assert code == 1
    assert victim.name in err.replace("\n", "")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["status", "/nothing/there"], 1, "does not exist"),
        (["statsu", "x"], 2, "No such command 'statsu'"),
        (["get", "PATH", "nope"], 1, "recorded stages: delays"),
        (["get", "PATH", "delays", "--as-of", "99"], 1, "recorded up to 4"),
        (["get", "PATH", "delays", "--as-of", "x"], 2, "'x' is neither the number of an epoch nor a time"),
        (["get", "PATH", "delays", "--key", "origin"], 1, "is not COLUMN=VALUE"),
        (["get", "PATH", "delays", "--key", "foo=1"], 1, "no column 'foo'"),
        (["get", "PATH", "delays", "--key", "carrier=AA"], 1, "not the first of the key"),
        (["get", "PATH", "delay"], 1, "did you mean 'delays'"),
        (["get", "PATH", "delays", "--columns", "origins"], 1, "did you mean 'origin'"),
        (["get", "PATH", "delays", "--branch", "mian"], 1, "did you mean 'main'"),
        (["get", "PATH", "delays", "--columns", "zzz"], 1, "no column 'zzz'"),
        (["layers", "PATH", "--stage", "nope"], 1, "recorded stages: delays"),
        (["pin", "PATH", "a"], 2, "give an EPOCH to hold, or --remove"),
        (["pin", "PATH", "a", "77"], 1, "cannot pin 77"),
        (["pin", "PATH", "A!", "1"], 1, "not a valid name"),
        (["pin", "PATH", "zz", "--remove"], 1, "no pin 'zz'"),
        (["compact", "/nothing/there"], 1, "does not exist"),
        (["compact", "PATH", "--retain", "-1"], 2, "Invalid value"),
        (["compact", "127.0.0.1:7501"], 1, "is a daemon's address; this command needs the store's directory"),
        (
            ["compact", "s3://bucket/state"],
            1,
            "s3://bucket/state are copies, which are only read; this command needs the store's directory",
        ),
        (["rewind", "127.0.0.1:7501", "3"], 1, "is a daemon's address"),
        (["pin", "127.0.0.1:7501", "a", "1"], 1, "is a daemon's address"),
        (["branch", "127.0.0.1:7501", "a", "--delete"], 1, "is a daemon's address"),
        (["demo", "--by", "year"], 2, "'year' is not one of"),
    ],
)
def test_mistakes_get_one_clear_line(
    capsys: pytest.CaptureFixture[str], path: str, arguments: list[str], code: int, message: str
) -> None:
    got, _, err = run(capsys, *(path if a == "PATH" else a for a in arguments))
    assert got == code
    assert message in " ".join(err.split())
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("store", "flow", "message"),
    [
        ("PATH", "no_colon", "is not MODULE:FUNCTION"),
        ("PATH", "nowhere:make", "cannot import nowhere: No module named 'nowhere'"),
        ("PATH", "./jobs.py:make", "cannot import ./jobs.py: TypeError"),
        ("PATH", "./jobs.py:make", "write --flow jobs:make"),
        ("PATH", "broken:make", "cannot import broken: ZeroDivisionError"),
        ("PATH", "jobs:nothing", "jobs has no nothing"),
        ("PATH", "jobs:text", "it gives a str, expected a nosync.Dataflow"),
        ("127.0.0.1:7501", "jobs:make", "is a daemon's address"),
    ],
)
def test_a_flow_that_cannot_be_had(
    capsys: pytest.CaptureFixture[str],
    path: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    store: str,
    flow: str,
    message: str,
) -> None:
    (tmp_path / "jobs.py").write_text("import nosync\n\ntext = 'x'\n\ndef make():\n    return nosync.Dataflow('f')\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    code, _, err = run(capsys, "recover", path if store == "PATH" else store, "--flow", flow)
    sys.modules.pop("jobs", None)
    assert code == 1
    assert message in " ".join(err.split())
    assert "Traceback" not in err
    assert not (tmp_path / store).exists(), "no store was made in the place of what is elsewhere"


def test_a_store_in_use_can_be_looked_at_but_not_changed(capsys: pytest.CaptureFixture[str], path: str) -> None:
    with nosync.open(path, settings=nosync.StoreSettings(merge=False)):
        assert answer(capsys, "status", path)["safe_point"] == 4
        assert len(answer(capsys, "layers", path)) == 5
        code, _, err = run(capsys, "compact", path)
        assert code == 1
        assert "is open in process" in err


@pytest.mark.parametrize(
    "arguments",
    [["status", ""], ["verify", ""], ["pin", "", "p", "1"], ["daemon", "--node", "n1", "--data", ""], ["certs", "", "n1"],
     ["demo", "--out", ""]],
)  # fmt: skip
def test_an_empty_path_is_not_the_working_directory(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    """As where a variable of the shell is not set."""
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert "it is empty: give the path" in " ".join(err.split())
    assert not list(tmp_path.iterdir())


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for command in ("demo", "status", "layers", "get", "verify", "compact", "pin"):
        assert command in out
    assert "nosync demo" in out
    assert "--as-of" in run(capsys, "get", "--help")[1]
    assert run(capsys, "--version")[1].startswith("nosync, version 0.1")


def test_branches(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    with nosync.open(path) as store:
        store.node.timelines.create("other", "main", 1, ChangedStages(("delays",)))
    found = answer(capsys, "branch", path)
    assert [(b["name"], b["at"], b["epoch"]) for b in found][1] == ("other", 1, 1)
    assert found[1]["own_layers"] == 0 < found[1]["shared_layers"]
    assert answer(capsys, "branch", path, "other")[0]["lineage"] == ["main at 1"]
    rows = {r["origin"]: r for r in answer(capsys, "diff", path, "delays", "other", "main", "--as-of", "1")}
    assert rows == {}
    main(["branch", path])
    assert "other" in capsys.readouterr().out
    main(["get", path, "delays", "--branch", "other", "--csv", "--columns", "origin,n"])
    capsys.readouterr()
    main(["branch", path, "other", "--delete"])
    assert "deleted branch other and 0 layers" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["diff", path, "delays", "main", "other"])
    assert "no branch 'other'; branches: main" in capsys.readouterr().err


def test_a_limit_is_for_json_too(capsys: pytest.CaptureFixture[str], path: str, tmp_path: Path) -> None:
    run(capsys, "rewind", path, "2", "--keep-as", "old")
    with nosync.open(path) as store:
        rows = pa.table({"origin": ["JFK", "LGA"], "carrier": ["AA", "AA"], "n": [-1, -2], "tags": [[1], []]})
        store.append("delays", t=3, rows=rows, key=["origin", "carrier"])
        store.seal(3)
    assert len(answer(capsys, "diff", path, "delays", "old", "main")) == 2
    assert len(answer(capsys, "diff", path, "delays", "old", "main", "--limit", "1")) == 1
    assert "1 more of 2 rows" in run(capsys, "diff", path, "delays", "old", "main", "--limit", "1")[1]
    page = tmp_path / "page.html"
    assert run(capsys, "diff", path, "delays", "old", "main", "--html", str(page), "--limit", "1")[0] == 2
    code, _, err = run(capsys, "diff", path, "delays", "old", "main", "--html", str(tmp_path / "nowhere" / "page.html"))
    assert (code, page.exists()) == (1, False)
    assert f"there is no directory {tmp_path / 'nowhere'}" in err


def test_a_value_of_a_key_is_found_as_it_is_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    at = datetime.datetime(2026, 1, 1, 12, 30, 0, 123456, tzinfo=datetime.UTC)
    with nosync.open(tmp_path / "s") as store:
        rows = pa.table({"f": [float("nan"), 1.5], "at": pa.array([at, at], pa.timestamp("us", "UTC"))})
        store.append("s", t=0, rows=rows, key=["f"])
        store.append("times", t=0, rows=rows.select(["at"]).slice(0, 1), key=["at"])
        store.seal(0)
    path = str(tmp_path / "s")
    for command in ("get", "changes"):
        assert [row["f"] for row in answer(capsys, command, path, "s", "--key", "f=NaN")] == ["NaN"]
        assert [row["f"] for row in answer(capsys, command, path, "s", "--key", "f=1.5")] == [1.5]
        for time in ("2026-01-01 12:30:00.123456", "2026-01-01T12:30:00.123456Z", "2026-01-01 13:30:00.123456+01:00"):
            assert len(answer(capsys, command, path, "times", "--key", f"at={time}")) == 1, time
        assert answer(capsys, command, path, "times", "--key", "at=2026-01-01") == []


def test_json_has_all_columns_or_says_why_not() -> None:
    with pytest.raises(nosync.InvalidInputError, match="two columns are named 'a'"):
        rows_of(pa.table([[1], [2], [3]], names=["a", "b", "a"]))


def test_nobody_listens(path: str) -> None:
    ran = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m nosync.cli status {path} >&-"], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_rewind(capsys: pytest.CaptureFixture[str], path: str) -> None:
    code, _, err = run(capsys, "rewind", path, "9")
    assert code == 1
    assert "cannot rewind to 9: possible are 0 to 4" in err
    assert (
        "the main timeline is at epoch 4; what was recorded of later ones is deleted"
        in run(capsys, "rewind", path, "4")[1]
    )
    assert [b["name"] for b in answer(capsys, "branch", path)] == ["main"]
    assert "the main timeline is at epoch 2 again; epochs 3 to 4 are kept as branch old" in run(
        capsys, "rewind", path, "2", "--keep-as", "old")[1]  # fmt: skip
    assert {r["n"] for r in answer(capsys, "get", path, "delays")} == {2, 20}
    assert {r["n"] for r in answer(capsys, "get", path, "delays", "--branch", "old")} == {4, 40}
    assert "are deleted" in run(capsys, "rewind", path, "1", "--drop")[1]
    found = answer(capsys, "branch", path)
    assert [b["name"] for b in found] == ["main", "old"]
    assert found[0]["lineage"] == ["(deleted) at 1", "old at 2", "(deleted) at 4"], "branches as they are called now"
    assert run(capsys, "rewind", path, "0", "--drop", "--keep-as", "x")[0] == 2
    assert run(capsys, "branch", path, "--delete")[0] == 2


def test_rows_come_by_key_and_numbers_as_people_write_them(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    small = [0.1, 1e-5, 1e16, 1e300, -0.0, float("nan"), float("inf"), 1e-7, 100.0]
    written = ["0.1", "0.00001", "10000000000000000.0", "1e+300", "-0.0", "NaN", "Infinity", "1e-07", "100.0"]
    rows = {
        "k": [9, 3, 7, None, 5, 1, 8, 2, 6],
        "v": pa.array(small),
        "f": pa.array([0.1] * 9, pa.float32()),
        "l": pa.array([[0.7]] * 9, pa.list_(pa.float32())),
        "d": pa.array([decimal.Decimal(0)] * 9, pa.decimal128(20, 8)),
    }
    with nosync.open(path) as store:
        store.append("s", t=0, rows=pa.table(rows), key=["k"])
        store.append("pairs", t=0, rows=pa.table({"a": ["y", "x", "y"], "b": [1, 2, 0]}), key=["a", "b"])
        store.append("log", t=0, rows=pa.table({"k": [3, 1, 2]}), key=[])
        store.seal(0)
    found = answer(capsys, "get", path, "s")
    assert [row["k"] for row in found] == [None, 1, 2, 3, 5, 6, 7, 8, 9]
    assert {(row["f"], tuple(row["l"])) for row in found} == {(0.1, (0.7,))}
    lines = [line.split() for line in run(capsys, "get", path, "s")[1].splitlines()[1:]]
    assert {line[0]: line[1] for line in lines} == dict(
        zip(["null" if k is None else str(k) for k in rows["k"]], written, strict=True)
    )
    assert {tuple(line[2:]) for line in lines} == {("0.1", "[0.7]", "0.00000000")}
    assert [row["k"] for row in answer(capsys, "get", path, "s", "--limit", "2")] == [None, 1]
    assert [row["v"] for row in answer(capsys, "get", path, "s", "--columns", "v", "--limit", "2")] == [1e300, "NaN"]
    assert answer(capsys, "get", path, "pairs") == [{"a": "x", "b": 2}, {"a": "y", "b": 0}, {"a": "y", "b": 1}]
    assert [row["k"] for row in answer(capsys, "get", path, "log")] == [3, 1, 2], "a log is in the order of its epochs"


def test_layers_name_their_branches(capsys: pytest.CaptureFixture[str], path: str) -> None:
    with nosync.open(path, settings=nosync.StoreSettings(background=False)) as store:
        store.rewind(2, keep_as="old")
        rows = pa.table({"origin": ["JFK"], "carrier": ["AA"], "n": [7], "tags": [[1]]})
        for t in (3, 4):
            store.append("delays", t=t, rows=rows)
        store.seal(3)
    found = {(layer["lower"], *layer["branches"]) for layer in answer(capsys, "layers", path)}
    assert found == {*((t, "main", "old") for t in range(3)), (3, "old"), (4, "old"), (3, "main"), (4,)}
    code, out, _ = run(capsys, "layers", path)
    assert code == 0
    assert "branch" in out.splitlines()[0].split()
    assert sum("main, old" in line for line in out.splitlines()) == 3
    assert sum("not sealed" in line for line in out.splitlines()) == 1


def test_status_has_pins_branches_and_when_the_last_epoch_was_sealed(
    capsys: pytest.CaptureFixture[str], path: str
) -> None:
    with nosync.open(path, settings=nosync.StoreSettings(background=False)) as store:
        store.pin("kept", 1)
        store.node.timelines.create("other", "main", 2, ChangedStages(("delays",)))
        at = store.sealed_at(4)
        assert at is not None
        assert store.status().sealed_at == at.replace(microsecond=0).isoformat()
        shutil.rmtree(Path(path) / "times")  # as an earlier version left it: what its file says counts
        (manifest,) = Path(path).glob("manifests/main/4.json")
        os.utime(manifest, (1_700_000_000, 1_700_000_000))
        assert store.status().sealed_at == "2023-11-14T22:13:20+00:00"
    found = answer(capsys, "status", path)
    assert (found["pins"], found["branches"]) == ({"kept": 1}, {"main": 4, "other": 2})
    assert found["sealed_at"] == "2023-11-14T22:13:20+00:00"
    lines = [line.split() for line in run(capsys, "status", path)[1].splitlines()]
    assert ["last", "sealed", "4", "(2023-11-14", "22:13:20", "UTC)"] in lines
    assert ["pin", "kept", "at", "1"] in lines
    assert ["branch", "other", "at", "2"] in lines
    manifest.touch()
    assert answer(capsys, "get", path, "delays")[0]["n"] == 4, "nothing depends on it"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands_as_documented(shell: str, tmp_path: Path) -> None:
    variable = f"{shell}_source"
    docs = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    assert f"_NOSYNC_COMPLETE={variable} nosync" in docs
    command = [sys.executable, "-m", "nosync.cli"]
    env = {**os.environ, "_NOSYNC_COMPLETE": variable}
    script = subprocess.run(command, env=env, capture_output=True, text=True, check=False).stdout
    assert "_NOSYNC_COMPLETE" in script
    words = {"COMP_WORDS": "nosync rew", "COMP_CWORD": "rew" if shell == "fish" else "1"}
    env = {**os.environ, "_NOSYNC_COMPLETE": f"{shell}_complete", **words}
    offered = subprocess.run(command, env=env, capture_output=True, text=True, check=False).stdout
    assert "rewind" in offered


def test_a_negative_epoch_is_an_argument(capsys: pytest.CaptureFixture[str], tmp_path: Path, path: str) -> None:
    begun = str(tmp_path / "begun")
    with nosync.open(begun, settings=nosync.StoreSettings(background=False)) as store:
        store.append("s", t=0, rows=pa.table({"k": [1]}), key=["k"])
    for words in (["rewind", begun, "-1"], ["rewind", "--json", begun, "-1"], ["rewind", begun, "-1", "--drop"]):
        code, _, err = run(capsys, *words)
        assert (code, err) == (0, ""), words
    assert "the main timeline is at epoch -1" in run(capsys, "rewind", begun, "-1")[1]
    assert "the main timeline is at epoch -1" in run(capsys, "rewind", begun, "--", "-1")[1]
    with nosync.open(begun, read_only=True) as store:
        assert store.layers() == []
    for words, message in (
        (["rewind", path, "-1"], "-1 is not an epoch number"),
        (["pin", path, "name", "-1"], "-1 is not an epoch number"),
        (["get", path, "delays", "--as-of", "-1"], "-1 is not an epoch number"),
        (["rewind", path, "-x"], "No such option"),
        (["get", path, "delays", "--limit", "-1"], "Invalid value for '--limit'"),
    ):
        code, _, err = run(capsys, *words)
        assert code in (1, 2), words
        assert message in " ".join(err.split())


def test_names_and_values_are_shown_as_they_are(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(tmp_path / "st[/b]")
    rows = pa.table({"k": ["b\nc"], "a[/b]": ["x"], "c>": ["y"], "bytes": [b"\xff"], "list": [[float("nan")]]})
    with nosync.open(path) as store:
        store.append("s", t=0, rows=rows, key=["k"])
        store.seal(0)
    assert path in run(capsys, "status", path)[1]
    code, out, _ = run(capsys, "get", path, "s", "--limit", "99999999999999999999")
    header, row = out.splitlines()
    assert code == 0
    assert header.split() == ["k", "a[/b]", "c>", "bytes", "list"]
    assert row.split() == ["b\\nc", "x", "y", "/w==", "[nan]"], "a line break is no other row"
    assert '"[""NaN""]"' in run(capsys, "get", path, "s", "--csv")[1]
    code, _, err = run(capsys, "get", path, "s", "--columns", "k,k")
    assert code == 1
    assert "a column is given twice" in err


def test_binary_keys_are_given_as_they_are_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    with nosync.open(path) as store:
        store.append("s", t=0, rows=pa.table({"k": [b"abc"], "n": [1]}), key=["k"])
        store.seal(0)
    (shown,) = run(capsys, "get", path, "s")[1].splitlines()[1:]
    assert answer(capsys, "get", path, "s", "--key", f"k={shown.split()[0]}") == [{"k": "YWJj", "n": 1}]
    code, _, err = run(capsys, "get", path, "s", "--key", "k=b'abc'")
    assert code == 1
    assert "is not text in base64" in err


def test_a_reader_that_has_seen_enough_is_no_failure(path: str) -> None:
    for words in (["layers", path], ["get", path, "delays", "--csv"], ["get", path, "delays", "--json"]):
        with subprocess.Popen(
            [sys.executable, "-m", "nosync.cli", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.close()
            assert process.stderr.read() == b"", words
            assert process.wait() == 0, words


def test_columns_that_are_kept_for_others_are_not_offered(capsys: pytest.CaptureFixture[str], path: str) -> None:
    with nosync.open(path) as store:
        store.append("means", t=5, rows=pa.table({"k": [1], "__mean_sum": [2.0], "mean": [2.0]}), key=["k"])
    code, _, err = run(capsys, "get", path, "means", "--columns", "foo", "--as-of", "5")
    assert code == 1
    assert "has no column 'foo'; it has k int64, mean double" in err
