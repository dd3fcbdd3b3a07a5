"""The public store: append, seal, read, branches, pins, status, verify, repair and backup.

The top of the storage engine. Users get it from `nosync.open`.
"""
