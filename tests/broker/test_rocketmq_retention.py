"""A first audit of a RocketMQ topic whose broker has deleted its first messages, by its own retention."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.support.orders import ROWS, Orders, clean, states

import delivered
from delivered import Pipeline
from delivered.audit.evidence import Verdict
from delivered.connectors.log import append
from delivered.contract.sink import BoundedScan
from delivered_lab.verify.services import wait_for

FILE_BYTES = 1 << 20
DELETES = {
    "mappedFileSizeCommitLog": str(FILE_BYTES),
    "fileReservedTime": "0",  # hours
    "deleteWhen": ";".join(f"{hour:02}" for hour in range(24)),
    "cleanResourceInterval": "1000",
}


def select(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.select(["key", "value"])


@dataclass
class RocketmqOrders(Orders):
    """From a log into a topic with one queue."""

    transform: Any = staticmethod(select)
    options: Any = None
    value_bytes: int = 0

    def pipeline(self, **changes: Any) -> Pipeline:
        return Pipeline(
            **changes,
            name="orders",
            guarantee=self.guarantee,
            checkpoint=self.folder / self.checkpoint,
            source=delivered.log(str(self.folder / "log"), startingOffsets="earliest"),
            transform=delivered.arrow(select=["key", "value"]),
            sinks=[delivered.endpoint("rocketmq", **self.options)],
        )

    def send(self) -> None:
        rows = range(self.sent, self.sent + ROWS)
        values = [b"%d " % n + random.Random(n).randbytes(self.value_bytes) for n in rows]  # not compressible
        append(str(self.folder / "log"), pa.table({"key": [b"%d" % (n % 5) for n in rows], "value": values}))
        self.sent += ROWS

    def scan(self) -> BoundedScan:
        return self.pipeline().sinks[0].sink().scan()


@pytest.mark.matrix
def test_batches_that_the_broker_deleted_are_unknown_and_the_others_are_judged(
    new_rocketmq: Any, tmp_path: Path
) -> None:
    server = new_rocketmq(**DELETES)
    options = server.transactions(server.topic("TRANSACTION", queues=1), tmp_path)
    orders = RocketmqOrders(tmp_path, options=options, value_bytes=FILE_BYTES // 20, guarantee="at_least_once")
    orders.run(4)
    wait_for(lambda: bool(orders.scan().expired()), 240, "the broker deletes its first file")
    orders.value_bytes = 0
    orders.run()
    report = orders.audit()
    assert (report.verdict, report.breaches) == (Verdict.UNKNOWN, []), report
    assert "offsets 0 to" in report.unknowns[0] and "removed by retention" in report.unknowns[0]
    assert report.counts.lost == 0 and report.counts.sent >= ROWS
    assert report.counts.earlier == report.counts.delivered - report.counts.sent
    (first, last) = states(orders)
    assert (first[0], first[2:], last[1:]) == (0, (Verdict.UNKNOWN, False), (4, Verdict.HELD, True))
    orders.run()
    assert (orders.audit().verdict, orders.audit().counts) == (Verdict.HELD, clean(0)), states(orders)
    assert orders.seals()[-1].sums.counts == clean(ROWS)
