"""What a node holds and misses, who should keep what, and what nodes say to each other. Pure: events in, effects out.

No clock, thread, socket or file is in here; `nosync.testing.simulation` runs it under faults. The lowest floor of
replication.
"""
