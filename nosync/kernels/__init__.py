"""What operators compute, on Arrow tables alone: groups, aggregates, sums, joins, windows, expressions.

No stage and no layer is known here. The lowest package above the store.
"""
