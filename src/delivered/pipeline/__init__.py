"""A pipeline as the user declares it, and as it travels. No Spark, no client library.

definition.py  the pipeline: Python values, or a file
file.py        a YAML file, merged with the environment and the call; its model, and the published JSON Schema
registry.py    finds connectors by name
endpoint.py transform.py   the parts of a definition
spec.py        what travels to Spark's processes, in one option; the Spark idiom's options as the same value
facts.py       facts for the planner
start.py       what a start stores next to the checkpoint, before Spark knows of it, also where another job stopped
batches.py     the batches of a write, in a process of its driver
progress.py    a running pipeline's progress, from its ledger
receive.py     runs receivers, which report themselves
"""
