"""Declaring a dataflow and resolving it: stages, what is known of their columns, fingerprints, segments and edges.

Without Spark. Above `kernels`, below `operators`.
"""
