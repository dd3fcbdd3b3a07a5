"""Large states for benchmarks, built by the store's own merge from layers of at most a million rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from nosync.lsm.compaction.merge import Merge
from nosync.lsm.layers.writer import arrange
from nosync.lsm.model.layer import Description, LayerId, TraceId
from nosync.lsm.model.timestamp import pack
from nosync.lsm.trace.directory import LayerDirectory

LAYER_ROWS = 1_000_000


def state_layers(directory: LayerDirectory, rows: int, trace: TraceId) -> list[LayerId]:
    """Publishes fresh layers with the keys 0 .. rows-1, two 8-byte columns."""
    ids = []
    for t, start in enumerate(range(0, rows, LAYER_ROWS)):
        keys = np.arange(start, min(rows, start + LAYER_ROWS))
        id = LayerId(trace, Description.of_epoch(t))
        directory.publish(id, arrange(pa.table({"k": keys, "v": keys * 0.5}), ["k"], whose="bench"))
        ids.append(id)
    return ids


def build_state(root: Path, rows: int, trace: TraceId) -> LayerDirectory:
    """Returns a trace with `rows` live rows in one merged layer."""
    (root / "tmp").mkdir(parents=True)
    directory = LayerDirectory(root, 128)
    ids = state_layers(directory, rows, trace)
    if len(ids) > 1:
        layers = [directory.reader(id) for id in ids]
        work = Merge(root, layers, since=pack(len(ids) - 1), bottom=True, env=directory.env)
        for _ in work.steps():
            pass
        for id in ids:
            directory.path_of(id).unlink()
            directory.forget(id)
    return directory
