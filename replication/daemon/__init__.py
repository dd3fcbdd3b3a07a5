"""The process that keeps a directory and replicates it: sessions, the RPC server, members, files that are asked for,
metrics.

Above `transport`; clients do not import it.
"""
