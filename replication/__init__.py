"""Replication of layers between nodes over gRPC. Nothing is here yet: a store has one node, its own process."""

if __name__ != "nosync.replication":
    raise ImportError(
        f"import this package as nosync.replication, not as {__name__}: the source tree's top level is not a path"
    )
