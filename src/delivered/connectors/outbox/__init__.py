"""An application's outbox as a source: by PostgreSQL's logical decoding, or by polling any database. Also a PostgreSQL
table as a change stream. An outbox has the columns of `delivered.patterns.outbox`.
"""

from __future__ import annotations

from delivered.connectors.outbox.options import OutboxOptions
from delivered.contract.connector import Connector, Factory

CONNECTOR = Connector(
    "outbox",
    "outbox",
    sources=Factory(OutboxOptions, "delivered.connectors.outbox.source:OutboxSource"),
    instead="an application writes to its outbox with delivered.patterns.outbox.put",
)
