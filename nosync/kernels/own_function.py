"""Functions of stages that users did not write."""

from __future__ import annotations


class OwnFunction:
    """A function of a stage that comes with a view, a table or an operator.

    It may run in the driver, where functions of users do not unless `spark.nosync.driver.functions.enabled` is true.
    """
