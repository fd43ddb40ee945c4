"""Phase 4, on the driver: recover, decide, apply, sweep.

rules.py     what ledger and checkpoint together mean: pure
recover.py   before a batch: finish or undo what an earlier run left, hand each shard write | skip | give up
messages.py  what the tasks say, checked: pure
decide.py    after a batch: the one record from which on it counts. The line is marked there.
repair.py    a decided batch whose shards were written again: the same rows, or stop
apply.py     make decided participants visible
sweep.py     abort what nobody decided
"""
