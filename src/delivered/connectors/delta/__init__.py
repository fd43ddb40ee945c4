"""Delta Lake as a sink, using the package `deltalake`, without a JAR: a batch is one commit of the table's log."""

from __future__ import annotations

import re
from collections.abc import Mapping

from delivered.contract.connector import Connector, Factory
from delivered.kits.options import PATH, sink_name, store_in_clear
from delivered.kits.table import FileTableOptions, compression_option
from delivered.model.errors import UsageError
from delivered.model.options import OptionType, Unfit, check_storage, option, prefixed, resolve_secrets

_NO_PATH = re.compile(r"[\\\x00-\x1f\x7f]")


def _columns(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names or len(set(names)) != len(names):
        raise Unfit.build("OPTION_VALUE.DISTINCT_COLUMNS", text=text)
    return names


class DeltaOptions(FileTableOptions, owner="delivered_delta sink"):
    """
    Attributes:
        path: absolute if the table is a local folder.
        storage: options of the object store client; values may be references to secrets.
    """

    path: str = option(
        "path", "Folder of the table, or its URL in an object store: s3://bucket/orders.", PATH, example="/data/orders"
    )
    partition_by: tuple[str, ...] | None = option(
        "partitionBy",
        "Comma-separated partition columns of a new table.",
        OptionType(_columns),
        default=None,
        example="day",
    )
    compression: str = compression_option("snappy", "zstd")
    storage: Mapping[str, str] = prefixed("storage.")

    def check(self, owner: str) -> None:
        """Raise UsageError for a path or endpoint that Delta's client cannot open, and Refused for a storage option
        that disables the protection against concurrent drivers."""
        if _NO_PATH.search(self.path):
            raise UsageError("OPTION_VALUE.DELTA_PATH", owner=owner, path=self.path)
        check_storage(owner, self.path, self.storage)

    @property
    def in_clear(self) -> tuple[str, ...]:
        return store_in_clear(self.path, self.storage)

    @property
    def local(self) -> bool:
        return "://" not in self.path

    @property
    def where(self) -> str:
        return f"at {self.path!r}"

    @property
    def sink_name(self) -> str:
        """The last part of the path. Each table has its own ledger, whatever the name."""
        return sink_name(self.path.rstrip("/").rsplit("/", 1)[-1])

    def storage_resolved(self) -> dict[str, str]:
        """Options for the object store client with secrets resolved; use at once, do not keep."""
        return resolve_secrets("storage.", self.storage)


CONNECTOR = Connector(
    "delta",
    "delta",
    sinks=Factory(DeltaOptions, "delivered.connectors.delta.sink:DeltaSink"),
    transactions="",
    instead='read a Delta table with format("delta"), or a log with delivered_log',
)
