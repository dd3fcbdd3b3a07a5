"""For tests of code that uses nosync: `FlowTester` runs a flow without Spark; an environment with faults, and crashes on
demand.
"""

from nosync.testing.faulty_env import FaultyEnv, crash
from nosync.testing.flow_tester import FlowTester

__all__ = ["FaultyEnv", "FlowTester", "crash"]
