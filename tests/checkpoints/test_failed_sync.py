"""A disk that could not write back: the system says so once, and a second fsync of the same file succeeds."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from nosync.checkpoints.follow import Follower
from nosync.checkpoints.keep import Keep
from nosync.lsm.errors import StorageError
from nosync.lsm.platform.env import Env
from tests.checkpoints.fake_query import FakeQuery


class FailsOnce(Env):
    failed: Path | None = None

    def sync_file(self, path: Path) -> None:
        if self.failed is None and path.name == "2.delta":
            self.failed = path
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().sync_file(path)


def test_what_may_not_be_on_the_disk_is_written_again(tmp_path: Path) -> None:
    query, env = FakeQuery(tmp_path / "ck", "hdfs"), FailsOnce()
    query.run(3)
    keep = Keep(tmp_path / "data", "q", env)
    follower = Follower(query.root, keep, list_every_s=0.0)
    with pytest.raises(StorageError, match="cannot sync"):
        follower.look()
    assert env.failed is not None
    before = env.failed.stat()
    follower.look()
    after = env.failed.stat()
    assert after.st_ino != before.st_ino, "its bytes are in another inode, which was synced"
    assert after.st_mtime_ns == before.st_mtime_ns
    assert env.failed.read_bytes() == (query.root / env.failed.relative_to(keep.root)).read_bytes()
    assert keep.safe() == 2
