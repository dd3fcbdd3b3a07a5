"""Whole Arrow columns: types and order of keys, Spark's hash of them, the difference of two tables.

Arrow and NumPy in and out; no file and no stage is known here. Every package above may import it.
"""
