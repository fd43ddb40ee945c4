"""python -m examples.shop.mailer KAFKA FILE: sends a mail for each paid order; a mail is a line of the file.

The message's id, and how long the file is, are one transaction in PostgreSQL. What a killed mailer wrote beyond that
length is cut off, so a mail counts if and only if its id does.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import IO, Any

import psycopg
from confluent_kafka import Consumer, Message

from delivered.patterns.inbox import inbox

TOPIC = "outbox.event.mail"
COMMIT_EVERY = 10
"""Messages. Kafka delivers what was handled since then again after a kill."""


def send(connection: psycopg.Connection[Any], mails: IO[bytes], message: Message) -> None:
    id_ = dict(message.headers() or [])["id"].decode()
    first: contextlib.AbstractContextManager[bool] = inbox(connection, id_, consumer="mailer")
    if os.environ.get("SHOP_WITHOUT") == "inbox":
        first = contextlib.nullcontext(True)  # wrong, on purpose
    with first as is_first:
        if is_first:
            order = json.loads(message.value() or b"")
            text = f"{order['id']} Dear {order['customer']}, we received {order['cents'] / 100:.2f} for your order.\n"
            mails.write(text.encode())
            mails.flush()
            os.fsync(mails.fileno())
            connection.execute("UPDATE mail_file SET length = %s", [mails.tell()])
    connection.commit()


def main() -> None:
    bootstrap, file = sys.argv[1], Path(sys.argv[2])
    file.touch()
    with psycopg.connect(os.environ["SHOP_DATABASE"]) as connection, file.open("r+b") as mails:
        ((length,),) = connection.execute("SELECT length FROM mail_file").fetchall()
        connection.commit()
        mails.truncate(length)
        mails.seek(length)
        consumer = Consumer(
            {
                "bootstrap.servers": bootstrap, "group.id": "mailer", "auto.offset.reset": "earliest",
                "isolation.level": "read_committed", "enable.auto.commit": False, "session.timeout.ms": 6_000,
            }
        )  # fmt: skip
        consumer.subscribe([TOPIC])
        handled = 0
        while True:
            message = consumer.poll(1.0)
            if message is None or message.error():
                continue
            send(connection, mails, message)
            handled += 1
            if handled % COMMIT_EVERY == 0:
                consumer.commit(message, asynchronous=True)


if __name__ == "__main__":
    main()
