"""The one process that keeps a directory: durability, the safe point, retention, what is released, given up and torn.

Above everything but `store`. Replication listens to it through `api`.
"""
