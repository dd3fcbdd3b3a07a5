"""As of a time: the last epoch that was sealed by then, whatever clocks, rewinds, branches and versions did."""

from __future__ import annotations

import os
import shutil
from datetime import UTC, date, datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nosync
from nosync.lsm.errors import InvalidInputError, NotAvailableError
from nosync.lsm.model.as_of import shown_time
from tests.helpers.clocks import NOON_US, SECOND_US, Clock
from tests.helpers.depth import examples
from tests.helpers.stores import words

HOUR_US = 3600 * SECOND_US


def opened(root: Path, clock: Clock, **options: object) -> nosync.Store:
    return nosync.open(root, env=clock, settings=nosync.StoreSettings(background=False, **options))  # type: ignore[arg-type]


def sealed(store: nosync.Store, clock: Clock, *at_us: int, is_synced: bool = True) -> None:
    """Seals epochs at these times, each with a word for its number. `is_synced`: the node comes by after each."""
    for us in at_us:
        last = store.last_sealed()
        t, clock.now_us = 0 if last is None else last + 1, us
        store.append("counts", t=t, rows=words(**{f"w{t}": t}), key=["word"])
        store.seal(t)
        if is_synced:
            store.sync()


def hourly(root: Path, epochs: int = 4, **options: object) -> tuple[nosync.Store, Clock]:
    clock = Clock()
    store = opened(root, clock, **options)
    sealed(store, clock, *(NOON_US + n * HOUR_US for n in range(epochs)))
    return store, clock


def test_everything_that_reads_takes_a_time(tmp_path: Path) -> None:
    store, _ = hourly(tmp_path / "s")
    with store:
        at = "2026-07-04T13:30"
        assert store.epoch_as_of(at) == 1
        assert store.read("counts", at).equals(store.read("counts", 1))
        assert store.read("counts", datetime(2026, 7, 4, 13, 30, tzinfo=UTC)).num_rows == 2
        assert store.read("counts", date(2026, 7, 5)).num_rows == 4
        keys = words(w0=0, w2=0).select(["word"])
        assert store.lookup("counts", keys, at).num_rows == 1
        assert store.schema("counts", at) == store.schema("counts", 1)
        assert store.key("counts", at) == ("word",)
        assert store.changes("counts", at, "2026-07-04T14:00").equals(store.changes("counts", 1, 2))
        assert store.changes("counts", "2020-01-01", at).equals(store.changes("counts", -1, 1))
        assert store.changes("counts", -1, at).equals(store.changes("counts", -1, 1))
        assert store.diff("counts", "main", "main", at).num_rows == 0
        with nosync.open(tmp_path / "s", read_only=True) as reader:
            assert reader.epoch_as_of(at) == 1
            assert reader.sealed_at(2) == datetime(2026, 7, 4, 14, tzinfo=UTC) == store.sealed_at(2)
            assert reader.sealed_at(9) is None


def test_the_edges_are_exact_and_before_the_first_is_an_error(tmp_path: Path) -> None:
    store, _ = hourly(tmp_path / "s")
    with store:
        assert store.epoch_as_of(shown_time(NOON_US)) == 0
        assert store.epoch_as_of(shown_time(NOON_US + HOUR_US - 1)) == 0
        assert store.epoch_as_of(shown_time(NOON_US + HOUR_US)) == 1
        assert store.epoch_as_of("2100-01-01") == 3
        with pytest.raises(
            NotAvailableError, match=r"no epoch as of .*: its first is epoch 0, sealed at 2026-07-04T12:00:00Z"
        ):
            store.read("counts", shown_time(NOON_US - 1))
        with pytest.raises(InvalidInputError, match="neither the number of an epoch nor a time"):
            store.read("counts", "last week")
        with pytest.raises(InvalidInputError, match="the first timestamp must not be after the second"):
            store.changes("counts", "2026-07-04T14:00", "2026-07-04T12:00")


def test_a_store_without_epochs_says_so(tmp_path: Path) -> None:
    with opened(tmp_path / "s", Clock()) as store, pytest.raises(NotAvailableError, match="no epoch is sealed yet"):
        store.read("counts", "2026-07-04")


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.integers(-1, 22))
def test_clocks_that_jump_against_an_oracle(
    tmp_path_factory: pytest.TempPathFactory, at: list[int], asked: int
) -> None:
    """An epoch counts as sealed at the largest time of all up to it; the last of those that are not later is it."""
    clock = Clock()
    with opened(tmp_path_factory.mktemp("s") / "s", clock) as store:
        sealed(store, clock, *at)
        expected = max((t for t in range(len(at)) if max(at[: t + 1]) <= asked), default=None)
        if expected is None:
            with pytest.raises(NotAvailableError):
                store.epoch_as_of(shown_time(asked))
        else:
            assert store.epoch_as_of(shown_time(asked)) == expected


