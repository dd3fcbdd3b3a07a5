"""The rows of each source that an epoch is given, as the flow's sources have them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from pyspark.sql import DataFrame, functions
from pyspark.sql.types import StringType, StructField, StructType

from nosync.flow.tables import GIVEN_CHANGE_TYPE
from nosync.lsm.columnar.columns import CHANGE_TYPE_COLUMN
from nosync.lsm.trace.change_feed import INSERT


class GivenRows(Mapping[str, DataFrame]):
    """Holds a DataFrame for each source.

    Those of tables get the column of change types that their sources have when somebody asks for them: Spark takes
    milliseconds to analyze a plan, and who reads the files of rows needs none.
    """

    def __init__(self, frames: Mapping[str, DataFrame], tables: Collection[str]) -> None:
        """`frames`: as users gave them. `tables`: the sources of those that are changes of tables, in users' words."""
        self._frames, self._tables = dict(frames), frozenset(tables)
        self._made: dict[str, DataFrame] = {}

    def __getitem__(self, name: str) -> DataFrame:
        if name not in self._tables:
            return self._frames[name]
        if name not in self._made:
            self._made[name] = _with_change_type(self._frames[name])
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._frames)

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def as_given(self) -> Mapping[str, DataFrame]:
        """Returns the DataFrames that users gave."""
        return self._frames

    def change_type_in(self, name: str) -> str | None:
        """Returns which column of the rows of a table, as given, says what each change is; None: all are insertions."""
        return CHANGE_TYPE_COLUMN if CHANGE_TYPE_COLUMN in self._frames[name].columns else None

    def is_as_given(self, name: str) -> bool:
        """Returns whether the rows of a source are what users gave, and not changes of a table in users' words."""
        return name not in self._tables


def _with_change_type(frame: DataFrame) -> DataFrame:
    if CHANGE_TYPE_COLUMN in frame.columns:
        if GIVEN_CHANGE_TYPE in frame.columns:
            frame = frame.drop(GIVEN_CHANGE_TYPE)
        return frame.withColumnRenamed(CHANGE_TYPE_COLUMN, GIVEN_CHANGE_TYPE)
    return frame.withColumn(GIVEN_CHANGE_TYPE, functions.lit(INSERT))


def schema_with_change_type(schema: StructType) -> StructType:
    """Returns the columns that a table's changes have as its source has them."""
    renamed = {CHANGE_TYPE_COLUMN: GIVEN_CHANGE_TYPE}
    kept = [
        StructField(renamed.get(field.name, field.name), field.dataType)
        for field in schema
        if field.name != GIVEN_CHANGE_TYPE
    ]
    if CHANGE_TYPE_COLUMN not in schema.names:
        kept.append(StructField(GIVEN_CHANGE_TYPE, StringType()))
    return StructType(kept)
