"""Options of `delivered_mysql`, checked once and frozen."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import parse_qsl, unquote, urlsplit

from delivered.kits.sql.options import LEDGER_SCHEMA_DEFAULT, ServerOptions, parse_server, server_options
from delivered.model.errors import UsageError
from delivered.model.options import Option, OptionTable

OWNER = "delivered_mysql sink"
IDENTIFIER_LENGTH_MAX = 64
PORT_DEFAULT = 3306
TLS_PARAMETERS = ("ssl_ca", "ssl_cert", "ssl_key", "ssl_verify_cert", "ssl_verify_identity")

SINK_OPTIONS = OptionTable(
    OWNER,
    (
        Option(
            "url",
            "The database: mysql://host:3306/name, or jdbc:mysql:, mariadb:. TLS after ?: ssl_ca=PATH and its like.",
            required=True,
        ),
        Option("dbtable", "The table that rows are written to: orders, or sales.orders.", required=True),
        *server_options("Database that holds the ledger's tables, on the same server; made if missing."),
    ),
)


class MysqlOptions(ServerOptions):
    """`url` without `jdbc:`; `schema` is the table's database, None: the url's."""

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


def parse(given: Mapping[str, str]) -> MysqlOptions:
    """
    Raises:
        UsageError: unknown option, missing url or table, a password inside the url, or a value out of bounds.
    """
    options = SINK_OPTIONS.restore(given)
    schema, table = _table(options["dbtable"])
    return MysqlOptions(
        url=_url(options["url"]),
        schema=schema,
        table=table,
        ledger_schema=_identifier("ledgerSchema", options.get("ledgerSchema", LEDGER_SCHEMA_DEFAULT)),
        **parse_server(OWNER, options),
    )


def _url(text: str) -> str:
    url = text.strip().removeprefix("jdbc:")
    parts = urlsplit(url)
    if parts.scheme not in ("mysql", "mariadb") or not parts.path.strip("/") or "/" in parts.path[1:] or _no_port(url):
        # Not repeated here: what is not understood may hold a password.
        raise UsageError(
            "OPTION_VALUE",
            f"{OWNER}: option 'url' is not of the form mysql://host:3306/database.",
            next_step='write .option("url", "mysql://localhost:3306/shop")',
        )
    named = dict(parse_qsl(parts.query))
    if parts.password is not None or "password" in named:
        raise UsageError(
            "PASSWORD_IN_URL",
            f"{OWNER}: option 'url' holds a password; urls are shown in plans and logs.",
            next_step='take it out and write .option("password", "env:MYSQL_PASSWORD_OF_MINE")',
        )
    unknown = sorted(set(named) - set(TLS_PARAMETERS))
    if unknown:
        raise UsageError(
            "OPTION_VALUE",
            f"{OWNER}: option 'url' has the parameter {unknown[0]!r}; known after ? are {', '.join(TLS_PARAMETERS)}.",
            next_step="take it out: parameters of JDBC drivers mean nothing here",
        )
    return url


def _no_port(url: str) -> bool:
    try:
        return urlsplit(url).port == 0
    except ValueError:
        return True


_PART = r'"(?:[^"\0]|"")+"|`(?:[^`\0]|``)+`|[^\W\d][\w$]*'


def _table(text: str) -> tuple[str | None, str]:
    match = re.fullmatch(rf"(?:({_PART})\s*\.\s*)?({_PART})", text.strip())
    if match is None:
        raise UsageError(
            "OPTION_VALUE",
            f"{OWNER}: option 'dbtable' is {text!r}; it must be a table's name, with its database or without.",
            next_step='write .option("dbtable", "shop.orders"); names with other characters in backquotes: `my orders`',
        )
    schema, table = match.groups()
    return schema and _identifier("dbtable", _plain(schema)), _identifier("dbtable", _plain(table))


def _plain(part: str) -> str:
    quote = part[0]
    return part[1:-1].replace(quote * 2, quote) if quote in '"`' else part


def _identifier(option: str, name: str) -> str:
    if not name.strip() or "\0" in name or name.endswith(" ") or len(name) > IDENTIFIER_LENGTH_MAX:
        raise UsageError(
            "OPTION_VALUE",
            f"{OWNER}: option {option!r} names {name!r}; MySQL's names have 1 to {IDENTIFIER_LENGTH_MAX} characters "
            "and do not end in a space.",
        )
    return name