def test_sealing_again_keeps_the_time(tmp_path: Path) -> None:
    store, clock = hourly(tmp_path / "s", 2)
    with store:
        clock.now_us += 100 * HOUR_US
        store.seal(1)
        assert store.sealed_at(1) == datetime(2026, 7, 4, 13, tzinfo=UTC)
        assert len(list((tmp_path / "s" / "times" / "main").iterdir())) == 2


def test_manifests_are_equal_whatever_the_clock_says(tmp_path: Path) -> None:
    bytes_of = []
    for name, start_us in (("a", NOON_US), ("b", 0)):
        clock = Clock()
        with opened(tmp_path / name, clock) as store:
            sealed(store, clock, start_us, start_us + 1)
        bytes_of.append([(tmp_path / name / "manifests" / "main" / f"{t}.json").read_bytes() for t in (0, 1)])
    assert bytes_of[0] == bytes_of[1]


def test_a_rewind_goes_on_with_its_own_times_and_keeps_the_others(tmp_path: Path) -> None:
    store, clock = hourly(tmp_path / "s")
    with store:
        store.rewind(1, keep_as="before")
        assert store.epoch_as_of("2026-07-04T15:00") == 1
        assert store.epoch_as_of("2026-07-04T15:00", "before") == 3
        sealed(store, clock, NOON_US + 10 * HOUR_US)
        assert store.epoch_as_of("2026-07-04T15:00") == 1
        assert store.epoch_as_of("2026-07-05") == 2
        assert store.sealed_at(2) == datetime(2026, 7, 4, 22, tzinfo=UTC)
        assert store.sealed_at(2, "before") == datetime(2026, 7, 4, 14, tzinfo=UTC)
        assert [*store.epoch_times()] == [0, 1, 2]
        assert [*store.epoch_times("before")] == [0, 1, 2, 3]
        store.delete_branch("before")
        store.sync()
        assert [*store.epoch_times()] == [0, 1, 2]
        left = sorted(path.name.partition("-")[0] for path in (tmp_path / "s" / "times" / "main").iterdir())
        assert left == ["0", "1"]


def test_a_store_of_an_earlier_version_says_from_when_on_times_are_known(tmp_path: Path) -> None:
    store, clock = hourly(tmp_path / "s", 3)
    store.close()
    shutil.rmtree(tmp_path / "s" / "times")
    clock = Clock(NOON_US + 10 * HOUR_US)
    with opened(tmp_path / "s", clock) as store:
        with pytest.raises(NotAvailableError, match="it is not known when its epochs 0 to 2 were sealed"):
            store.epoch_as_of("2026-07-04T13:00")
        with pytest.raises(NotAvailableError, match="it is not known when"):
            store.changes("counts", "2020-01-01", 2)
        assert store.sealed_at(1) is None
        assert store.status().sealed_at is not None  # of its file, as before
        sealed(store, clock, NOON_US + 10 * HOUR_US)
        assert store.epoch_as_of("2026-07-04T22:00") == 3
        with pytest.raises(
            NotAvailableError, match=r"known from epoch 3, sealed at 2026-07-04T22:00:00Z, on, and epochs 0 to 2"
        ):
            store.epoch_as_of("2026-07-04T21:59")


def test_archives_keep_the_times_and_few_files(tmp_path: Path) -> None:
    store, _ = hourly(tmp_path / "s", 35, archive_epochs=10)
    with store:
        before = store.epoch_times()
        for _ in range(3):
            store.sync()
            store.node.archive_manifests()  # type: ignore[attr-defined]
        store.sync()
        files = [path.name for path in (tmp_path / "s" / "times" / "main").iterdir()]
        assert len(files) == 2 + 15, files
        assert store.epoch_times() == before
        assert store.epoch_as_of(shown_time(NOON_US + 7 * HOUR_US)) == 7
        assert store.verify().ok
    with opened(tmp_path / "s", Clock()) as store:
        assert store.epoch_times() == before


def test_status_says_when_and_a_damaged_time_is_in_nobodys_way(tmp_path: Path) -> None:
    store, clock = hourly(tmp_path / "s", 3)
    with store:
        store.sync()
        status = store.status()
        assert status.sealed_at == "2026-07-04T14:00:00+00:00" == status.safe_point_sealed_at
        assert status.branches_sealed_at == {"main": "2026-07-04T14:00:00+00:00"}
        bad = next((tmp_path / "s" / "times" / "main").glob("2-*"))
        bad.write_bytes(b"{}")
        sealed(store, clock, NOON_US + 3 * HOUR_US)
        assert store.read("counts").num_rows == 4
        assert any(bad.name in error for error in store.verify().errors)
    with nosync.open(tmp_path / "s", read_only=True) as reader:
        assert reader.status().last_sealed == 3
        with pytest.raises(nosync.CorruptionError, match=bad.name):
            reader.read("counts", "2026-07-04T14:00")


