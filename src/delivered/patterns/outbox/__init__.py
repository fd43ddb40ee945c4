"""Transactional outbox: the message is a row, written in the transaction of the business rows.

    id = outbox.new_id()                 # before the first attempt; retries reuse it
    connection.execute("INSERT INTO orders ...")
    outbox.put(connection, id=id, aggregate_type="order", aggregate_id="7", type="created", payload={"total": 12})
    connection.commit()                  # both rows, or neither

The columns are those of Debezium's outbox event router. Needs neither Spark nor a connector.
"""

from __future__ import annotations

from delivered.patterns.outbox.ids import new_id
from delivered.patterns.outbox.table import DuplicateId, Entry, Layout, ddl, put

__all__ = ["DuplicateId", "Entry", "Layout", "ddl", "new_id", "put"]
