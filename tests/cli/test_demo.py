"""The demo as a newcomer runs it, in longer epochs so that it is quick; its answers against pandas."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from nosync.demo import epoch_of_day, load_bad_hours, load_flights

pytestmark = pytest.mark.spark


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_demo(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nosync.cli", "demo", "--by", "month", "--what-if", "--json", "--out", "out"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert (found["epochs"], found["rows"], found["safe_point"]) == (12, 336_776, 11)
    assert found["identical"] is True
    assert found["layers_deleted"] == found["layers_recomputed"] > 0
    assert (tmp_path / "out" / "trend.png").stat().st_size > 10_000

    flights = load_flights().to_pandas()
    flown = flights[flights["dep_delay"].notna()]
    delay = flown.groupby(["origin", "carrier"])["dep_delay"]
    expected = pd.DataFrame({"n": delay.size(), "total": delay.sum(), "mean": delay.mean(), "worst": delay.max()})
    kept = pd.read_csv(tmp_path / "out" / "delays.csv").set_index(["origin", "carrier"])
    pd.testing.assert_frame_equal(kept, expected.sort_index(), check_dtype=False)

    # The branch, against pandas: from July on without the flights in hours of bad weather.
    bad = set(load_bad_hours())
    hours = flown["origin"] + " " + flown["day"].astype(str) + " " + flown["hour"].astype(str)
    kept_flights = flown[(flown["day"] < datetime.date(2013, 7, 1)) | ~hours.isin(bad)]
    what_if = found["what_if"]
    assert what_if["layers_computed"] == 3 * 4 * what_if["epochs_replayed"], "the sources are shared"
    assert what_if["at"] == 5
    assert what_if["mean_delay"] == pytest.approx(flown["dep_delay"].mean())
    assert what_if["mean_delay_without_weather"] == pytest.approx(kept_flights["dep_delay"].mean())

    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert "exists: choose another --out" in again.stderr


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_demo_of_a_kept_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nosync.cli", "demo", "--checkpoint", "--by", "month", "--json", "--out", "out"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert (found["batches"], found["rows"], found["fork_at"]) == (12, 336_776, 5)
    assert found["went_on_after"] >= 5, "from what the peer had, and not from the beginning"
    assert found["identical"]
    assert found["fork_identical"]
    assert (tmp_path / "out" / "checkpoint.png").stat().st_size > 10_000
    assert not (tmp_path / "out" / "n1").exists()

    flights = load_flights().to_pandas()
    flown = flights[flights["dep_delay"].notna()]
    hours = flown["origin"] + " " + flown["day"].astype(str) + " " + flown["hour"].astype(str)
    kept = flown[(flown["day"] < datetime.date(2013, 7, 1)) | ~hours.isin(set(load_bad_hours()))]
    assert found["mean_delay"] == pytest.approx(flown["dep_delay"].mean())
    assert found["mean_delay_without_weather"] == pytest.approx(kept["dep_delay"].mean())

    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert "exists: choose another --out" in again.stderr


def test_epochs_of_the_year() -> None:
    assert [epoch_of_day(datetime.date(2013, 12, 31), by) for by in ("day", "week", "month")] == [364, 52, 11]
    assert epoch_of_day(datetime.date(2013, 1, 7), "week") == 0
