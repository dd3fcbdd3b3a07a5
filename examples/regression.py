"""A linear regression that learns online: its model is the state of a stage. Run: python examples/regression.py

The state of a sensor is what least squares needs of all its samples so far (X'X and X'y), and the coefficients that follow.
So the model as of any epoch can be read back, or rewound to.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession

import nosync

SAMPLES = "sensor string, x1 double, x2 double, y double"
FEATURES = 3  # a constant, x1 and x2
STATE = "xx array<double>, xy array<double>, samples bigint, coefficients array<double>"
EPOCHS, SAMPLES_AN_EPOCH = 5, 40
TRUE = {"north": (1.0, 2.0, -3.0), "south": (-4.0, 0.5, 0.25)}


def learn(changes: pa.Table, state: pa.Table) -> pa.Table:
    """Adds an epoch's samples to each sensor's sums, and solves for its coefficients."""
    sums = {row["sensor"]: row for row in state.to_pylist()}
    names = changes["sensor"].to_numpy(zero_copy_only=False)
    x = np.column_stack([np.ones(len(names)), changes["x1"].to_numpy(), changes["x2"].to_numpy()])
    y = changes["y"].to_numpy()
    after = []
    for sensor in sorted(set(names)):
        mine = names == sensor
        xx, xy, n = x[mine].T @ x[mine], x[mine].T @ y[mine], int(mine.sum())
        if sensor in sums:
            xx += np.array(sums[sensor]["xx"]).reshape(FEATURES, FEATURES)
            xy += np.array(sums[sensor]["xy"])
            n += sums[sensor]["samples"]
        coefficients = np.linalg.lstsq(xx, xy, rcond=None)[0]
        after.append({"sensor": sensor, "xx": xx.ravel(), "xy": xy, "samples": n, "coefficients": coefficients})
    return pa.Table.from_pylist(after, schema=state.schema)


def model() -> nosync.Dataflow:
    flow = nosync.Dataflow("regression")
    flow.source("samples", SAMPLES).update("model", key=["sensor"], state=STATE, fn=learn)
    return flow


def samples(t: int) -> list[tuple[str, float, float, float]]:
    """Noisy samples of two sensors."""
    random = np.random.default_rng(t)
    rows = []
    for sensor, (a, b, c) in TRUE.items():
        x1, x2, noise = random.normal(size=(3, SAMPLES_AN_EPOCH))
        y = a + b * x1 + c * x2 + 0.1 * noise
        rows += [(sensor, float(p), float(q), float(r)) for p, q, r in zip(x1, x2, y, strict=True)]
    return rows


def run(spark: SparkSession, directory: Path) -> list[dict[str, list[float]]]:
    """The coefficients of each sensor as of each epoch, read back at the end."""
    with nosync.open(directory / "store") as store:
        job = nosync.Job(model(), store, spark=spark, shards=2)
        for t in range(EPOCHS):
            job.advance(t, {"samples": spark.createDataFrame(samples(t), SAMPLES)})
        return [{r.sensor: list(r.coefficients) for r in job.read("model", as_of=t).collect()} for t in range(EPOCHS)]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        builder = SparkSession.builder.master("local[2]").config("spark.log.level", "ERROR")
        builder = builder.config("spark.ui.showConsoleProgress", "false")
        session = nosync.configure_spark(builder).getOrCreate()
        for epoch, models in enumerate(run(session, Path(temporary))):
            shown = [f"{sensor} " + " ".join(f"{c:6.3f}" for c in models[sensor]) for sensor in sorted(models)]
            print(f"as of epoch {epoch}: " + ",  ".join(shown))
