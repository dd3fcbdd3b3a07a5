"""Small facts that any node may add or take back, and that all nodes learn: pins, instances of jobs, what sinks were given.

Above `manifests`; the node and jobs read and write them.
"""
