"""A checkpoint that is kept anew under its name, and a query that starts again with other columns."""

from __future__ import annotations

import shutil
from pathlib import Path

import nosync
from nosync.checkpoints.follow import Follower
from nosync.checkpoints.keep import Keep
from nosync.checkpoints.names import Batch
from nosync.lsm.platform.env import Env
from tests.checkpoints.fake_query import FakeQuery


def test_a_view_of_a_batch_is_of_what_is_kept_now(tmp_path: Path) -> None:
    for text in ("one", "another"):
        query = FakeQuery(tmp_path / text, "hdfs")
        query.begin()
        query.states()
        query.write("state/0/0/1.delta", text)
        query.commit()
        shutil.rmtree(tmp_path / "data" / "checkpoints", ignore_errors=True)
        with nosync.checkpoints.watch(query.root, tmp_path / "data", name="q"):
            pass
        view = nosync.checkpoint("q", tmp_path / "data").at(0).path
        assert (view / "state/0/0/1.delta").read_text() == text


def test_schemas_that_come_with_a_restart_are_kept_with_their_batch(tmp_path: Path) -> None:
    query, keep = FakeQuery(tmp_path / "ck", "changelog"), Keep(tmp_path / "data", "q", Env())
    query.run(2)
    follower = Follower(query.root, keep)
    follower.look()
    query.begin()
    query.write("state/0/_metadata/v2/2", (query.root / "state/0/_metadata/metadata").read_bytes())
    query.write("state/0/_stateSchema/default/2_x", "v3 of a schema")
    query.states()
    query.commit()
    follower.look()
    assert {"state/0/_metadata/v2/2", "state/0/_stateSchema/default/2_x"} <= keep.closures.of(Batch(2)).paths
