"""A receiver, and files that it is sent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import nosync
from nosync.replication.protocol.file_names import FileName, FileVersion
from nosync.replication.transport.codec import CHUNK_BYTES
from tests.helpers.receiver import Receiver


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[Receiver]:
    found = Receiver(tmp_path / "n1")
    yield found
    found.node.announcer.listen(None)
    found.node.abandon()


@pytest.fixture
def theirs(tmp_path: Path) -> tuple[FileVersion, Path]:
    """A layer on n2."""
    with nosync.open(tmp_path / "n2") as store:
        store.append("s", t=0, rows=pa.table({"k": list(range(100)), "v": list(range(100))}), key=["k"])
        layer = store.layers()[0]
    path = Path(layer.path)
    return FileVersion(FileName(str(path.relative_to(tmp_path / "n2"))), layer.digest, path.stat().st_size), path


@pytest.fixture
def large(tmp_path: Path) -> tuple[FileVersion, Path]:
    """A layer of several pieces on n2."""
    values = np.random.default_rng(0).integers(0, 1 << 62, 250_000)
    with nosync.open(tmp_path / "n2") as store:
        store.append("s", t=0, rows=pa.table({"k": np.arange(len(values)), "v": values}), key=["k"])
        layer = store.layers()[0]
    path = Path(layer.path)
    assert path.stat().st_size > 3 * CHUNK_BYTES
    return FileVersion(FileName(str(path.relative_to(tmp_path / "n2"))), layer.digest, path.stat().st_size), path
