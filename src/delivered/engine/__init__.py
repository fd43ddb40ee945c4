"""The engine: what a batch is. Plan it, write its shards, decide it, apply it.

A number such as (P7) refers to a bug in another system: docs/pitfalls.md.

Driver:
runner.py    a batch from its plan to its decision: what every driver of batches calls
recover.py   before a batch: compare ledger and checkpoint (`judge`, pure); finish or abort what an earlier run left;
             plan each shard: write | skip | give up
decide.py    after a batch: checks the tasks' messages; the one record that makes it count (the line is marked there);
             makes decided participants visible, aborts orphans
context.py   the sinks behind one ledger, their committers and targets
arbiter.py   at_most_once: the process that knows which attempt of a shard may send
owner.py     the one driver that may decide

Both:
sinks.py     the sinks of a pipeline, with their routes

Executors, which load nothing of the driver's:
shard.py     a task's rows become a prepared shard, and those that a sink cannot hold dead letters; at_most_once: asks
             the arbiter
transform.py a function over Arrow batches; records that never become JVM rows; rows as columns, where Spark lies
             between source and sinks
keys.py      keys that occur twice: refused, or dropped by a dedup with a key table
"""
