"""Iceberg as a sink, using the package `pyiceberg`, without a JAR: a batch is one snapshot of the table."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from delivered.contract.connector import Connector, Factory
from delivered.kits.options import absolute, sink_name
from delivered.kits.table import FileTableOptions, compression_option
from delivered.model.errors import UsageError
from delivered.model.options import (
    Option,
    OptionType,
    Unfit,
    check_endpoints,
    choice,
    endpoints_in_clear,
    is_loopback,
    option,
    resolve_secret,
    several,
    split_url,
    storage_environment,
)

CATALOGS = choice(("sql", "rest"))
DATABASE = "catalog.db"
"""File of the embedded catalog in the warehouse folder."""

_PART = re.compile(r"(?:(?P<word>[A-Za-z]+)\(\s*(?:(?P<number>\d+)\s*,\s*)?)?(?P<column>[^(),\s]+)\s*\)?")
_TRANSFORMS = {"years": "year", "months": "month", "days": "day", "hours": "hour"}
_COUNTED = {"bucket", "truncate"}
_NO_FOLDER = re.compile(r"[#?/\\\x00-\x1f\x7f]")
_FOLDER_BYTES_MAX = 250


@dataclass(frozen=True)
class Part:
    """One field of the user's partition spec.

    Attributes:
        transform: in Iceberg's notation: "identity", "day", "bucket[16]".
    """

    column: str
    transform: str

    @property
    def name(self) -> str:
        """As Iceberg's own clients name the field."""
        word = self.transform.partition("[")[0]
        return self.column if word == "identity" else f"{self.column}_{word.replace('truncate', 'trunc')}"


def _identifier(text: str) -> tuple[str, ...]:
    names = tuple(text.split("."))
    if len(names) < 2 or any(not n.strip() or n != n.strip() for n in names):
        raise Unfit.build("OPTION_VALUE.ICEBERG_TABLE", text=text)
    return names


def _folder(text: str) -> str:
    if not text.removeprefix("file://").strip() or "://" in text.removeprefix("file://"):
        raise Unfit.build("OPTION_VALUE.WAREHOUSE_LOCAL", text=text)
    return absolute(text)


def _parts(text: str) -> tuple[Part, ...]:
    parts = []
    for written in re.split(r",(?![^(]*\))", text):
        match = _PART.fullmatch(written.strip())
        word, number, column = match.group("word", "number", "column") if match else (None, None, None)
        entire = match is not None and (word is None) == (")" not in written)
        if entire and word is None:
            parts.append(Part(str(column), "identity"))
        elif entire and word in _TRANSFORMS and number is None:
            parts.append(Part(str(column), _TRANSFORMS[word]))
        elif entire and word in _COUNTED and number is not None and int(number) > 0:
            parts.append(Part(str(column), f"{word}[{int(number)}]"))
        else:
            raise Unfit.build("OPTION_VALUE.PARTITION_TRANSFORM", text=text, transform=written.strip())
    if len({part.name for part in parts}) != len(parts):
        raise Unfit.build("OPTION_VALUE.DUPLICATES", text=text)
    return tuple(parts)


def _uri(text: str) -> str:
    if text.startswith(("http://", "https://")):
        split_url(text)
    return text


_URI = Option("catalog.uri", "", type=OptionType(_uri), example="https://catalog.example:8181")


def _catalog(owner: str, values: Mapping[str, str]) -> dict[str, str]:
    catalog = {k.removeprefix("catalog."): v for k, v in values.items() if k.startswith("catalog.")}
    if ("warehouse" in values) == ("uri" in catalog):
        raise UsageError("OPTION_VALUE.CATALOG", owner=owner)
    if "py-io-impl" in catalog:
        raise UsageError("OPTION_VALUE.FILE_IO", owner=owner)
    if "warehouse" in values:
        folder = _WAREHOUSE.parse(owner, values["warehouse"])
        embedded = {"type": "sql", "uri": f"sqlite:///{folder}/{DATABASE}", "warehouse": f"file://{folder}"}
        if "warehouse" in catalog:
            first, second = "warehouse", "catalog.warehouse"
            raise UsageError("OPTION_CONFLICT.SAME", owner=owner, first=first, second=second, name=first)
        catalog = {**embedded, **catalog}
    _URI.parse(owner, catalog["uri"])
    check_endpoints(owner, "catalog.", catalog, storage_environment(catalog.get("warehouse", "")))
    kind = catalog.get("type", "rest" if catalog["uri"].startswith(("http://", "https://")) else "sql")
    return {**catalog, "type": CATALOGS.parse(owner, "catalog.type", kind)}


