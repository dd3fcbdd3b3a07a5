"""Merging in the background: which merge is next, carrying it out here or in a process of its own, deleting what it replaced.

Beside `manifests`, above `trace`; the node tells it what may be merged.
"""
