"""A pipeline as the user declares it, and as it travels. No Spark, no client library.

definition.py  the pipeline: Python values, or a file
file.py        a YAML file, merged with the environment and the call
entries.py     what it may contain: its model, and the published JSON Schema
registry.py    finds connectors by name
endpoint.py transform.py   the parts of a definition
spec.py        what travels to Spark's processes, in one option; the Spark idiom's options as the same value
facts.py       facts for the planner
progress.py    a running pipeline's progress, from its ledger
receive.py     runs receivers, which report themselves
"""
