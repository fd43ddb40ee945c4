"""Rows that another program wrote into the tables of events and of an outbox: a named error, never one of Python."""

from __future__ import annotations

import sqlite3

import pytest

from delivered.model.errors import InvariantBroken
from delivered.patterns import events, outbox
from delivered.patterns.events import Aggregate, Event

COUNTER = Aggregate("counter", lambda state, event: (state or 0) + 1, snapshot_every=2)


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("delivered_event", "payload", "{broken"),
        ("delivered_event", "payload", "[" * 200_000),
        ("delivered_event", "id", "no uuid"),
        ("delivered_event_snapshot", "state", "{broken"),
    ],
    ids=["no JSON", "deep", "no UUID", "snapshot"],
)
def test_a_damaged_row_of_events_is_named(table: str, column: str, value: str) -> None:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    for statement in events.ddl("sqlite"):
        connection.execute(statement)
    connection.execute("BEGIN")
    for n in range(3):
        COUNTER.append(connection, "x", [Event(events.new_id(), "counted", n)], expected=n)
    assert COUNTER.load(connection, "x") == (3, 3)
    connection.execute("DELETE FROM delivered_event WHERE version = 2")  # the snapshot has it
    assert connection.execute(f"UPDATE {table} SET {column} = ? WHERE version >= 2", (value,)).rowcount
    with pytest.raises(InvariantBroken, match=r"EVENTS_DAMAGED.*counter 'x'"):
        COUNTER.load(connection, "x")


@pytest.mark.parametrize("payload", ["no json", "[" * 200_000, "true", '"1"'], ids=["no JSON", "deep", "true", "text"])
def test_a_row_of_an_outbox_with_another_payload_is_another_message(payload: str) -> None:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.execute(outbox.ddl("sqlite"))
    connection.execute("BEGIN")
    id_ = outbox.new_id()
    connection.execute("INSERT INTO outbox VALUES (?, 'order', '7', 'made', ?)", (str(id_), payload))
    with pytest.raises(outbox.DuplicateId, match="OUTBOX_ID_REUSED"):
        outbox.put(connection, id=id_, aggregate_type="order", aggregate_id="7", type="made", payload="1")
