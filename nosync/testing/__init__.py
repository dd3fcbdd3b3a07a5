"""Fakes for tests of code that uses nosync: an environment with faults, and crashes on demand."""

from nosync.testing.faulty_env import FaultyEnv, crash

__all__ = ["FaultyEnv", "crash"]
