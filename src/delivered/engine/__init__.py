"""The engine: what a batch is. Plan it, write its shards, decide it, apply it.

A number such as (P7) refers to a bug in another system: docs/pitfalls.md.

Driver:
rules.py     what ledger and checkpoint together mean; pure
recover.py   before a batch: finish or abort what an earlier run left; each shard's action: write | skip | give up
messages.py  checks the tasks' commit messages; pure
decide.py    after a batch: the one record that makes it count. The line is marked there.
repair.py    a decided batch with rewritten shards: the same rows, or stop
apply.py     make decided participants visible
orphans.py   abort orphaned transactions
target.py    whether the sinks' targets are still those of the last batch
context.py   what all of them share

Executors, which load nothing of the above:
shard.py     a task's rows become a prepared shard
dead_letters.py  invalid rows
repeats.py   deduplication by a key table
direct.py    records that never become JVM rows
"""
