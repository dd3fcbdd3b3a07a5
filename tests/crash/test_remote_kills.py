"""A few rounds of kill -9 in the middle of copying; see `remote_kills`, which runs more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.remote_kills import run


@pytest.mark.timeout(200)
def test_nothing_that_was_remotely_safe_is_lost(tmp_path: Path) -> None:
    assert run(5, f"file://{tmp_path}/bucket", tmp_path) > 3
