"""Replication of a store between nodes: what each holds, what each is missing, and how it gets there."""

if __name__ != "nosync.replication":
    raise ImportError(
        f"import this package as nosync.replication, not as {__name__}: the source tree's top level is not a path"
    )
