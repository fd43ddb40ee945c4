"""The one edge to Spark: what imports pyspark. The composition root."""
