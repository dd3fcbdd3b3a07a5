"""A bucket of each kind, empty."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nosync.replication.remote.bucket import Bucket
from nosync.replication.remote.cloud import open_bucket
from nosync.testing.simulated_bucket import SimulatedBucket
from tests.helpers.s3 import moto


@pytest.fixture(scope="package")
def s3() -> Iterator[str]:
    """The URL of an S3 bucket on loopback, which all tests here share: each takes a prefix of its own."""
    with pytest.MonkeyPatch.context() as patch, moto(patch) as url:
        yield url


@pytest.fixture(params=["s3", "file", "memory", "simulated"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path) -> Bucket:
    name = tmp_path.name
    if request.param == "simulated":
        return SimulatedBucket()
    if request.param == "s3":
        return open_bucket(f"{request.getfixturevalue('s3')}/{name}")
    return open_bucket(f"file://{tmp_path}/bucket" if request.param == "file" else f"memory://{name}")
