"""Shared code of connectors to table formats and folders of files; their options."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

from delivered.kits.options import COMPLETE_DOC, UPSERT_OPTIONS, if_not_exists, merge_schema, parse_mode
from delivered.model.capability import APPEND, WriteMode
from delivered.model.options import Option, Options, choice, option, several

MODES = ("append", "overwrite", "upsert", "complete")


class FileTableOptions(Options):
    """
    Attributes:
        partition_by: None: as the table is partitioned.
        write: for overwrite, `replaces` is the value of partitionBy.
    """

    create: bool = if_not_exists(default=True)
    merge_schema: bool = merge_schema("before the first batch")
    partition_by: tuple[Any, ...] | None
    compression: str
    write: WriteMode = several(
        lambda owner, values: parse_mode(owner, values, MODES),
        Option(
            "mode",
            "append; overwrite: a batch replaces the partitions that it has rows in; upsert: a row replaces the stored "
            f"row with the same key; {COMPLETE_DOC}.",
            "append",
        ),
        *UPSERT_OPTIONS,
        default=APPEND,
    )

    @property
    def where(self) -> str:
        """For errors, after "the table"."""
        raise NotImplementedError

    @property
    def local(self) -> bool:
        """Whether its files are on a local disk."""
        raise NotImplementedError

    @property
    def appending(self) -> Self:
        """The same options with mode append, as data files are written."""
        return replace(self, write=APPEND)


def compression_option(first: str, *others: str) -> Any:
    """The first codec is the default; "none" is always allowed."""
    allowed = (first, *others, "none")
    return option(
        "compression", f"Codec of the data files: {first}, {', '.join(others)} or none.", choice(allowed), default=first
    )
