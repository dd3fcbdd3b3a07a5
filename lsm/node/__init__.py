"""The one process that owns a directory: durability, the safe point, retention, merges, what is released and discarded.

`node` is its face, `parts` puts it together, `durable_layers` is what every part stands on. Above everything but
`store`. Replication listens to it through `api`.
"""
