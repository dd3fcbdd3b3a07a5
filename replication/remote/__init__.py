"""Copies of a store in an object store: what is there, what is missing there, how it gets there, and back.

A bucket is a passive node: it says nothing, so the writer's log in it says what it holds. Beside `transport`, above
`protocol`; daemons, `nosync.stores` and the command line use it. Only `cloud` imports obstore.
"""
