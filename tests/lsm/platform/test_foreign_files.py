"""A data directory that somebody else can write to, or sent: nothing outside of it is touched, nothing hangs, nothing
leaks.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import nosync
from nosync.cli import main
from nosync.lsm.compaction.worker import MergeProcess
from nosync.lsm.errors import CorruptionError, FormatVersionError, NosyncError, NotAStoreError
from nosync.lsm.layers.reader import LayerReader
from nosync.lsm.manifests.branches import MOST_BRANCHES, read_refs
from nosync.lsm.manifests.manifest import MOST_LAYERS, Manifest
from nosync.lsm.platform.env import Env
from nosync.lsm.platform.json_file import seal_json, unseal_json
from nosync.lsm.platform.layout import BRANCHES, VERIFIED
from tests.conftest import OpenStore
from tests.helpers.forging import Fields, forge_body, forge_layer

ROWS = 2000


def filled(open_store: OpenStore, name: str = "store", epochs: int = 2) -> Path:
    with open_store(name) as store:
        for t in range(epochs):
            text = [f"word {i} of {t}" for i in range(ROWS)]
            store.append("words", t=t, rows=pa.table({"k": range(ROWS), "text": text}), key=["k"])
            store.seal(t)
    return store.directory.root


def layer_of(root: Path, t: int = 0) -> Path:
    return sorted((root / "layers").rglob("*.layer"))[t]


def received(root: Path) -> Path:
    """The same store as somebody else's, whom nobody here has reason to trust."""
    target = root.with_name("received")
    shutil.copytree(root, target)
    return target


# --- links and special files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tmp", "layers", "manifests", "pins", "quarantine", "catalog", "ready", "ready/made"])
def test_a_store_whose_own_directory_is_a_link_is_refused(open_store: OpenStore, tmp_path: Path, name: str) -> None:
    root, elsewhere = filled(open_store), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("mine")
    if (root / name).exists():
        shutil.rmtree(root / name)
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).symlink_to(elsewhere, target_is_directory=True)
    for options in ({}, {"read_only": True}):
        with pytest.raises(NotAStoreError, match=r"is a symbolic link.*link to the whole store"):
            nosync.open(root, **options)
    assert [path.name for path in elsewhere.iterdir()] == ["precious"]


def test_a_link_to_the_whole_store_is_its_owners_choice(open_store: OpenStore, tmp_path: Path) -> None:
    root = filled(open_store)
    (tmp_path / "link").symlink_to(root, target_is_directory=True)
    with nosync.open(tmp_path / "link") as store:
        assert store.read("words").num_rows == ROWS
        store.append("words", t=2, rows=pa.table({"k": [1], "text": ["x"]}), key=["k"])
        store.seal(2)
    (tmp_path / "empty").mkdir()
    (tmp_path / "new").symlink_to(tmp_path / "empty", target_is_directory=True)
    nosync.open(tmp_path / "new").close()


def test_files_made_ahead_that_are_links_are_not_written_to(open_store: OpenStore, tmp_path: Path) -> None:
    root = filled(open_store)
    made, target = root / "ready" / "made", tmp_path / "target"
    made.mkdir(parents=True, exist_ok=True)
    target.write_text("")
    for i in range(8):
        (made / f"link{i}").symlink_to(target)
        os.mkfifo(made / f"fifo{i}")
    with open_store() as store:
        store.append("words", t=2, rows=pa.table({"k": [1], "text": ["x"]}), key=["k"])
        store.seal(2)
        assert store.lookup("words", pa.table({"k": [1]})).num_rows == 1
    assert target.read_text() == ""


def special(path: Path, kind: str, tmp_path: Path) -> None:
    """Puts something in a file's place that is none."""
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "zeros without end":
        path.symlink_to("/dev/zero")
    elif kind == "link":
        (tmp_path / "target").write_text("secret")
        path.symlink_to(tmp_path / "target")
    elif kind == "link to nowhere":
        path.symlink_to(tmp_path / "nowhere")
    else:
        with path.open("wb") as file:
            file.truncate(1 << 40)


