"""The engine: what a batch is. Plan it, write its shards, decide it, apply it.

A number such as (P7) refers to a bug in another system: docs/pitfalls.md.

Driver:
runner.py    a batch from its plan to its decision: what every driver of batches calls
rules.py     compares ledger and checkpoint; pure
recover.py   before a batch: finish or abort what an earlier run left; plan each shard: write | skip | give up
messages.py  checks the tasks' commit messages; pure
decide.py    after a batch: the one record that makes it count. The line is marked there.
repair.py    rewritten shards of a decided batch must have the same rows
apply.py     make decided participants visible
orphans.py   abort orphaned transactions
target.py    detects recreated targets
context.py   shared state
store.py     the ledger\'s store, at one sink, for all sinks
committers.py  the committers of all sinks
granting.py  at_most_once: starts the driver's arbiter, and registers each batch there
arbiter.py   that process: which attempt of a shard may send

Both:
sinks.py     the sinks of a pipeline, with their routes

Executors, which load nothing of the driver's:
shard.py     a task's rows become a prepared shard
grants.py    at_most_once: asks the arbiter
dead_letters.py  invalid rows
repeats.py   deduplication by a key table
direct.py    records that never become JVM rows
"""
