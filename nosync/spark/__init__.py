"""The Spark side: everything that imports pyspark. Tasks run in Spark's Python workers, the rest in the driver."""
