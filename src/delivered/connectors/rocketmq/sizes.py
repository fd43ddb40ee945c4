"""The proxy's maxMessageSize, which it reports to each producer."""

from __future__ import annotations

import pyarrow as pa

from delivered.connectors.rocketmq.options import RocketmqSinkOptions
from delivered.connectors.rocketmq.publish import Publisher
from delivered.kits.queue.columns import ServerLimits

_limits = ServerLimits("rocketmq")


def refused_rows(options: RocketmqSinkOptions, batch: pa.RecordBatch) -> pa.Array | None:
    """See `delivered.contract.trial.TriesRows`. Brokers have a limit of the same name, which is not reported."""
    return _limits.refused(batch, options.endpoints, lambda size: _limit(options, size))


def _limit(options: RocketmqSinkOptions, size: int) -> int | None:
    publisher = Publisher(options)
    try:
        limit = publisher.body_max
    finally:
        publisher.close()
    return limit if 0 < limit < size else None
