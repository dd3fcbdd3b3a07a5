"""What operators compute, on Arrow tables alone: groups, aggregates, sums, joins, windows, expressions.

`aggregates` has the functions that users call, `aggregate_plan` and `accumulators` how they are computed. No stage and
no layer is known here. The lowest package above the store.
"""
