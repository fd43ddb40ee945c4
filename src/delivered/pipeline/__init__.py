"""A pipeline as the user declares it, and as it travels. No Spark, no client library.

definition.py  the whole pipeline: Python values, or a file
file.py        a YAML file: its model, merged with the environment and the call; schema.py: the published JSON Schema
registry.py    finds connectors by name
endpoint.py projection.py transform.py dedup.py   the parts of a definition
spec.py        what travels to Spark's processes, in one option; the Spark idiom's options as the same value
facts.py       facts for the planner
progress.py transactions.py   a running pipeline's progress, from its ledger; its open transactions, for an operator
receive.py     runs receivers
"""
