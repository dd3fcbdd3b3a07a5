"""Wire formats between nodes, and between jobs and daemons."""

if __name__ != "nosync.proto":
    raise ImportError(
        f"import this package as nosync.proto, not as {__name__}: the source tree's top level is not a path"
    )
