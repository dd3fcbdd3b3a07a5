"""Names of the JVM, looked up once for a session and not whenever they are used.

py4j keeps nothing that it found: for `jvm.PythonUtils` the JVM looks for that name in each package that PySpark
imported, which are in hundreds of jars, and so it does for each part of `jvm.org.apache.spark`. A JVM that is new, or
that does not optimize, as those of the tests, takes long for that, and PySpark does it for most calls that make a
DataFrame. What is set on a view of the JVM, or on a package, is found there, and py4j does not ask.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql import SparkSession

_IMPORTED = ("PythonUtils", "PythonSQLUtils", "SimplePythonFunction", "PythonRDD", "SerDeUtil", "functions")
"""Names that PySpark uses without their packages."""
_WHOLE = (
    "org.apache.spark.sql.functions",
    "org.apache.spark.sql.classic.SparkSession",
    "org.apache.spark.sql.catalyst.trees.PySparkCurrentOrigin",
    "org.apache.spark.sql.execution.python.UserDefinedPythonFunction",
)
"""Names that PySpark uses as one word."""
_PACKAGES = (
    "org.apache.spark.api.python",
    "org.apache.spark.sql.catalyst.optimizer",
    "org.apache.spark.sql.catalyst.analysis",
    "org.apache.spark.sql.classic",
)
"""Packages whose parts are used one after the other."""


def remember_names(spark: SparkSession) -> None:
    """Has py4j look up what PySpark and nosync use all the time for the last time. Names that a version of Spark does not
    have are as they were: a package of that name, in which nothing is found.
    """
    jvm: Any = spark._jvm
    if _IMPORTED[0] in vars(jvm):
        return
    for name in (*_IMPORTED, *_WHOLE):
        setattr(jvm, name, getattr(jvm, name))
    for package in _PACKAGES:
        here = jvm
        for part in package.split("."):
            if part not in vars(here):
                setattr(here, part, getattr(here, part))
            here = getattr(here, part)