KINDS = ["fifo", "directory", "zeros without end", "link", "link to nowhere", "far too large"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["layer", "manifest", "pin"])
def test_what_is_no_regular_file_is_named(open_store: OpenStore, tmp_path: Path, kind: str, what: str) -> None:
    """No reader waits, follows a link, or takes memory for it; whoever opens the store is told, or does without it."""
    root = filled(open_store)
    with open_store() as store:
        store.pin("p", 1)
    path = {
        "layer": layer_of(root),
        "manifest": root / "manifests" / "main" / "1.json",
        "pin": next((root / "pins").glob("p-*.json")),
    }[what]
    special(path, kind, tmp_path)
    with nosync.open(root, read_only=True) as store:
        assert any(path.name in error for error in store.verify().errors)
        if what == "layer":
            with pytest.raises(NosyncError):
                store.read("words", as_of=1)
    store = open_store()
    # What is no layer or manifest goes to quarantine, as it is: a link is moved, and not what it points to.
    assert what == "pin" or not os.path.lexists(path)
    assert what != "pin" or any(path.name in problem for problem in store.status().problems.values())
    store.append("other", t=7, rows=pa.table({"n": [1]}), key=[])
    if (tmp_path / "target").exists():
        assert (tmp_path / "target").read_text() == "secret"


# --- forged layers --------------------------------------------------------------------------------------------------


