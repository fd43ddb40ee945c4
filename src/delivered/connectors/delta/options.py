"""Options of `delivered_delta`, checked once and frozen."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from delivered.kits.sql.options import MODE_OPTIONS, parse_mode
from delivered.model.capability import APPEND, WriteMode
from delivered.model.errors import Refused, UsageError
from delivered.model.limits import NAME_LENGTH_MAX
from delivered.model.options import Option, OptionTable, choice, flag, resolve_secret

OWNER = "delivered_delta sink"
MODES = ("append", "overwrite", "upsert")
COMPRESSIONS = ("snappy", "zstd", "none")

SINK_OPTIONS = OptionTable(
    OWNER,
    (
        Option("path", "The table's folder, or its URL in an object store: s3://bucket/orders.", required=True),
        Option("ifNotExists", "Whether a missing table is created from the rows' schema.", "true"),
        Option("partitionBy", "Columns, with commas between, by which a table that is created is partitioned."),
        Option("mergeSchema", "Whether columns that the table lacks are added to it before the first batch.", "false"),
        Option(
            "mode",
            "append; overwrite: a batch replaces what the table has in its partitions; upsert: a row replaces the one "
            "with the same key.",
            "append",
        ),
        *MODE_OPTIONS[1:],
        Option("compression", "snappy, zstd or none: of the data files.", "snappy"),
    ),
    passthrough=("storage.",),
)

_UNSAFE = {
    "aws_s3_allow_unsafe_rename": "true",
    "allow_unsafe_rename": "true",
    "aws_conditional_put": "disabled",
    "conditional_put": "disabled",
}
"""With these, two drivers could both believe that they wrote the same version of the log."""


@dataclass(frozen=True)
class DeltaOptions:
    """
    Attributes:
        path: absolute when the table is a local folder.
        partition_by: None: not named; as the table is.
        storage: options of the object store's client; values may be references to secrets.
    """

    path: str
    create: bool = True
    partition_by: tuple[str, ...] | None = None
    merge_schema: bool = False
    compression: str = "snappy"
    write: WriteMode = APPEND
    storage: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def appending(self) -> DeltaOptions:
        """The same table, as files of it are written."""
        return replace(self, write=APPEND)

    @property
    def local(self) -> bool:
        return "://" not in self.path

    @property
    def sink_name(self) -> str:
        """The last part of the path, made fit for a sink's name. Each table has its own ledger, whatever the name."""
        last = self.path.rstrip("/").rsplit("/", 1)[-1]
        plain = re.sub(r"[^A-Za-z0-9._-]", "_", last)[: NAME_LENGTH_MAX - 9]
        if plain == last:
            return plain
        return f"{plain}-{hashlib.blake2b(last.encode(), digest_size=4).hexdigest()}"

    def storage_resolved(self) -> dict[str, str]:
        """Options for the object store's client, secrets filled in; use at once, do not keep."""
        return {key: resolve_secret(f"storage.{key}", value) for key, value in self.storage.items()}


def parse(given: Mapping[str, str]) -> DeltaOptions:
    """
    Raises:
        UsageError: unknown option, missing path, or a value out of bounds.
        Refused: an option of the object store that takes away what keeps two drivers apart.
    """
    options = SINK_OPTIONS.restore(given)
    path = options["path"].removeprefix("file://")
    if not path.strip():
        raise UsageError("OPTION_VALUE", f"{OWNER}: option 'path' is empty.")
    storage = {k.removeprefix("storage."): v for k, v in options.items() if k.startswith("storage.")}
    for key, unsafe in _UNSAFE.items():
        if storage.get(key, "").lower() == unsafe:
            raise Refused(
                "COMMIT_UNSAFE",
                f"{OWNER}: option 'storage.{key}' is {unsafe!r}: two drivers could then write the same version of the "
                "table's log, and one of them would lose its batch.",
                next_step="take the option out; stores without conditional writes cannot hold this sink",
            )
    return DeltaOptions(
        path=path if "://" in path else str(Path(path).expanduser().absolute()),
        create=flag(OWNER, "ifNotExists", options.get("ifNotExists", "true")),
        partition_by=_columns(options.get("partitionBy")),
        merge_schema=flag(OWNER, "mergeSchema", options.get("mergeSchema", "false")),
        compression=choice(OWNER, "compression", options.get("compression", "snappy"), COMPRESSIONS),
        write=_mode(options),
        storage=storage,
    )


def _mode(options: Mapping[str, str]) -> WriteMode:
    if options.get("mode", "append").lower() != "overwrite":
        try:
            return parse_mode(OWNER, options)
        except UsageError as error:
            if error.code == "DELIVERED_OPTION_VALUE" and "mode" in error.message:
                choice(OWNER, "mode", options.get("mode", "append"), MODES)
            raise
    partitions = _columns(options.get("partitionBy"))
    given = [n for n in ("keyColumns", "versionColumn", "deleteColumn") if n in options]
    if partitions is None or given:
        raise UsageError(
            "OPTION_VALUE",
            f"{OWNER}: mode overwrite replaces whole partitions: it needs 'partitionBy'"
            f"{f', and takes no {given[0]!r}' if given else ''}.",
            next_step='write .option("partitionBy", ...), or .option("mode", "upsert") to replace rows by key',
        )
    return WriteMode(replaces=partitions)


def _columns(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names or len(set(names)) != len(names):
        raise UsageError(
            "OPTION_VALUE",
            f"{OWNER}: option 'partitionBy' is {text!r}; it must name columns, each once, with commas between.",
        )
    return names
