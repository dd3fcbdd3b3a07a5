"""Selecting by texts: the JVM is called a few times for all columns, where it is called some times for each Column."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from pyspark.sql import DataFrame

_SEPARATOR = "\x01"


def selected(rows: DataFrame, expressions: Sequence[str]) -> DataFrame:
    """Returns `rows.selectExpr`, in a few calls to the JVM in place of some for each expression."""
    text = _SEPARATOR.join(expressions)
    if text.count(_SEPARATOR) >= len(expressions):
        return rows.selectExpr(*expressions)
    jvm: Any = rows.sparkSession._jvm
    expressions_there = jvm.PythonUtils.toSeq(_separator(jvm).splitAsStream(text).toList())
    return DataFrame(rows._jdf.selectExpr(expressions_there), rows.sparkSession)


@functools.cache  # of each JVM
def _separator(jvm: Any) -> Any:
    return jvm.java.util.regex.Pattern.compile(_SEPARATOR)
