"""Options of `delivered_iceberg`, checked once and frozen."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from delivered.kits.sql.options import MODE_OPTIONS, parse_mode
from delivered.model.capability import APPEND, WriteMode
from delivered.model.errors import UsageError
from delivered.model.limits import NAME_LENGTH_MAX
from delivered.model.options import Option, OptionTable, choice, flag, resolve_secret

OWNER = "delivered_iceberg sink"
COMPRESSIONS = ("zstd", "snappy", "none")
CATALOGS = ("sql", "rest")
MODES = ["append", "overwrite", "upsert"]
DATABASE = "catalog.db"
"""The embedded catalog's file in the warehouse's folder."""

SINK_OPTIONS = OptionTable(
    OWNER,
    (
        Option("table", "The table with its namespace: shop.orders.", required=True),
        Option("warehouse", "A local folder with an embedded catalog in it, made if it is not there; or catalog.uri."),
        Option("catalogName", "The catalog's name: SQL catalogs keep tables apart by it.", "default"),
        Option("ifNotExists", "Whether a missing table is created from the rows' schema.", "true"),
        Option(
            "partitionBy",
            "Columns and transforms, with commas between, by which a table that is created is partitioned: "
            "region, days(at), bucket(16, id), truncate(4, code).",
        ),
        Option("mergeSchema", "Whether columns that the table lacks are added, before the first batch.", "false"),
        Option("compression", "zstd, snappy or none: of the data files.", "zstd"),
        Option(
            "mode",
            "append; overwrite: a batch replaces what the table has in its partitions; upsert: a row replaces the one "
            "of its key.",
            "append",
        ),
        *(o for o in MODE_OPTIONS if o.name != "mode"),
    ),
    passthrough=("catalog.",),
)  # fmt: skip

_PART = re.compile(r"(?:(?P<word>[A-Za-z]+)\(\s*(?:(?P<number>\d+)\s*,\s*)?)?(?P<column>[^(),\s]+)\s*\)?")
_TRANSFORMS = {"years": "year", "months": "month", "days": "day", "hours": "hour"}
_COUNTED = {"bucket", "truncate"}


@dataclass(frozen=True)
class Part:
    """One field of a partition spec that the user asked for.

    Attributes:
        transform: as Iceberg spells it: "identity", "day", "bucket[16]".
    """

    column: str
    transform: str

    @property
    def name(self) -> str:
        """As Iceberg's own clients name the field."""
        word = self.transform.partition("[")[0]
        return self.column if word == "identity" else f"{self.column}_{word.replace('truncate', 'trunc')}"


@dataclass(frozen=True)
class IcebergOptions:
    """
    Attributes:
        namespace, name: of the table.
        partition_by: None: not named; as the table is.
        catalog: properties of the catalog, without the prefix; values may be references to secrets.
        warehouse: the embedded catalog's folder, absolute; None: another catalog.
    """

    namespace: tuple[str, ...]
    name: str
    catalog: Mapping[str, str] = field(repr=False)
    catalog_name: str = "default"
    warehouse: str | None = None
    create: bool = True
    partition_by: tuple[Part, ...] | None = None
    compression: str = "zstd"
    write: WriteMode = APPEND
    merge_schema: bool = False

    @property
    def appending(self) -> IcebergOptions:
        """The same table, as files of it are written."""
        return replace(self, write=APPEND)

    @property
    def identifier(self) -> tuple[str, ...]:
        return (*self.namespace, self.name)

    @property
    def table(self) -> str:
        return ".".join(self.identifier)

    @property
    def where(self) -> str:
        """For errors: the table and its catalog."""
        return f"{self.table!r} of the catalog {self.warehouse or self.catalog.get('uri', '')!r}"

    @property
    def local(self) -> bool:
        return self.warehouse is not None

    @property
    def sink_name(self) -> str:
        """The table's name, made fit for a sink's name. Each table has its own ledger, whatever the name."""
        plain = re.sub(r"[^A-Za-z0-9._-]", "_", self.table)[: NAME_LENGTH_MAX - 9]
        if plain == self.table:
            return plain
        return f"{plain}-{hashlib.blake2b(self.table.encode(), digest_size=4).hexdigest()}"

    def catalog_resolved(self) -> dict[str, str]:
        """Properties for the client, secrets filled in; use at once, do not keep. `file://` is a URL, not a secret."""
        return {
            key: value if value.startswith("file://") else resolve_secret(f"catalog.{key}", value)
            for key, value in self.catalog.items()
        }


