"""Options of `delivered_mysql`."""

from __future__ import annotations

from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from delivered.kits.sql.options import (
    LEDGER_SCHEMA_DEFAULT,
    ServerOptions,
    TableName,
    database_url,
    identifier,
    table_name,
)
from delivered.model.options import Unfit, option

IDENTIFIER_LENGTH_MAX = 64
PORT_DEFAULT = 3306
TLS_PARAMETERS = ("ssl_ca", "ssl_cert", "ssl_key", "ssl_verify_cert", "ssl_verify_identity")

_NAME = identifier(
    lambda name: len(name) <= IDENTIFIER_LENGTH_MAX and not name.endswith(" "),
    f"MySQL identifiers have 1 to {IDENTIFIER_LENGTH_MAX} characters and no trailing space",
)
_HINT = 'write .option("dbtable", "shop.orders"); quote other names with backticks: `my orders`'


def _usable(parts: SplitResult) -> bool:
    if "/" in parts.path[1:] or parts.port == 0:
        return False
    unknown = sorted({name for name, _ in parse_qsl(parts.query)} - {*TLS_PARAMETERS, "password"})
    if unknown and parts.password is None:
        raise Unfit(
            f"has the parameter {unknown[0]!r}; supported after ? are {', '.join(TLS_PARAMETERS)}",
            "remove it: parameters of JDBC drivers are not supported",
        )
    return True


class MysqlOptions(ServerOptions, owner="delivered_mysql sink"):
    """`url` without `jdbc:`; schema None: the database of the url."""

    url: str = option(
        "url",
        "URL of the database: mysql://host:3306/name, or jdbc:mysql:, mariadb:. TLS parameters after ?: ssl_ca=PATH.",
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
    def host(self) -> str:
        return urlsplit(self.url).hostname or "localhost"

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or PORT_DEFAULT

    @property
    def database(self) -> str:
        """The database of the url."""
        return unquote(urlsplit(self.url).path.strip("/"))

    @property
    def login(self) -> str | None:
        """User to log in as: from the option, or the url."""
        named = urlsplit(self.url).username
        return self.user or (unquote(named) if named else None)

    @property
    def tls(self) -> dict[str, str]:
        """TLS parameters of the url, by the client's names."""
        return dict(parse_qsl(urlsplit(self.url).query))
