"""Opening and making stores: directories that are none, paths of all kinds, other formats, who holds it, and settings."""

from __future__ import annotations

import errno
import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

import nosync
from nosync.lsm.platform.env import Env
from nosync.lsm.platform.store_marker import create_store
from nosync.testing.faulty_env import FaultyEnv
from tests.conftest import OpenStore
from tests.helpers.stores import filled, words


def test_directories_that_are_no_stores(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "data.csv").write_text("x")
    with pytest.raises(nosync.NotAStoreError, match=r"data\.csv"):
        nosync.open(foreign)
    assert [p.name for p in foreign.iterdir()] == ["data.csv"]
    with pytest.raises(nosync.NotAStoreError, match="does not exist"):
        nosync.open(tmp_path / "nothing", read_only=True)
    with pytest.raises(nosync.NotAStoreError, match="is a file"):
        nosync.open(foreign / "data.csv")


def test_what_others_put_beside_our_files_is_left_alone(open_store: OpenStore, tmp_path: Path) -> None:
    filled(open_store).close()
    root = tmp_path / "store"
    for place in ("layers", "layers/counts", "layers/counts/raw", "layers/counts/raw/0", "manifests", "manifests/main"):
        (root / place / ".DS_Store").write_text("junk")
    for name in ("branches/.DS_Store", "branches/notes.json", "pins/.DS_Store", "sinks/.DS_Store", "tmp/mine/notes"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("junk")
    store = open_store()
    assert store.read("counts").num_rows
    store.compact()
    assert not store.status().problems
    assert {Path(error.split(":")[0]).name for error in store.verify().errors} == {".DS_Store"}, "said, and no more"
    assert (root / "tmp/mine/notes").exists()


def test_making_a_store_may_be_interrupted(tmp_path: Path) -> None:
    for name in ("layers", "manifests", "tmp"):
        (tmp_path / "s" / name).mkdir(parents=True)
    (tmp_path / "s" / "tmp" / secrets.token_hex(8)).write_text("half of a mar")
    with nosync.open(tmp_path / "s") as store:
        assert store.last_sealed() is None
    for name in ("tmp/notes", "layers/notes", "other/notes"):
        (tmp_path / name / name).parent.mkdir(parents=True)
        (tmp_path / name / name).write_text("not of a store")
        with pytest.raises(nosync.NotAStoreError, match="is not empty"):
            nosync.open(tmp_path / name)
        assert (tmp_path / name / name).read_text() == "not of a store"


def test_a_new_store_is_made_beside_the_secret_of_a_door(tmp_path: Path) -> None:
    """All hosts are given the same one before there are stores."""
    (tmp_path / "checkpoint-secret").write_text("ab" * 24)
    nosync.open(tmp_path).close()
    assert (tmp_path / "checkpoint-secret").read_text() == "ab" * 24


def test_of_two_that_make_a_store_both_have_the_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Env):
        def link(self, source: Path, target: Path) -> None:
            if not target.exists():
                create_store(tmp_path / "s", 16, Env(), store_id="quicker")
            super().link(source, target)

    assert create_store(tmp_path / "s", 16, Slow()).store_id == "quicker"


def test_paths_as_users_give_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may go to another directory; what another file system or a daemon keeps is not made here by mistake."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with nosync.open("s") as store:
        monkeypatch.chdir("/")
        store.append("counts", t=0, rows=words(a=1), key=["word"])
        store.seal(0)
        store.sync()
    for same in (tmp_path / "s", (tmp_path / "s").as_uri(), f"file:{tmp_path}/s"):
        with nosync.open(same, read_only=True) as store:
            assert store.last_sealed() == 0
    nosync.open("~/mine").close()
    assert (tmp_path / "home" / "mine" / "NOSYNC").exists()
    monkeypatch.chdir(tmp_path)
    for path, message in (
        ("s3a://bucket/state", "is not on this host"), ("dbfs:/state", "is not on this host"),
        ("host.example:7501", r"nosync.connect\('host.example:7501'\)"), (7, "7 is a int, expected the path"),
    ):  # fmt: skip
        for call in (nosync.open, nosync.ParquetSink) if not str(path).startswith("s3a") else (nosync.open,):
            with pytest.raises(nosync.InvalidInputError, match=message):
                call(path)  # type: ignore[arg-type]
    what = "a store is a directory of a file system that this host has or mounts.*daemons keep copies"
    for path in ("s3a://bucket/x", "abfss://c@account.dfs.core.windows.net/x", "gs://b/x", "hdfs://host:8020/x"):
        with pytest.raises(nosync.InvalidInputError, match=f"^{path} is not on this host: {what}") as raised:
            nosync.open(path)
        assert "\n" not in str(raised.value)
    for path in ("s3a://bucket/x", "abfss://c@account.dfs.core.windows.net/x", "hdfs://host:8020/x"):
        with pytest.raises(nosync.InvalidInputError, match="expected s3://BUCKET/PREFIX, gs://BUCKET/PREFIX"):
            nosync.ParquetSink(path)
    with pytest.raises(nosync.InvalidInputError, match="anything else takes a CallbackSink"):
        nosync.ParquetSink("dbfs:/x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "s"]


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", r"the path is empty: give that of a directory; '\.' is"),
        (b"s", "b's' is a bytes, expected the path"),
        ("s\0", "has a character of number 0"),
        (os.fsdecode(b"caf\xe9"), r"'caf\\udce9' is not UTF-8"),
        ("n" * 256, "File name too long; a name has at most 255 bytes and a path 4095"),
        ("deep/" * 820, "File name too long; a name has at most 255 bytes and a path 4095"),
        ("dangling", "dangling is a symlink to nowhere, which does not exist: make that first"),
        ("dangling/s", "dangling is a symlink to nowhere, which does not exist: make that first"),
        ("loop", "its symlinks lead to each other"),
        ("file/s", "file is a file, so .*s cannot be a directory in it"),
        ("~of nobody/s", "give an absolute path"),
    ],
)  # fmt: skip
def test_paths_that_no_directory_can_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, message: str, read_only: bool
) -> None:
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    for call in (lambda: nosync.open(path, read_only=read_only), lambda: nosync.ParquetSink(path)):
        with pytest.raises(nosync.InvalidInputError, match=message):
            call()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["dangling", "file", "loop"]