def test_offsets_beyond_the_buffer_are_not_followed(open_store: OpenStore) -> None:
    """Strings whose offsets point behind their characters, under digests that fit: nothing of the process's memory is
    shown.
    """
    root = received(filled(open_store))
    path = layer_of(root, 1)

    def beyond(body: bytearray) -> bytearray:
        # The last offset of the text column: the largest int32 of the ascending run that begins with zero.
        words = np.frombuffer(bytes(body[: len(body) // 4 * 4]), dtype="<i4").copy()
        total = sum(len(f"word {i} of 1") for i in range(ROWS))
        at = np.flatnonzero(words == total)
        assert len(at) >= 1
        words[at] = total + (1 << 20)
        return bytearray(words.tobytes()) + body[len(body) // 4 * 4 :]

    forge_layer(path, beyond)
    with nosync.open(root, read_only=True) as store:
        with pytest.raises(CorruptionError, match="its block 0 has its digest and is none"):
            store.read("words", as_of=1)
        with pytest.raises(CorruptionError):
            store.lookup("words", pa.table({"k": [1]}))
        assert any(path.name in error for error in store.verify().errors)
    with nosync.open(root) as store:  # its node sets it aside
        assert [m.t for m in store.missing()] == [1]


@pytest.mark.parametrize("options", [{"read_only": True}, {}])
def test_a_column_whose_name_is_no_text_is_refused(open_store: OpenStore, options: dict[str, bool]) -> None:
    """Arrow hands out names as they are in the file, and does not look at them before somebody asks."""
    root = received(filled(open_store))
    path = layer_of(root, 1)
    name = nosync.open(root, read_only=True).read("words", as_of=0).schema.names[-1].encode()
    forge_layer(path, lambda body: body.replace(name + b"\0", b"\xfd" * len(name) + b"\0"))
    assert b"\xfd" * len(name) in path.read_bytes()
    with nosync.open(root, **options) as store:
        with pytest.raises(nosync.NosyncError):
            store.read("words", as_of=1)
        if options:
            assert any(path.name in error for error in store.verify().errors)
        else:  # its node set the file aside
            assert [m.t for m in store.missing()] == [1]


def test_a_store_of_ones_own_is_not_looked_at_twice(open_store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    from nosync.lsm.layers import reader as module

    looked: list[int] = []
    checked = module.read_checked
    monkeypatch.setattr(module, "read_checked", lambda *args: looked.append(1) or checked(*args))
    root = filled(open_store)
    assert (root / VERIFIED).exists()
    looked.clear()
    for options in ({}, {"read_only": True}):
        with nosync.open(root, **options) as store:
            store.read("words")
    assert looked == []
    with nosync.open(received(root), read_only=True) as store:
        store.read("words")
    assert looked != []


def test_a_received_store_becomes_ones_own(open_store: OpenStore) -> None:
    """Its node looks at everything once; what VERIFIED said elsewhere counts for nothing here."""
    root = received(filled(open_store))
    assert not nosync.open(root, read_only=True).directory.is_validated
    forge_layer(layer_of(root), fields=lambda said: said.update(tombstones=said["rows"]))
    with nosync.open(root) as store:
        assert store.directory.is_validated
    assert nosync.open(root, read_only=True).directory.is_validated


def swap_hashes(fields: Fields) -> None:
    fields["blocks"][0][2], fields["blocks"][0][3] = fields["blocks"][0][3], fields["blocks"][0][2]


@pytest.mark.parametrize(
    "change",
    [
        lambda f: f.update(rows=f["rows"] - 1),
        lambda f: f.update(rows="many"),
        lambda f: f.update(key=["no_such_column"]),
        lambda f: f.update(key=["k", "k"]),
        lambda f: f.update(key=[[]]),
        lambda f: f.update(key_groups=0),
        lambda f: f.update(key_groups=1 << 62),
        lambda f: f.update(times=[]),
        lambda f: f.update(times=[1 << 62]),
        lambda f: f.update(times=[-1]),
        lambda f: f.update(blocks=[]),
        lambda f: f.update(blocks={}),
        lambda f: f.update(lower=2, upper=1),
        lambda f: f.update(lower=None),
        lambda f: f.update(added={"no_such_column": 1}),
        lambda f: f.update(added=3),
        lambda f: f.pop("stage"),
        lambda f: f.update(kind="opaque"),
        lambda f: f["blocks"][0].__setitem__(0, 1 << 60),
        lambda f: f["blocks"][0].__setitem__(1, 1 << 60),
        lambda f: f["blocks"][0].pop(),
        swap_hashes,
    ],
)
def test_descriptions_that_contradict_their_layers(open_store: OpenStore, change: object) -> None:
    root = received(filled(open_store))
    path = layer_of(root, 1)
    forge_layer(path, fields=change)  # type: ignore[arg-type]
    with pytest.raises((CorruptionError, FormatVersionError), match=path.name):
        LayerReader.open(path, Env()).verify()
    with nosync.open(root, read_only=True) as store:
        assert any(path.name in error for error in store.verify().errors)
        assert store.verify().layers == 1, "the others are verified all the same"


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_compressed_batches_are_refused_before_they_are_unpacked(
    open_store: OpenStore, compression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """63 KB may stand for 1.6 GB."""
    with open_store() as store:
        store.append("log", t=0, rows=pa.table({"n": pa.array([0] * 100_000, pa.int64())}), key=[])
        store.seal(0)
    path = layer_of(store.directory.root)
    forge_body(path, pa.table({"n": pa.array([0] * 100_000, pa.int64())}), compression=compression)
    assert path.stat().st_size < 30_000
    root = received(store.directory.root)

    def unpacked(*_: object) -> None:
        raise AssertionError("it was unpacked")

    monkeypatch.setattr(pa.ipc, "read_record_batch", unpacked)
    with nosync.open(root, read_only=True) as store, pytest.raises(CorruptionError, match="it is compressed"):
        store.read("log")


# --- small files ----------------------------------------------------------------------------------------------------


def test_a_manifest_of_more_layers_than_any_epoch_has() -> None:
    layer = {
        "stage": "s", "fingerprint": "f", "shard": "0of1", "lower": 0, "upper": 1 << 20, "digest": "0" * 64, "rows": 0,
        "origin": 0,
    }  # fmt: skip
    text = seal_json({"line": "main", "t": 0, "layers": [layer] * (MOST_LAYERS + 1), "meta": {}})
    with pytest.raises(CorruptionError, match="expected at most"):
        Manifest.from_json(text, "0.json")


def chained(root: Path, count: int) -> None:
    (root / BRANCHES).mkdir(exist_ok=True)
    for i in range(1, count + 1):
        entry = {
            "do": "create", "name": f"b{i}", "line": f"l{i}", "parent": "main" if i == 1 else f"l{i - 1}", "at": 0,
            "changed": [], "own_states": True, "anew": [],
        }  # fmt: skip
        (root / BRANCHES / f"{i}.json").write_bytes(seal_json(entry))


def test_as_many_branches_as_a_store_may_have_and_no_more(open_store: OpenStore) -> None:
    root = filled(open_store)
    chained(root, MOST_BRANCHES + 10)
    refs = read_refs(root, Env())
    assert (len(refs.names), len(refs.later)) == (MOST_BRANCHES, 11)
    with pytest.raises(CorruptionError, match="cannot follow the entries before it"):
        open_store()


def test_an_entry_that_this_version_does_not_know_is_not_passed_over(open_store: OpenStore) -> None:
    root = filled(open_store)
    (root / BRANCHES).mkdir(exist_ok=True)
    (root / BRANCHES / "1.json").write_bytes(seal_json({"do": "squash", "name": "b", "line": "l", "at": 0}))
    with pytest.raises(CorruptionError, match="cannot follow"):
        open_store()


@pytest.mark.parametrize("policy", ["archive", "", 7, ["drop"], None])
def test_an_unknown_policy_keeps_inputs(open_store: OpenStore, policy: object) -> None:
    """A newer version, or a stranger, may say what this one does not know: nothing is deleted for it."""
    root = filled(open_store, epochs=3)
    for path in (root / "manifests" / "main").glob("*.json"):
        fields, _ = unseal_json(path.read_bytes(), str(path))
        fields["meta"] = {"at_safe_point": {"words": policy}}
        path.write_bytes(seal_json(fields))
    layers = sorted((root / "layers").rglob("*.layer"))
    with open_store() as store:
        store.sync()
        assert store.safe_point() == 2
        store.node.release_inputs()
        store.node.collect_garbage()
        problems = [text for text in store.status().problems.values() if "at_safe_point" in text]
        assert len(problems) == 1
        assert "Upgrade nosync" in problems[0]
        assert store.missing() == []
    assert sorted((root / "layers").rglob("*.layer")) == layers
    assert sorted(path for path in (root / "quarantine").iterdir() if "words" in path.name) == []


DAMAGE = [
    b"", b"{", b"null", b"[]", b"{}", b"7", b'"x"', b"[" * 5000, b'{"a":' * 5000, b"\xff\xfe", b"\x00" * 100,
    b'{"body": 1, "blake3": 2, "nosync": 1}', b'{"body": {}, "blake3": [], "nosync": "\xc2\xb2"}',
    b'{"body": {"x": 1e999}, "blake3": "", "nosync": 1}', b"9" * 5000,
]  # fmt: skip


@pytest.mark.parametrize("text", DAMAGE)
def test_every_small_file_with_any_text(open_store: OpenStore, text: bytes) -> None:
    """One guard for all parsers: `verify` names each file, and goes on."""
    root = filled(open_store)
    with open_store() as store:
        store.pin("p", 1)
        store.node.create_branch("b", "main", 1)
    bad = [
        root / "manifests" / "main" / "1.json",
        root / "branches" / "1.json",
        next((root / "pins").glob("p-*.json")),
        layer_of(root),
    ]
    for path in bad:
        path.unlink()
        path.write_bytes(text)
    with nosync.open(root, read_only=True) as store:
        errors = store.verify().errors
        for path in bad:
            assert any(path.name in error for error in errors), (path, errors)


@pytest.mark.parametrize("text", DAMAGE)
def test_a_marker_with_any_text(open_store: OpenStore, text: bytes) -> None:
    root = filled(open_store)
    (root / "NOSYNC").unlink()
    (root / "NOSYNC").write_bytes(text)
    with pytest.raises(NosyncError):
        nosync.open(root)


def test_the_catalog_of_somebody_else_is_left_alone(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = received(filled(open_store))

    def opened(*_: object, **__: object) -> None:
        raise AssertionError("RocksDB read files of somebody else")

    monkeypatch.setattr("nosync.lsm.manifests.catalog.Rdict", opened)
    with nosync.open(root, read_only=True) as store:
        assert store.verify(untrusted=True).errors == ()
    main(["verify", str(root), "--untrusted", "--json"])
    assert json.loads(capsys.readouterr().out)["errors"] == []


def test_names_with_digits_of_other_scripts(open_store: OpenStore) -> None:
    """`isdigit` takes superscripts, and `int` does not."""
    root = filled(open_store)
    for directory in ("manifests/main", "branches", "jobs/main", "sinks/words/main"):
        (root / directory).mkdir(parents=True, exist_ok=True)
        for name in ("\u00b2.json", "\u00b2-abc.json", "\u0661.json", "\u00b2-\u00b2.json"):
            (root / directory / name).write_text("{}")
    with open_store() as store:
        assert store.read("words").num_rows == ROWS
        store.verify()


# --- code of others ---------------------------------------------------------------------------------------------------


def test_the_process_that_merges_runs_no_code_of_the_current_directory(
    open_store: OpenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    for name in ("nosync.py", "json.py", "pyarrow.py", "numpy.py"):
        (here / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    monkeypatch.chdir(here)
    settings = nosync.StoreSettings(background=False, merge_process_rows=0)
    with MergeProcess() as process, open_store(settings=settings) as store:
        for t in range(6):
            store.append("words", t=t, rows=pa.table({"k": range(9), "v": [t] * 9}), key=["k"])
            store.seal(t)
        assert store.compact() > 0
        del process
    assert not (tmp_path / "ran").exists()


def test_commands_run_no_code_of_the_current_directory(open_store: OpenStore, tmp_path: Path) -> None:
    root, here = filled(open_store, epochs=6), tmp_path / "here"
    here.mkdir()
    (here / "nosync.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    command = Path(sys.executable).with_name("nosync")
    began = time.monotonic()
    done = subprocess.run(
        [command, "compact", root, "--json"], cwd=here, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, (done.stderr, time.monotonic() - began)
    json.loads(done.stdout)
    assert not (tmp_path / "ran").exists()
