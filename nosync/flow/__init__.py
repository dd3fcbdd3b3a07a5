"""Declaring a dataflow and resolving it: stages, what is known of their columns, fingerprints, segments and edges.

`dataflow` and `stage` declare. `binder` resolves, with `bindings`, `bind_keyed` and `bind_loops`, to a `bound_flow` of
`bound_stage`s, and `fusion` puts its segments together. Without Spark. Above `kernels`, below `operators`.
"""
