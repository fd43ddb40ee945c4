"""MySQL and MariaDB as a sink: rows, written by LOAD DATA LOCAL, and decisions on one server. Its options, and the
types of its columns.

Sessions use ANSI_QUOTES, so that identifiers are quoted as in standard SQL, and READ COMMITTED, to avoid gap locks.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import SplitResult, parse_qs

import pyarrow as pa

from delivered.contract.connector import Connector, Factory
from delivered.contract.sink import Parts
from delivered.kits.mysql import Tls, address, parse_tls, tls_of_url
from delivered.kits.options import mysql_in_clear
from delivered.kits.sql.sink import ServerSink, ServerTerms
from delivered.kits.sql.table import (
    LEDGER_SCHEMA_DEFAULT,
    ServerOptions,
    ServerTypes,
    TableName,
    database_url,
    identifier,
    table_name,
)
from delivered.model.errors import UsageError
from delivered.model.options import option
from delivered.model.rows import RANGES

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


# Arrow types as MySQL and MariaDB store them.
#
# Arrow                     created as           also accepted
# boolean                   tinyint(1)
# int8 .. int64             tinyint .. bigint    every wider one
# uint8 .. uint64           the same, unsigned   every wider one; signed ones that are wide enough
# float                     float                double
# double                    double
# decimal(p, s), s <= 30    decimal(p, s)        decimal(p', s) with p' >= p
# string                    longtext             mediumtext, text, tinytext, varchar, in utf8mb4 or utf8mb3
# binary                    longblob             mediumblob, blob, tinyblob, varbinary
# date                      date
# timestamp with time zone  datetime(6), in UTC  timestamp(6)
# timestamp without         datetime(6)
# time                      time(6)
# null                      -                    any
# list, struct, map, duration, others: refused
#
# In MariaDB, -0.0 becomes 0.0, which has the same fingerprint. Types that would silently change values are not
# accepted: fewer than six fractional digits of seconds, float(m, d), enum ('2' means its second value), char and binary
# (trailing characters are lost or added), texts in other charsets.

SCALE_MAX = 30
KEY_BYTES_MAX = 3_072
"""Maximum size of an InnoDB index."""
KEY_CHARACTERS = 255

_INTEGERS = ("tinyint", "smallint", "mediumint", "int", "bigint")
_WIDTHS = {8: 0, 16: 1, 32: 3, 64: 4}
_SQL = {"datetime": "datetime(6)", "time": "time(6)"}


class MysqlTypes(ServerTypes):
    system = "MySQL"
    columns_max = 1_017  # InnoDB's own limit
    name_max = (64, "characters")
    folds_case = True
    range = RANGES["mysql"]

    def _check_name(self, name: str, seen: dict[str, str]) -> None:
        super()._check_name(name, seen)
        if name.endswith(" ") or any(c > "\uffff" for c in name):
            raise UsageError("COLUMN_NAME.MYSQL", name=name)

    def declared(self, kind: pa.DataType) -> str | None:
        fitting = self.fitting(kind)
        if not fitting:
            return None
        if pa.types.is_boolean(kind):
            return "tinyint(1)"
        name = fitting[0]
        return f"decimal({kind.precision},{kind.scale})" if name == "decimal" else _SQL.get(name, name)

    def declared_key(self, kind: pa.DataType, keys: int) -> str | None:
        """As `declared`, for a key column: an index does not accept unbounded text.

        Args:
            keys: number of key columns.
        """
        characters = min(KEY_CHARACTERS, KEY_BYTES_MAX // 4 // keys)
        if pa.types.is_string(kind):
            return f"varchar({characters})"
        return f"varbinary({characters})" if pa.types.is_binary(kind) else self.declared(kind)

    def fitting(self, kind: pa.DataType) -> tuple[str, ...]:
        t = pa.types
        if t.is_boolean(kind):
            return ("tinyint",)
        if t.is_signed_integer(kind):
            return _INTEGERS[_WIDTHS[kind.bit_width] :]
        if t.is_unsigned_integer(kind):
            at = _WIDTHS[kind.bit_width]
            return (*(f"{n} unsigned" for n in _INTEGERS[at:]), *_INTEGERS[at + 1 :])
        if t.is_float32(kind):
            return ("float", "double")
        if t.is_float64(kind):
            return ("double",)
        if t.is_decimal128(kind):
            return ("decimal",) if 0 <= kind.scale <= min(kind.precision, SCALE_MAX) else ()
        if t.is_string(kind):
            return ("longtext", "mediumtext", "text", "tinytext", "varchar")
        if t.is_binary(kind):
            return ("longblob", "mediumblob", "blob", "tinyblob", "varbinary")
        if t.is_date32(kind):
            return ("date",)
        if t.is_timestamp(kind):
            return () if kind.unit == "ns" else ("datetime",) if kind.tz is None else ("datetime", "timestamp")
        if t.is_time(kind):
            return () if kind.unit == "ns" else ("time",)
        return ()


TYPES = MysqlTypes()


@dataclass(frozen=True)
class MysqlSink(ServerSink):
    options: MysqlOptions

    types = TYPES
    parts = Parts(
        __package__,
        look="read:look",
        add_columns="target:add_columns",
        table_check="target:table_check",
        writer="writer:LoadWriter",
        scan="read:MysqlScan",
        store="store:build_store",
        committer="store:build_committer",
        database="store:MysqlDatabase",
        refused_rows="writer:refused_rows",
    )
    terms = ServerTerms(
        load="LOAD DATA",
        transaction="an XA transaction",
        prepare="XA PREPARE, durable; the session ends",
        commit="XA COMMIT",
        moved="drop the staging tables; the decision made the rows visible",
        holds="hold locks",
        assumes=(
            "the server is backed up and restored as one, with the ledger's database",
            "triggers of the table only write to InnoDB tables",
        ),
        no_position="rows of MySQL do not say when they were added; the option batchColumn has them numbered",
    )


CONNECTOR = Connector(
    "mysql",
    "mysql",
    sinks=Factory(MysqlOptions, "delivered.connectors.mysql:MysqlSink"),
    transactions="",
    key_table=True,
    instead="read from delivered_log or delivered_kafka; a table has no offsets that a stream could replay",
)
