"""What tests of jobs share."""

from __future__ import annotations

import pytest

import nosync
from tests.conftest import OpenStore


@pytest.fixture
def store(open_store: OpenStore) -> nosync.Store:
    return open_store()
