"""What differs between the versions of PySpark that nosync runs on: 4.1 to 4.3."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from nosync.lsm.columnar.columns import nullable

_PARAMETERS = inspect.signature(to_arrow_schema).parameters
_IN_UTC: Mapping[str, Any] = {"timezone": "UTC"} if "timezone" in _PARAMETERS else {"timestamp_utc": True}
"""4.1 knows UTC or none, later ones any zone."""


def declared_schema(schema: StructType) -> pa.Schema:
    """Returns Spark's columns as Arrow's, with timestamps in UTC, just as they are declared."""
    return to_arrow_schema(schema, **_IN_UTC)


def arrow_schema(schema: StructType) -> pa.Schema:
    """Returns Spark's columns as Arrow's, with timestamps in UTC. What is inside of a column may be null: a null struct has
    null in all of its fields, and Arrow does not cast that to fields that may not.
    """
    return pa.schema([field.with_type(nullable(field.type)) for field in declared_schema(schema)])
