"""Format versions of durable records: older formats are read, newer ones are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from delivered.model.errors import Refused

FORMAT = 2
"""Format of records written by this version.

0: records without one, from before formats were numbered. 2: decisions and begun batches have a sequence. A release
without it would order them by time."""
LOG_FORMAT = 1
"""Of receivers' logs."""
KEY = "format"
LOG_PROPERTY = "delivered.format"
"""Table property with the format of a receiver's log."""


def numbered(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record as written: its format first."""
    return {KEY: FORMAT, **record}


def known(record: Mapping[str, Any], what: str) -> dict[str, Any]:
    """A record as read, without its format.

    Args:
        what: the record, for the error: "a decision", "a marker".

    Raises:
        Refused: a later version of this package wrote it.
    """
    fields = dict(record)
    check_format(fields.pop(KEY, 0), what)
    return fields


def check_format(version: Any, what: str, newest: int = FORMAT) -> None:
    """
    Raises:
        Refused: this version cannot be read here.
    """
    if not isinstance(version, int) or not 0 <= version <= newest:
        raise Refused(
            "FORMAT_NEWER",
            f"The pipeline's state holds {what} in format {version!r}; this version of delivered reads formats up to "
            f"{newest}. Nothing was changed.",
            next_step="run the pipeline with the version of delivered that wrote it, or a later one",
        )
