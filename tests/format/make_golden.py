"""Writes the golden store and its fingerprints. Run once for each version whose stores must stay readable: never again.

python -m tests.format.make_golden tests/format/golden v0.1
"""

from __future__ import annotations

import json
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

from blake3 import blake3

import nosync
from tests.format.golden_flow import EPOCHS, inputs, make_flow, triple
from tests.helpers.runner import StoreRunner


def state_of(runner: StoreRunner, t: int) -> dict[str, str]:
    """What each recorded stage holds as of an epoch: how many rows, and a digest of them as sorted text."""
    found = {}
    for name in runner.spans:
        rows = runner.read(name, t).to_pylist()
        text = "\n".join(sorted(json.dumps(row, default=str, sort_keys=True) for row in rows))
        found[name] = f"{len(rows)} rows {blake3(text.encode()).hexdigest(length=8)}"
    return found


def write(target: Path, version: str) -> None:
    """A store of every operator with a branch, a rewind, pins, an archive and merged layers."""
    with tempfile.TemporaryDirectory() as root:
        path = Path(root) / "store"
        settings = nosync.StoreSettings(background=False, grace_s=0.0, archive_epochs=3)
        with nosync.open(path, settings=settings) as store:
            runner = StoreRunner(make_flow(), store, seed=7)
            for t in range(EPOCHS):
                runner.advance(t, inputs(t))
                store.sync()
            store.pin("before", 2)
            changed = make_flow().changed({"doubled": triple}, lambda flow: None, [])
            branch = runner.make_branch("tripled", 4, changed, ["doubled"])
            for t in range(5, EPOCHS):
                branch.replay(t)
            store.sync()
            for _ in range(3):
                store.node.merge_once()
            store.node.archive_manifests()
            store.node.collect_garbage()
            runner._begin_spans(EPOCHS)
            branch._begin_spans(EPOCHS)
            found = {
                "fingerprints": {name: stage.fingerprint for name, stage in runner.flow.stages.items()},
                "of the branch": {name: stage.fingerprint for name, stage in branch.flow.stages.items()},
                "main": [state_of(runner, t) for t in range(EPOCHS)],
                "tripled": [state_of(branch, t) for t in range(EPOCHS)],
                "digests": {str(e.id.path): e.digest[:16] for m in store.node.manifests().values() for e in m.entries},
            }
        for name in ("catalog", "ready", "tmp", "LOCK", "VERIFIED"):
            remove(path / name)
        with tarfile.open(target / f"{version}-store.tar.xz", "w:xz") as archive:
            archive.add(path, "store")
        (target / f"{version}-store.json").write_text(json.dumps(found, indent=0, sort_keys=True) + "\n")


def remove(path: Path) -> None:
    """A file or a directory, where there is one."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2])
