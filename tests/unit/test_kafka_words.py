"""Messages when Kafka is unreachable give the cause."""

from __future__ import annotations

from delivered.clients.kafka.librdkafka import ConnectionErrors
from delivered.clients.kafka.protocol import Failures

WHY, THAT = ("_TRANSPORT", "127.0.0.1:1: Connection refused"), ("_ALL_BROKERS_DOWN", "0/2 brokers are down")


def test_that_all_are_down_does_not_hide_why() -> None:
    """librdkafka reports both, in this order; on a busy machine either may come last."""
    connection, failures = ConnectionErrors(), Failures()
    for said in (THAT, WHY, THAT):
        connection.note(*said)
        failures.note(*said)
    assert "refused" in connection.last
    assert "_TRANSPORT" in failures.hint()
    assert "refused" in failures.hint()


def test_it_is_told_when_nothing_else_was_said() -> None:
    connection, failures = ConnectionErrors(), Failures()
    connection.note(*THAT)
    failures.note(*THAT)
    assert "brokers are down" in connection.last
    assert "brokers are down" in failures.hint()