@pytest.mark.parametrize("how", ["torn", "removed"])
def test_a_time_that_is_lost_is_that_of_the_manifest_and_never_another_epoch(tmp_path: Path, how: str) -> None:
    root = tmp_path / "s"
    store, clock = hourly(root, 6)
    store.close()
    bad = next((root / "times" / "main").glob("3-*"))
    bad.write_bytes(b"") if how == "torn" else bad.unlink()
    at_s = (NOON_US + 3 * HOUR_US) // SECOND_US
    if how == "removed":
        with nosync.open(root, read_only=True) as reader:
            assert reader.epoch_as_of("2026-07-04T13:30") == 1
            assert reader.epoch_as_of("2026-07-04T17:30") == 5
            with pytest.raises(
                NotAvailableError, match="that is epoch 2 or a later one, for the time of epoch 3 is lost"
            ):
                reader.epoch_as_of("2026-07-04T15:30")
    for at in (at_s, at_s + 9 * 3600):  # and in a copy of the store
        os.utime(root / "manifests" / "main" / "3.json", (at, at))
        with opened(root, clock) as store:
            assert store.epoch_as_of("2026-07-04T14:30") == 2
            assert store.epoch_as_of("2026-07-04T16:30") == 4
            store.sync()
            assert store.verify().ok
        next((root / "times" / "main").glob("3-*")).unlink()


# --- what is not written yet ------------------------------------------------------------------------------------------


def times_files(root: Path) -> list[str]:
    directory = root / "times" / "main"
    return sorted(path.name.rpartition("-")[0] for path in directory.iterdir()) if directory.exists() else []


def test_who_sealed_knows_before_it_is_written_and_others_after(tmp_path: Path) -> None:
    root, clock = tmp_path / "s", Clock()
    with opened(root, clock) as store, nosync.open(root, read_only=True) as reader:
        sealed(store, clock, *(NOON_US + n * HOUR_US for n in range(3)), is_synced=False)
        assert times_files(root) == []
        assert store.epoch_as_of("2026-07-04T13:30") == 1
        with pytest.raises(NotAvailableError, match="it is not known when"):
            reader.epoch_as_of("2026-07-04T13:30")
        store.sync()
        assert times_files(root) == ["0-2"], "together in one file"
        assert reader.epoch_times() == store.epoch_times()
        assert reader.epoch_as_of("2026-07-04T13:30") == 1


def test_a_crash_before_it_leaves_what_the_files_of_manifests_say(tmp_path: Path) -> None:
    root, clock = tmp_path / "s", Clock()
    store = opened(root, clock)
    sealed(store, clock, NOON_US)
    sealed(store, clock, NOON_US + HOUR_US, NOON_US + 2 * HOUR_US, is_synced=False)
    store.node.abandon()  # type: ignore[attr-defined]
    for t in (1, 2):
        at_s = (NOON_US + t * HOUR_US) // SECOND_US
        os.utime(root / "manifests" / "main" / f"{t}.json", (at_s, at_s))
    with opened(root, Clock(NOON_US + 9 * HOUR_US)) as store:
        assert [time.sealed_us for time in store.epoch_times().values()] == [NOON_US + t * HOUR_US for t in range(3)]
        store.sync()
        assert times_files(root) == ["0", "1-2"]


def test_a_store_without_times_gets_none_from_files(tmp_path: Path) -> None:
    """Those of an earlier version may have been copied since."""
    store, clock = hourly(tmp_path / "s", 2)
    store.close()
    shutil.rmtree(tmp_path / "s" / "times")
    with opened(tmp_path / "s", clock) as store:
        assert store.epoch_times() == {}


def test_a_directory_that_cannot_be_written_holds_up_nothing_else(tmp_path: Path) -> None:
    root = tmp_path / "s"
    with opened(root, Clock()) as store:
        store.append("counts", t=0, rows=words(a=1), key=["word"])
        store.seal(0)
        (root / "times").write_bytes(b"in the way")
        store.sync()
        assert store.safe_point() == 0
        assert "times" in store.status().problems["times of epochs"]
        assert [*store.epoch_times()] == [0]
        (root / "times").unlink()
        store.sync()
        assert store.status().problems == {}
        assert times_files(root) == ["0"]
