"""An event log: what happened to an aggregate, in order; its state is the fold of its events.

    account = Aggregate("account", apply, initial={"balance": 0}, snapshot_every=100)
    state, version = account.load(connection, "7")
    account.append(connection, "7", [Event(new_id(), "deposited", {"amount": 5})], expected=version)
    connection.commit()                  # the events, and whatever else this transaction wrote, or nothing

Needs neither Spark nor a connector.
"""

from __future__ import annotations

from delivered.patterns.events.aggregate import Aggregate, Appended, Event, Loaded
from delivered.patterns.events.tables import Conflict, DuplicateEvent, ddl
from delivered.patterns.outbox.ids import new_id

__all__ = ["Aggregate", "Appended", "Conflict", "DuplicateEvent", "Event", "Loaded", "ddl", "new_id"]