def test_a_symlink_that_leads_somewhere_is_a_path(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    nosync.open(tmp_path / "link" / "s").close()
    assert (tmp_path / "there" / "s" / "NOSYNC").exists()


def test_the_working_directory_may_be_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(nosync.InvalidInputError, match="give an absolute path"):
        nosync.open("s")


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.EOPNOTSUPP, "with hard links and locks"), (errno.ENOSYS, "with hard links and locks"),
        (errno.EPERM, "must support hard links"), (errno.EMLINK, "a file gets no second name"),
        (errno.EXDEV, "all of a data directory is on one file system"), (errno.ESTALE, "mount it again"),
        (errno.ENAMETOOLONG, "a shorter path"), (errno.ENOSPC, "the disk is full"),
    ],
)  # fmt: skip
def test_a_link_that_is_refused_says_what_to_do(tmp_path: Path, number: int, message: str) -> None:
    """Whoever makes a store, publishes a layer, seals or pins learns what its file system lacks, in that call."""
    env = FaultyEnv()
    env.fail("link", number, times=1)
    with pytest.raises(nosync.StorageError, match=f"{os.strerror(number)}; .*{message}"):
        nosync.open(tmp_path / "s", env=env)
    with nosync.open(tmp_path / "s", env=env, settings=nosync.StoreSettings(background=False)) as store:
        store.append("counts", t=0, rows=words(a=1), key=["word"])
        store.seal(0)
        for call in (
            lambda: store.append("counts", t=1, rows=words(a=2)), lambda: store.seal(1), lambda: store.pin("p", 0)
        ):  # fmt: skip
            env.fail("link", number, times=1)
            with pytest.raises(nosync.StorageError, match=f"cannot .*{os.strerror(number)}; .*{message}"):
                call()
            call()


def test_a_newer_store_format(tmp_path: Path) -> None:
    nosync.open(tmp_path / "s").close()
    marker = tmp_path / "s" / "NOSYNC"
    fields = json.loads(marker.read_text())
    del fields["blake3"]
    marker.write_text(json.dumps(fields | {"nosync_store": 3}))
    with pytest.raises(nosync.FormatVersionError, match="upgrade nosync"):
        nosync.open(tmp_path / "s")
    marker.write_text("{")
    with pytest.raises(nosync.NotAStoreError, match="damaged"):
        nosync.open(tmp_path / "s")


def test_a_second_opener_is_told_who_holds_it(tmp_path: Path) -> None:
    with nosync.open(tmp_path / "s"):
        with pytest.raises(nosync.StoreLockedError, match=f"process {os.getpid()}"):
            nosync.open(tmp_path / "s")
        code = "import sys, nosync\ntry: nosync.open(sys.argv[1])\nexcept nosync.StoreLockedError: sys.exit(7)"
        assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "s")], check=False).returncode == 7
    nosync.open(tmp_path / "s").close()


def test_key_groups_never_change(tmp_path: Path) -> None:
    nosync.open(tmp_path / "s", key_groups=16).close()
    with pytest.raises(nosync.InvalidInputError, match="key_groups=16"):
        nosync.open(tmp_path / "s", key_groups=32)
    nosync.open(tmp_path / "s").close()
    with pytest.raises(nosync.InvalidInputError, match="expected 1 to"):
        nosync.open(tmp_path / "t", key_groups=0)


@pytest.mark.parametrize("retain", [-1, 1.5, "3"])
def test_settings_are_checked(tmp_path: Path, retain: object) -> None:
    with pytest.raises(nosync.InvalidInputError, match="retain"):
        nosync.open(tmp_path / "s", retain=retain)  # type: ignore[arg-type]
