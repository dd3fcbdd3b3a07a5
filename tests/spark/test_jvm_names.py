"""Names of the JVM are looked up once, and are what they were."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from py4j.java_gateway import JavaPackage, JVMView

from nosync.spark.jvm_names import remember_names

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def test_names_that_are_used_all_the_time_are_not_looked_up_again(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark.sql import functions

    remember_names(spark)
    asked: list[str] = []

    def counted(ask: Any) -> Any:
        def ask_and_count(self: Any, name: str) -> Any:
            asked.append(name)
            return ask(self, name)

        return ask_and_count

    for kind in (JVMView, JavaPackage):
        monkeypatch.setattr(kind, "__getattr__", counted(kind.__getattr__))
    jvm: Any = spark._jvm
    rules = jvm.org.apache.spark.sql.catalyst.optimizer
    assert asked == []
    assert spark.range(3).select((functions.col("id") + 1).alias("n")).toPandas()["n"].tolist() == [1, 2, 3]
    assert not {"PythonUtils", "PythonSQLUtils", "org.apache.spark.sql.functions"} & set(asked)
    assert getattr(rules, "ColumnPruning$")._fqn.endswith("optimizer.ColumnPruning$")
    assert asked[-1] == "ColumnPruning$"


def test_saying_it_again_changes_nothing(spark: SparkSession) -> None:
    remember_names(spark)
    before = dict(vars(spark._jvm))
    remember_names(spark)
    assert vars(spark._jvm) == before
