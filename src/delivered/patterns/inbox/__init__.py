"""Inbox: a consumer records a message's id in the transaction of its effect, so a duplicate has no effect.

    with consume(connection, from_kafka(consumer, message), consumer="mail") as first:
        if first:
            connection.execute("INSERT INTO mails ...")
    # the id and the effect are committed, or neither; then the message is acknowledged

`inbox` is the first half alone, without commit and acknowledgement. Needs neither Spark nor a connector.
"""

from __future__ import annotations

from delivered.patterns.inbox.consume import Delivery, consume, from_kafka, from_rabbitmq, from_rocketmq
from delivered.patterns.inbox.table import clean, ddl, inbox

__all__ = ["Delivery", "clean", "consume", "ddl", "from_kafka", "from_rabbitmq", "from_rocketmq", "inbox"]