def parse(given: Mapping[str, str]) -> IcebergOptions:
    """
    Raises:
        UsageError: unknown option, missing one, or a value out of bounds.
    """
    options = SINK_OPTIONS.restore(given)
    names = tuple(part.strip() for part in options["table"].split("."))
    if len(names) < 2 or not all(names):
        raise UsageError(
            "OPTION_VALUE",
            f"{OWNER}: option 'table' is {options['table']!r}; it must name the table and its namespace.",
            next_step='write .option("table", "shop.orders")',
        )
    catalog = {k.removeprefix("catalog."): v for k, v in options.items() if k.startswith("catalog.")}
    warehouse = options.get("warehouse")
    if (warehouse is None) == ("uri" not in catalog):
        raise UsageError(
            "OPTION_VALUE",
            f"{OWNER}: it takes either 'warehouse', a local folder, or 'catalog.uri' with what else the catalog needs.",
            next_step='write .option("warehouse", "/data/lake"), or .option("catalog.type", "rest") and '
            '.option("catalog.uri", ...)',
        )
    if warehouse is not None:
        warehouse = _folder(warehouse)
        catalog = {
            "type": "sql",
            "uri": f"sqlite:///{warehouse}/{DATABASE}",
            "warehouse": f"file://{warehouse}",
            **catalog,
        }
    if "py-io-impl" in catalog:
        raise UsageError(
            "OPTION_VALUE",
            f"{OWNER}: option 'catalog.py-io-impl' cannot be set: the sink lists, syncs and removes its files by its "
            "own one, over Arrow's file systems.",
            next_step="take the option out",
        )
    catalog["type"] = choice(OWNER, "catalog.type", catalog.get("type", _kind(catalog.get("uri", ""))), CATALOGS)
    return IcebergOptions(
        namespace=names[:-1],
        name=names[-1],
        catalog=catalog,
        catalog_name=options.get("catalogName", "default"),
        warehouse=warehouse,
        create=flag(OWNER, "ifNotExists", options.get("ifNotExists", "true")),
        partition_by=_parts(options.get("partitionBy")),
        compression=choice(OWNER, "compression", options.get("compression", "zstd"), COMPRESSIONS),
        write=_mode(options),
        merge_schema=flag(OWNER, "mergeSchema", options.get("mergeSchema", "false")),
    )


def _mode(options: Mapping[str, str]) -> WriteMode:
    mode = choice(OWNER, "mode", options.get("mode", "append"), MODES)
    if mode != "overwrite":
        return parse_mode(OWNER, options)
    partitions = options.get("partitionBy", "").strip()
    given = [n for n in ("keyColumns", "versionColumn", "deleteColumn") if n in options]
    if not partitions or given:
        raise UsageError(
            "OPTION_VALUE",
            f"{OWNER}: mode overwrite replaces whole partitions: it needs 'partitionBy'"
            f"{f', and takes no {given[0]!r}' if given else ''}.",
            next_step='write .option("partitionBy", ...), or .option("mode", "upsert") to replace rows by key',
        )
    return WriteMode(replaces=tuple(p.strip() for p in re.split(r",(?![^(]*\))", partitions)))


def _kind(uri: str) -> str:
    return "rest" if uri.startswith(("http://", "https://")) else "sql"


def _folder(text: str) -> str:
    path = text.removeprefix("file://")
    if not path.strip() or "://" in path:
        raise UsageError(
            "OPTION_VALUE",
            f"{OWNER}: option 'warehouse' is {text!r}; it must be a local folder. The warehouse of another catalog is "
            "'catalog.warehouse'.",
            next_step='name a folder, or write .option("catalog.uri", ...) and .option("catalog.warehouse", ...)',
        )
    return str(Path(path).expanduser().absolute())


def _parts(text: str | None) -> tuple[Part, ...] | None:
    if text is None:
        return None
    found = []
    for written in re.split(r",(?![^(]*\))", text):
        match = _PART.fullmatch(written.strip())
        word, number, column = match.group("word", "number", "column") if match else (None, None, None)
        whole = match is not None and (word is None) == (")" not in written)
        if whole and word is None:
            found.append(Part(str(column), "identity"))
        elif whole and word in _TRANSFORMS and number is None:
            found.append(Part(str(column), _TRANSFORMS[word]))
        elif whole and word in _COUNTED and number is not None and int(number) > 0:
            found.append(Part(str(column), f"{word}[{int(number)}]"))
        else:
            raise UsageError(
                "OPTION_VALUE",
                f"{OWNER}: option 'partitionBy' is {text!r}; {written.strip()!r} is neither a column nor one of "
                "years(column), months(column), days(column), hours(column), bucket(16, column), truncate(4, column).",
            )
    if len({part.name for part in found}) != len(found):
        raise UsageError("OPTION_VALUE", f"{OWNER}: option 'partitionBy' is {text!r}; it names something twice.")
    return tuple(found)
