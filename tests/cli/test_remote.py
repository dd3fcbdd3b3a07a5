"""What commands say and do of copies in an object store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import nosync
from nosync.cli import main
from tests.helpers.remotes import epochs


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
