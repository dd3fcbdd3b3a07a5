"""What was sealed: manifests of epochs, archives of old ones, branches and their timelines, and what is missing of all that.

The catalog is here too, for it remembers which epochs and entries there were. Beside `compaction`, above `trace`.
"""