_WAREHOUSE = Option(
    "warehouse",
    "Local folder with an embedded catalog, created if missing; alternatively set catalog.uri.",
    type=OptionType(_folder),
    example="/data/lake",
)


class IcebergOptions(FileTableOptions, owner="delivered_iceberg sink"):
    """
    Attributes:
        identifier: namespace and name of the table.
        catalog: properties of the catalog, without the prefix; values may be references to secrets.
        warehouse: folder of the embedded catalog, absolute; None: another catalog.
    """

    identifier: tuple[str, ...] = option(
        "table", "Table with its namespace: shop.orders.", OptionType(_identifier), example="shop.orders"
    )
    catalog: Mapping[str, str] = several(_catalog, passthrough=("catalog.",), secret=True)
    warehouse: str | None = several(
        lambda owner, values: _WAREHOUSE.parse(owner, values["warehouse"]) if "warehouse" in values else None,
        _WAREHOUSE,
    )
    catalog_name: str = option(
        "catalogName", "Name of the catalog; SQL catalogs separate tables by it.", default="default"
    )
    partition_by: tuple[Part, ...] | None = option(
        "partitionBy",
        "Comma-separated partition columns and transforms of a new table: region, days(at), bucket(16, id), "
        "truncate(4, code).",
        OptionType(_parts),
        default=None,
        example="days(at)",
    )
    compression: str = compression_option("zstd", "snappy")

    def check(self, owner: str) -> None:
        """Raise UsageError for a name that the embedded catalog cannot make a folder of: it is part of a URI."""
        wrong = [n for n in self.identifier if _NO_FOLDER.search(n) or len(n.encode()) > _FOLDER_BYTES_MAX]
        if wrong and self.warehouse is not None:
            raise UsageError(
                "OPTION_VALUE.FOLDER_NAME",
                owner=owner,
                table=self.table,
                name=wrong[0],
                folder_bytes_max=_FOLDER_BYTES_MAX,
            )

    @property
    def in_clear(self) -> tuple[str, ...]:
        urls = [self.catalog["uri"], self.catalog.get("oauth2-server-uri", "")]
        hosts = [urlsplit(url).hostname for url in urls if url.lower().startswith("http://")]
        far = next((host for host in hosts if not is_loopback(host)), None)
        stores = {k: v for k, v in self.catalog.items() if k != "oauth2-server-uri"}
        found = endpoints_in_clear("catalog.", stores, storage_environment(self.catalog.get("warehouse", "")))
        if far is None or self.catalog.keys().isdisjoint(("token", "credential")):
            return found
        return (f"the login of the catalog is sent in clear to {far}; write https://", *found)

    @property
    def namespace(self) -> tuple[str, ...]:
        return self.identifier[:-1]

    @property
    def name(self) -> str:
        return self.identifier[-1]

    @property
    def table(self) -> str:
        return ".".join(self.identifier)

    @property
    def where(self) -> str:
        return f"{self.table!r} of the catalog {self.warehouse or self.catalog.get('uri', '')!r}"

    @property
    def local(self) -> bool:
        return self.warehouse is not None

    @property
    def sink_name(self) -> str:
        """The table's name. Each table has its own ledger, whatever the name."""
        return sink_name(self.table)

    def catalog_resolved(self) -> dict[str, str]:
        """Properties for the client with secrets resolved; use at once, do not keep. `file://` is a URL here."""
        return {
            key: value if value.startswith("file://") else resolve_secret(f"catalog.{key}", value)
            for key, value in self.catalog.items()
        }


CONNECTOR = Connector(
    "iceberg",
    "iceberg",
    sinks=Factory(IcebergOptions, "delivered.connectors.iceberg.sink:IcebergSink"),
    transactions="",
    instead='read an Iceberg table with format("iceberg"), or a log with delivered_log',
)
