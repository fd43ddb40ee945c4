"""Functions that tests of the Kafka sink run in separate processes. Each reports on stdout."""

from __future__ import annotations

import base64
import pickle
import resource
import sys
import time
from typing import Any


def tell(what: Any) -> None:
    print(base64.b64encode(pickle.dumps(what)).decode(), flush=True)


def write(sink: Any, plan: Any, shard: int, batches: Any, schema: Any) -> None:
    """Prepare a shard, print the message, then idle: the test kills this process."""
    from delivered.engine import Sinks
    from delivered.engine.shard import write_shard
    from delivered.model.rows import Rows

    tell(write_shard(Sinks.one(sink, plan.scope.sink), plan, shard, 0, map(Rows, batches), schema))
    time.sleep(600)


def apply(sink: Any, scope: Any, work: Any, prepared: Any) -> None:
    tell(sink.committer(scope).commit(work, prepared))


def decide_for_ever(sink: Any, scope: Any, owner: Any, decision: Any) -> None:
    """Claim, then decide batch after batch and print each outcome, until fenced."""
    from dataclasses import replace

    from delivered.engine.context import open_ledger
    from delivered.model.errors import Fenced

    ledger = open_ledger(sink, scope)
    state = ledger.claim(owner)
    batch = state.last.batch + 1 if state.last else 0
    while True:
        try:
            ledger.resume(owner.id)
            tell((batch, ledger.decide(replace(decision, batch=batch, owner=owner.id))))
        except Fenced as error:
            tell(("fenced", str(error)))
            return
        batch += 1


def grow(sink: Any, work: Any, guarantee: Any, rows: int, size: int, times: int) -> None:
    """Stage a batch many times; print the memory in kB after a tenth, and at the end."""
    import pyarrow as pa

    batch = pa.record_batch([pa.array([b"x" * size] * rows)], names=["value"])
    writer = sink.writer(work, guarantee, batch.schema)
    for i in range(times):
        writer.stage(batch)
        if i == times // 10:
            tell(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    tell(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    writer.abort()


if __name__ == "__main__":
    globals()[sys.argv[1]](*pickle.loads(base64.b64decode(sys.argv[2])))
