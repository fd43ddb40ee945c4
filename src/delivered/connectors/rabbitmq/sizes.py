"""The server's max_message_size, which AMQP does not report: a message that is too large is refused with the limit."""

from __future__ import annotations

import contextlib
import re

import pyarrow as pa

from delivered.connectors.rabbitmq.client import connect, explained, pika
from delivered.connectors.rabbitmq.options import RabbitmqSinkOptions
from delivered.kits.queue.columns import ServerLimits

_TOO_LARGE = re.compile(r"message size \d+ is larger than (?:configured )?max size (\d+)")
_limits = ServerLimits("rabbitmq")


def refused_rows(options: RabbitmqSinkOptions, batch: pa.RecordBatch) -> pa.Array | None:
    """See `delivered.contract.trial.TriesRows`.

    Publishes one message in a transaction that is rolled back: no queue gets it.
    """
    return _limits.refused(batch, (options.url, options.exchange), lambda size: _limit(options, size))


def _limit(options: RabbitmqSinkOptions, size: int) -> int | None:
    kinds = pika().exceptions
    connection = connect(options)
    try:
        channel = connection.channel()
        channel.tx_select()
        channel.basic_publish(options.exchange, "", bytes(size))
        channel.tx_rollback()
    except (kinds.AMQPError, OSError) as error:
        found = _TOO_LARGE.search(str(error))
        if found is None:
            raise explained(error, options) from error
        return int(found[1])
    finally:
        with contextlib.suppress(kinds.AMQPError, OSError):
            if connection.is_open:
                connection.close()
    return None
