"""MySQL and MariaDB as a sink: rows, written by LOAD DATA LOCAL, and decisions on one server.

Sessions use ANSI_QUOTES, so that identifiers are quoted as in standard SQL, and READ COMMITTED, to avoid gap locks.
"""

from __future__ import annotations

from delivered.connectors.mysql.options import MysqlOptions
from delivered.contract.connector import Connector, Factory

CONNECTOR = Connector(
    "mysql",
    "mysql",
    sinks=Factory(MysqlOptions, "delivered.connectors.mysql.sink:MysqlSink"),
    transactions="",
    key_table=True,
    instead="read from delivered_log or delivered_kafka; a table has no offsets that a stream could replay",
)
