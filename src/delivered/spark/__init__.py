"""The only package that imports pyspark; wires the others together."""
