"""What commands say and do of copies in an object store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import nosync
from nosync.cli import main
from nosync.lsm.platform.lock import DirectoryLock
from tests.helpers.remotes import epochs, rows_of


def test_status_shows_how_far_copies_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, url = tmp_path / "store", f"file://{tmp_path}/copies"
    with nosync.open(path, remote=url) as store:
        epochs(store, range(3))
        store.sync_remote()
    main(["status", str(path)])
    assert f"{url}: epoch 2" in capsys.readouterr().out
    main(["status", str(path), "--json"])
    (remote,) = json.loads(capsys.readouterr().out)["remotes"]
    assert (remote["url"], remote["safe_point"], remote["lag_epochs"], remote["problem"]) == (url, 2, 0, "")


@pytest.fixture
def copied(tmp_path: Path) -> tuple[Path, str]:
    """A store of four epochs, and the URL of its copies."""
    path, url = tmp_path / "store", f"file://{tmp_path}/copies"
    with nosync.open(path, remote=url) as store:
        epochs(store, range(4))
        store.pin("two", 2)
        store.sync_remote()
    return path, url


def test_what_is_in_a_bucket_is_shown(copied: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    main(["remote", "status", copied[1]])
    said = capsys.readouterr().out
    assert "main up to 3" in said
    assert "two at 2" in said
    assert "a month" in said
    main(["remote", "status", copied[1], "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["url"], found["branches"], found["pins"]) == (copied[1], {"main": 3}, {"two": 2})


def test_restore(copied: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["restore", copied[1], str(tmp_path / "new")])
    assert "restored up to epoch 3" in capsys.readouterr().out
    main(["restore", copied[1], str(tmp_path / "old"), "--as-of", "1", "--json"])
    assert json.loads(capsys.readouterr().out)["epoch"] == 1
    with nosync.open(tmp_path / "new") as new, nosync.open(copied[0]) as store:
        assert rows_of(new) == rows_of(store)
    with nosync.open(tmp_path / "old") as old:
        assert old.last_sealed() == 1


@pytest.mark.parametrize("how", [[], ["--json"], ["--lazy"]])
def test_a_restore_of_a_damaged_bucket_says_so_to_scripts(
    copied: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], how: list[str]
) -> None:
    newest = max((tmp_path / "copies").rglob("*.pack"))
    data = newest.read_bytes()
    newest.write_bytes(data[:-20] + b"damaged" + data[-13:])
    with pytest.raises(SystemExit) as ended:
        main(["restore", copied[1], str(tmp_path / "new"), *how])
    assert ended.value.code == 1
    said = capsys.readouterr()
    assert "what was put after it is not seen" in " ".join((said.out + said.err).split())
    with nosync.open(tmp_path / "new", read_only=True) as new:
        assert new.last_sealed() in (None, 0, 1, 2)


def test_lazy_restore(copied: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(tmp_path / "lazy")
    main(["restore", copied[1], target, "--lazy"])
    assert "4 layers (" in capsys.readouterr().out
    main(["status", target])
    assert "4 layers (" in capsys.readouterr().out
    main(["layers", target, "--json"])
    assert [layer["level"] for layer in json.loads(capsys.readouterr().out)] == ["remote"] * 4
    for refused in (["backup", target, str(tmp_path / "backup")], ["verify", target, "--repair"]):
        with pytest.raises(SystemExit):
            main(refused)
        assert f"nosync restore {copied[1]} {target}" in " ".join(capsys.readouterr().err.split())
    main(["verify", target])
    assert "4 layers are still in the bucket, and were not looked at" in " ".join(capsys.readouterr().out.split())
    main(["get", target, "counts"])
    assert "a3" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["restore", f"file://{tmp_path}", target])
    assert f"is restored from {copied[1]}" in capsys.readouterr().err
    lock = DirectoryLock(Path(target))
    with pytest.raises(SystemExit):
        main(["restore", copied[1], target])
    assert "is open in process" in " ".join(capsys.readouterr().err.split())
    lock.release()
    main(["restore", copied[1], target])
    assert "has all now" in capsys.readouterr().out
    main(["verify", target])
    with nosync.open(target) as new, nosync.open(copied[0]) as store:
        assert rows_of(new) == rows_of(store)


def test_backup_to_a_url(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, url = tmp_path / "store", f"file://{tmp_path}/copies"
    with nosync.open(path) as store:
        epochs(store, range(3))
    main(["backup", str(path), url])
    assert f"{url} has all up to epoch 2" in capsys.readouterr().out
    with nosync.open(path) as store:
        epochs(store, range(3, 5))
        main(["backup", str(path), url, "--json"])  # also while it is in use
    assert json.loads(capsys.readouterr().out)["epoch"] == 4
    main(["restore", url, str(tmp_path / "new")])
    with nosync.open(tmp_path / "new") as new:
        assert new.last_sealed() == 4


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["restore", "ftp://x/y", "new"], "not known"), (["restore", "s3:/x", "new"], "not the URL"),
        (["remote", "status", "file:///nowhere/at/all/x"], "no such directory"),
        (["remote", "status", "memory://empty"], "no copies of a store"),
        (["restore", "{url}", "{path}"], "is a store already"), (["restore", "{url}", "new", "--as-of", "9"], "has 0 to 3"),
        (["restore", "{url}", "new", "--branch", "calm"], "no branch 'calm'"),
        (["backup", "{path}", "s3://user:secret@bucket/x"], "leave them out"), (["backup", "nowhere", "{url}"], "does not exist"),
    ],
)  # fmt: skip
def test_mistakes_get_one_clear_line(
    copied: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main([text.format(url=copied[1], path=copied[0]) for text in arguments])
    said = capsys.readouterr().err
    assert ended.value.code == 1
    assert why in said
    assert "Traceback" not in said
    assert "secret" not in said
    assert len(said.strip().splitlines()) == 1
    assert not any((tmp_path / "new").glob("*")), "what is refused takes no directory"


def test_copies_are_read_by_their_url(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"memory://{tmp_path.name}/copies"
    with nosync.open(tmp_path / "store", remote=url) as store:
        epochs(store, range(3))
        store.sync_remote()
    main(["get", url, "counts", "--as-of", "1", "--json"])
    assert {row["k"]: row["n"] for row in json.loads(capsys.readouterr().out)} == {"a0": 0, "a1": 1, "all": 1}
    main(["status", url])
    assert "safe point" in capsys.readouterr().out
