"""What each kind of stage does with an epoch: its input's changes and its state in, its own changes out.

`operators`, `windows` and `loops` are the kinds, `bootstrap` is how stages begin anew, and `base` and `canonical` are
what all of them use. Pure functions over whole Arrow tables, without Spark. Above `flow`, below `runtime`.
"""
