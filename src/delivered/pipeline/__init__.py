"""A pipeline as the user declares it: Python values, a YAML file, its JSON Schema. No Spark, no client library."""
