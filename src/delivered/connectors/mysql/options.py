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
    f"MySQL's names have 1 to {IDENTIFIER_LENGTH_MAX} characters and do not end in a space",
)
_HINT = 'write .option("dbtable", "shop.orders"); names with other characters in backquotes: `my orders`'


def _usable(parts: SplitResult) -> bool:
    if "/" in parts.path[1:] or parts.port == 0:
        return False
    unknown = sorted({name for name, _ in parse_qsl(parts.query)} - {*TLS_PARAMETERS, "password"})
    if unknown and parts.password is None:
        raise Unfit(
            f"has the parameter {unknown[0]!r}; known after ? are {', '.join(TLS_PARAMETERS)}",
            "take it out: parameters of JDBC drivers mean nothing here",
        )
    return True


class MysqlOptions(ServerOptions, owner="delivered_mysql sink"):
    """`url` without `jdbc:`; schema None: the database of the url."""

    url: str = option(
        "url",
        "The database: mysql://host:3306/name, or jdbc:mysql:, mariadb:. TLS after ?: ssl_ca=PATH and its like.",
        database_url("mysql://host:3306/database", ("mysql", "mariadb"), ("password",), _usable),
        example="mysql://localhost:3306/shop",
    )
    named: TableName = option(
        "dbtable",
        "The table that rows are written to: orders, or sales.orders.",
        table_name(_NAME, '"`', str, "database", _HINT),
        example="shop.orders",
    )
    ledger_schema: str = option(
        "ledgerSchema",
        "Database that holds the ledger's tables, on the same server; made if missing.",
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
        """That of the url."""
        return unquote(urlsplit(self.url).path.strip("/"))

    @property
    def login(self) -> str | None:
        """Whom to log in as: the option, or the url."""
        named = urlsplit(self.url).username
        return self.user or (unquote(named) if named else None)

    @property
    def tls(self) -> dict[str, str]:
        """What the url says of it, as the client names it."""
        return dict(parse_qsl(urlsplit(self.url).query))
