"""MySQL and MariaDB as a sink: rows, written by LOAD DATA LOCAL, and decisions on one server.

Sessions use ANSI_QUOTES, so that identifiers are quoted as in standard SQL, and READ COMMITTED, to avoid gap locks.
"""

from __future__ import annotations

from urllib.parse import SplitResult, parse_qs

from delivered.contract.connector import Connector, Factory
from delivered.kits.mysql import Tls, address, parse_tls, tls_of_url
from delivered.kits.options import mysql_in_clear
from delivered.kits.sql.table import (
    LEDGER_SCHEMA_DEFAULT,
    ServerOptions,
    TableName,
    database_url,
    identifier,
    table_name,
)
from delivered.model.options import option

IDENTIFIER_LENGTH_MAX = 64

_NAME = identifier(
    lambda name: len(name) <= IDENTIFIER_LENGTH_MAX and not name.endswith(" "),
    f"MySQL identifiers have 1 to {IDENTIFIER_LENGTH_MAX} characters and no trailing space",
)
_HINT = 'write .option("dbtable", "shop.orders"); quote other names with backticks: `my orders`'


def _usable(parts: SplitResult) -> bool:
    if "/" in parts.path[1:]:
        return False
    if parts.password is None and "password" not in parse_qs(parts.query):
        parse_tls(parts.query)
    return True


class MysqlOptions(ServerOptions, owner="delivered_mysql sink"):
    """`url` without `jdbc:`; schema None: the database of the url."""

    url: str = option(
        "url",
        "URL of the database: mysql://host:3306/name, or jdbc:mysql:, mariadb:. With ?ssl_ca=PATH the certificate and "
        "the name of the server are verified.",
        database_url("mysql://host:3306/database", ("mysql", "mariadb"), ("password",), _usable),
        example="mysql://localhost:3306/shop",
    )
    named: TableName = option(
        "dbtable",
        "Table to write to: orders, or sales.orders.",
        table_name(_NAME, '"`', str, "database", _HINT),
        example="shop.orders",
    )
    ledger_schema: str = option(
        "ledgerSchema",
        "Database for the ledger's tables, on the same server; created if missing.",
        _NAME,
        default=LEDGER_SCHEMA_DEFAULT,
    )

    @property
    def in_clear(self) -> tuple[str, ...]:
        return mysql_in_clear(self.url)

    @property
    def host(self) -> str:
        return str(address(self.url)["host"])

    @property
    def port(self) -> int:
        return int(address(self.url)["port"])

    @property
    def database(self) -> str:
        """The database of the url."""
        return str(address(self.url)["database"])

    @property
    def tls(self) -> Tls | None:
        """From the url; None: TLS is used if the server offers it, and nothing is verified."""
        return tls_of_url(self.url)


CONNECTOR = Connector(
    "mysql",
    "mysql",
    sinks=Factory(MysqlOptions, "delivered.connectors.mysql.sink:MysqlSink"),
    transactions="",
    key_table=True,
    instead="read from delivered_log or delivered_kafka; a table has no offsets that a stream could replay",
)
