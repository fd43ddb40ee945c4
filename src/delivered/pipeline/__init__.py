"""A pipeline as the user names it: Python values, a YAML file, its JSON Schema. No Spark, no client library.

registry.py   finds connectors by name
endpoint.py   a source or a sink, named but not connected
transform.py  what happens between them
trigger.py    when batches start
spec.py       the whole pipeline as a pydantic model
load.py       a YAML file, the environment and the call put together; errors that name line and key
schema.py     the published JSON Schema
"""
