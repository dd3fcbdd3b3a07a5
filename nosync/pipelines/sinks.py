"""Sinks of a project: `create_sink` names a format and options, of which a sink of a job is made."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from pyspark.pipelines.output import Sink

from nosync.job.delta_sink import DeltaSink
from nosync.job.sinks import ParquetSink
from nosync.lsm.errors import FlowError, NosyncError
from nosync.lsm.platform.nearest import did_you_mean
from nosync.lsm.platform.paths import checked_text

_PATH = "path"
_INSTEAD = "An object store is s3://BUCKET/PREFIX, gs:// or az://"
_FORMATS: Mapping[str, Callable[[str], ParquetSink | DeltaSink]] = {"parquet": ParquetSink, "delta": DeltaSink}


def sink_of(declared: Sink, where: str, root: Path) -> ParquetSink | DeltaSink:
    """Returns a sink for what a project declares. `where`: its file and line; `root`: what its path is relative to.

    Raises FlowError for a format or an option that would mean something else here, and for a path that cannot be one.
    """
    what, options = f"{where}: sink {declared.name}", dict(declared.options)
    made = _FORMATS.get(declared.format.lower())
    if made is None:
        raise FlowError(
            f"{what}: format {declared.format!r} is not one of {', '.join(_FORMATS)}{did_you_mean(declared.format, _FORMATS)}: "
            "for another one read the dataset in the store, or run a nosync.Job of your own with sinks="
        )
    path = options.pop(_PATH, None)
    if not isinstance(path, str) or not path:
        raise FlowError(
            f"{what}: format {declared.format!r} needs the option {_PATH!r}, the directory or URL of its own"
        )
    if options:
        raise FlowError(f"{what}: option {', '.join(options)} has no meaning here: the one option is {_PATH!r}")
    try:
        if "://" not in path:
            path = os.path.normpath(root / Path(checked_text(path, "a sink", _INSTEAD)).expanduser())
        return made(path)
    except NosyncError as error:
        raise FlowError(f"{what}: {error}") from None
