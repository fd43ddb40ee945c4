"""The engine: what a batch is. Plan it, write its shards, decide it, apply it.

Driver:
rules.py     what ledger and checkpoint together mean: pure
recover.py   before a batch: finish or undo what an earlier run left, hand each shard write | skip | give up
messages.py  what the tasks say, checked: pure
decide.py    after a batch: the one record from which on it counts. The line is marked there.
repair.py    a decided batch whose shards were written again: the same rows, or stop
apply.py     make decided participants visible
orphans.py   abort participants that nobody decided
target.py    whether the sinks' targets are still those of the last batch
context.py   what all of them need

Executors, which load nothing of the above:
shard.py     a task's rows become a prepared shard
dead_letters.py  rows that a sink refuses for themselves
repeats.py   repeats that a table knows
direct.py    records that never become JVM rows
"""
