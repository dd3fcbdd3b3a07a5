"""Projects of Spark Declarative Pipelines, run as they are: their datasets are views and inputs of one dataflow."""
