"""A pipeline as the user names it: Python values, a YAML file, its JSON Schema. No Spark, no client library."""
