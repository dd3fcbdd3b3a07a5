"""The times of epochs as files: equal on every node, and few however many epochs there are."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path, PurePosixPath

import pytest

from nosync.lsm.errors import CorruptionError
from nosync.lsm.facts.or_set import register_files
from nosync.lsm.facts.seal_times import SealTime, SealTimes, replaced_times
from nosync.lsm.manifests.branches import Refs
from nosync.lsm.model.timestamp import Epoch
from nosync.lsm.node.metadata_checks import check_contents
from nosync.lsm.platform.env import Env
from nosync.lsm.platform.json_file import seal_json
from tests.helpers.clocks import NOON_US, Clock


def recorded(root: Path, *at_us: int, timeline: str = "main") -> SealTimes:
    for t, us in enumerate(at_us):
        SealTimes(root, Clock(us)).record(timeline, t)
    return SealTimes(root, Env())


def removed(root: Path, refs: Refs | None = None) -> list[str]:
    gone = replaced_times(register_files(root, Env()), refs or Refs())
    for path in gone:
        (root / path).unlink()
    return sorted(map(str, gone))


def test_what_was_recorded_is_read_with_its_event_time(tmp_path: Path) -> None:
    times = SealTimes(tmp_path, Clock())
    path = times.record("main", 3, (-5, 7))
    times.record("main", 4)
    assert times.of_timeline("main") == {3: SealTime(NOON_US, -5, 7), 4: SealTime(NOON_US)}
    assert times.of_epoch("main", 3) == SealTime(NOON_US, -5, 7)
    assert times.of_epoch("main", 5) is None
    assert times.of_timeline("other") == {}
    check_contents(path, (tmp_path / path).read_bytes())


def test_the_earliest_counts_in_whatever_order_files_come(tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.mkdir()
    files = [SealTimes(made, Clock(us)).record("main", 0) for us in (30, 10, 20)]
    for n, order in enumerate(itertools.permutations(files)):
        node = tmp_path / str(n)
        seen = []
        for path in order:
            (node / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(made / path, node / path)
            seen.append(SealTimes(node, Env()).of_timeline("main")[Epoch(0)].sealed_us)
        assert seen[-1] == 10
        assert seen == sorted(seen, reverse=True)


def test_epochs_that_follow_each_other_are_written_together(tmp_path: Path) -> None:
    times = SealTimes(tmp_path, clock := Clock(), group=10)
    for t in (7, 8, 9, 10, 12):
        clock.now_us = t
        times.note("main", t)
    times.note("other", 8)
    before = times.of_timeline("main")
    made = times.write()
    assert sorted("-".join(path.name.split("-")[:-1]) for path in made) == ["10", "12", "7-9", "8"]
    assert times.write() == []
    again = SealTimes(tmp_path, Env(), group=10)
    assert again.of_timeline("main") == times.of_timeline("main") == before
    assert again.of_epoch("main", 8) == times.of_epoch("main", 8) == SealTime(8)
    assert removed(tmp_path) == [], "such a file stands for no other one"
    times.record("main", 8)
    assert removed(tmp_path) == []
    for path in made:
        check_contents(path, (tmp_path / path).read_bytes())
    (rolled,) = again.roll_up("main", 10, 9)
    assert rolled.name.startswith("0-9-")
    assert len(removed(tmp_path)) == 2
    assert again.of_timeline("main") == before


def test_many_old_epochs_share_a_file_that_says_the_same(tmp_path: Path) -> None:
    times = recorded(tmp_path, *range(100, 125))
    before = times.of_timeline("main")
    made = times.roll_up("main", 10, 19)
    assert [path.name.split("-")[:2] for path in made] == [["0", "9"], ["10", "19"]]
    assert times.of_timeline("main") == before
    assert len(removed(tmp_path)) == 20
    assert times.of_timeline("main") == SealTimes(tmp_path, Env()).of_timeline("main") == before
    assert len(list((tmp_path / "times" / "main").iterdir())) == 2 + 5
    assert times.of_epoch("main", 12) == before[Epoch(12)]
    assert removed(tmp_path) == []
    assert times.roll_up("main", 10, 19) == []
    for path in made:
        check_contents(path, (tmp_path / path).read_bytes())


def test_nodes_with_the_same_times_make_the_same_file(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    recorded(tmp_path / "a", *range(10))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    names = [SealTimes(tmp_path / node, Env()).roll_up("main", 10, 9) for node in ("a", "b")]
    assert names[0] == names[1]
    assert (tmp_path / "a" / names[0][0]).read_bytes() == (tmp_path / "b" / names[0][0]).read_bytes()


def test_a_time_that_comes_late_is_replaced_on_every_node(tmp_path: Path) -> None:
    times = recorded(tmp_path, *range(100, 110))
    times.roll_up("main", 10, 9)
    removed(tmp_path)
    late = SealTimes(tmp_path, Clock(50)).record("main", 4)
    assert removed(tmp_path) == [str(late)]
    assert times.of_timeline("main")[Epoch(4)].sealed_us == 104


def test_a_file_of_several_epochs_that_reaches_beyond_a_group_stays(tmp_path: Path) -> None:
    """Groups are smaller than when it was written. It was rolled up to a file that said nothing, and that no node took."""
    times = SealTimes(tmp_path, Clock(), group=100)
    for t in range(6):
        times.note("main", t)
    (several,) = times.write()
    before = times.of_timeline("main")
    assert len(before) == 6
    nothing = tmp_path / several.parent / "0-1-00112233aabbccdd.json"
    nothing.write_bytes(seal_json({"line": "main", "epochs": []}))  # as earlier versions could leave it
    times.record("main", 6)
    times.record("main", 7)
    (made,) = SealTimes(tmp_path, Clock(), group=2).roll_up("main", 2, 7)
    check_contents(made, (tmp_path / made).read_bytes())
    assert not nothing.exists()
    singles = {str(path) for path in register_files(tmp_path, Env())} - {str(several), str(made)}
    assert removed(tmp_path) == sorted(singles)
    assert SealTimes(tmp_path, Env()).of_timeline("main").keys() == {*before, 6, 7}


def test_files_of_which_none_can_be_read_are_not_replaced(tmp_path: Path) -> None:
    times = recorded(tmp_path, 1, 2)
    for path in (tmp_path / "times/main").iterdir():
        path.write_text("{")
    assert times.roll_up("main", 2, 1) == []


def test_times_of_what_no_branch_needs_go(tmp_path: Path) -> None:
    recorded(tmp_path, *range(6))
    recorded(tmp_path, 1, 2, timeline="dropped-1")
    recorded(tmp_path, 1, timeline="unknown-yet")
    made = {"do": "create", "name": "dropped", "line": "dropped-1", "parent": "main", "at": 0, "changed": []}
    rewound = {"do": "rewind", "name": "r", "line": "rewind-3", "parent": "main", "at": 3, "keep_as": None}
    refs = Refs().after(made).after({"do": "delete", "name": "dropped"}).after(rewound)
    gone = removed(tmp_path, refs)
    assert [path.rpartition("-")[0] for path in gone] == [
        "times/dropped-1/0", "times/dropped-1/1", "times/main/4", "times/main/5",
    ]  # fmt: skip


def test_a_damaged_file_is_named_and_costs_no_more_than_its_epoch(tmp_path: Path) -> None:
    times = recorded(tmp_path, *range(10))
    bad = next((tmp_path / "times" / "main").glob("4-*"))
    bad.write_bytes(bad.read_bytes()[:-3])
    with pytest.raises(CorruptionError, match=bad.name):
        times.of_timeline("main")
    assert times.of_epoch("main", 5) is not None
    times.roll_up("main", 10, 9)
    removed(tmp_path)
    assert sorted(times.of_timeline("main")) == [0, 1, 2, 3, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("name", ["times/main/5-00.json", "times/other/1-00.json", "times/main/2-3-00.json"])
def test_a_file_is_of_the_epochs_that_its_name_says(tmp_path: Path, name: str) -> None:
    path = SealTimes(tmp_path, Clock()).record("main", 1)
    with pytest.raises(CorruptionError, match="its name says"):
        check_contents(PurePosixPath(name), (tmp_path / path).read_bytes())


def test_a_time_that_no_calendar_has_is_of_no_store(tmp_path: Path) -> None:
    times = SealTimes(tmp_path, Clock())
    times.note("main", 1, at_us=1 << 60)
    (path,) = times.write()
    with pytest.raises(CorruptionError, match="in no calendar"):
        check_contents(path, (tmp_path / path).read_bytes())


def test_what_was_read_of_files_that_are_gone_is_forgotten(tmp_path: Path) -> None:
    times = recorded(tmp_path, *range(20))
    before = times.of_timeline("main")
    times.roll_up("main", 10, 19)
    removed(tmp_path)
    assert times.of_timeline("main") == before
    assert max(times.of_timeline("main")) == 19
    assert len(times._read) == 2
