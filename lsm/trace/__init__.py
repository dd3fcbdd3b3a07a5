"""The layers of one stage and shard together: which of them cover a read, the state as of a time, changes between two.

A data directory as any process may see it: listings and mapped files, no catalog and no lock. Tasks stop here.
"""
