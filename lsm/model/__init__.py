"""What a store is made of: logical time, the names of layers, and which traces a stage was in over time.

Values only: no file, no clock, no lock. Anybody may import them; they import `nosync.lsm.errors` and nothing else.
"""
