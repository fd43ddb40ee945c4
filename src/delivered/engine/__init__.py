"""The engine: what a batch is. Plan it, write its shards, decide it, apply it.

A number such as (P7) refers to a bug in another system: docs/pitfalls.md.

Driver:
rules.py     what ledger and checkpoint together mean: pure
recover.py   before a batch: finish or undo what an earlier run left, tell each shard: write | skip | give up
messages.py  the tasks' commit messages, checked: pure
decide.py    after a batch: the one record that makes it count. The line is marked there.
repair.py    a decided batch whose shards were rewritten: the same rows, or stop
apply.py     make decided participants visible
orphans.py   abort orphaned transactions
target.py    are the sinks' targets still those of the last batch?
context.py   what all of them need

Executors, which load nothing of the above:
shard.py     a task's rows become a prepared shard
dead_letters.py  rows that a sink rejects
repeats.py   deduplication by a table of keys
direct.py    records that never become JVM rows
"""
