"""The door to the machine: files, clock, randomness, locks, small sealed files, paths as users give them.

All I/O of the storage engine goes through `env`, so that tests can break it. No layer, manifest or node is known here.
Every package of `nosync.lsm` may import it.
"""
