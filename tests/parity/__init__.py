"""The same micro-batches through a Structured Streaming query and through its conversion: Spark is the oracle.

`cases` has both forms of each operator, `both_ways` runs them, and `test_parity` compares what reaches the sink. The long
form is `make parity`.
"""
