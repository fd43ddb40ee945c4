"""Options of a sink into a table of files."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

from delivered.kits.options import UPSERT_OPTIONS, if_not_exists, parse_mode
from delivered.model.capability import APPEND, WriteMode
from delivered.model.options import FLAG, Option, Options, choice, option, several

MODES = ("append", "overwrite", "upsert")


class FileTableOptions(Options):
    """
    Attributes:
        partition_by: None: not named; as the table is.
        write: of an overwrite, `replaces` is what partitionBy names, as it stands there.
    """

    create: bool = if_not_exists(default=True)
    merge_schema: bool = option(
        "mergeSchema",
        "Whether columns that the table lacks are added to it before the first batch.",
        FLAG,
        default=False,
    )
    partition_by: tuple[Any, ...] | None
    compression: str
    write: WriteMode = several(
        lambda owner, values: parse_mode(owner, values, MODES),
        Option(
            "mode",
            "append; overwrite: a batch replaces what the table has in its partitions; upsert: a row replaces the one "
            "with the same key.",
            "append",
        ),
        *UPSERT_OPTIONS,
        default=APPEND,
    )

    @property
    def where(self) -> str:
        """For errors, behind "the table"."""
        raise NotImplementedError

    @property
    def local(self) -> bool:
        """Whether its files lie on a local disk."""
        raise NotImplementedError

    @property
    def appending(self) -> Self:
        """The same table, as files of it are written."""
        return replace(self, write=APPEND)


def compression_option(first: str, *others: str) -> Any:
    """The first one is the default; "none" is always allowed."""
    allowed = (first, *others, "none")
    return option(
        "compression", f"{first}, {', '.join(others)} or none: of the data files.", choice(allowed), default=first
    )
