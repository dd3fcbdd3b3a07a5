"""Wire formats between nodes. Nothing is here yet: they come with replication."""

if __name__ != "nosync.proto":
    raise ImportError(
        f"import this package as nosync.proto, not as {__name__}: the source tree's top level is not a path"
    )
