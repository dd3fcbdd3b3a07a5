"""The layer log: layers, traces, merging, the catalog and the node-local store.

Reading order: timestamp, layer, format, writer, reader, merge, trace, directory, manifest, archive, sealed,
lines, catalog, node, store. Nothing in here knows Spark, gRPC or the dataflow above.
"""

if __name__ != "nosync.lsm":
    raise ImportError(
        f"import this package as nosync.lsm, not as {__name__}: the source tree's top level is not a path"
    )
