"""What a project defines: datasets, and the queries that fill them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from nosync.job.delta_sink import DeltaSink
from nosync.job.sinks import ParquetSink

MATERIALIZED_VIEW = "materialized view"
"""It is what its query gives of all rows."""
STREAMING_TABLE = "streaming table"
"""Its queries are asked of rows as they come. With another query it goes on; what it has stays."""
SINK = "sink"
"""A streaming table whose rows also go outside, epoch by epoch."""
OF_STREAMS = (STREAMING_TABLE, SINK)
"""Their queries are asked of rows as they come."""
TEMPORARY_VIEW = "temporary view"
"""A name for a query, for other datasets of the project. It has no rows of its own."""


@dataclass(frozen=True)
class Query:
    """A query that fills a dataset. Declarative Pipelines call it a flow."""

    name: str
    where: str
    """The file and the line where it is defined."""
    ask: Callable[[], DataFrame]
    """Returns its DataFrame. It reads other datasets by their names."""
    is_cdc: bool = False


@dataclass
class Dataset:
    """A dataset of a project."""

    name: str
    kind: str
    where: str
    schema: StructType | str | None = None
    """The columns that it was defined with."""
    queries: list[Query] = field(default_factory=list)
    follows: bool = True
    """Whether it is what its query gives of all rows that came, so that another query means other rows for all of them."""
    sink: ParquetSink | DeltaSink | None = None
    """Where its rows go."""
    notes: list[str] = field(default_factory=list)
    """What whoever runs it should know of its definition."""
