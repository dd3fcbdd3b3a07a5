"""Benchmarks: each is a module with a `run(scale)` that yields results; `python -m bench` runs them.

Every figure in README.md and docs/ comes from here. Baselines run in the same process, interleaved with what they are
compared to.
"""
