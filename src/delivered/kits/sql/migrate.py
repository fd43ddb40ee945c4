"""The version of the ledger's tables."""

from __future__ import annotations

from delivered.model.errors import UsageError


def is_newest(version: int, known: int, ledger: str) -> bool:
    """Whether the tables need no migration.

    Args:
        ledger: as it stands in a sentence: "in schema 'delivered'".

    Raises:
        UsageError: a newer version of this package wrote them.
    """
    if version > known:
        raise UsageError(
            "LEDGER_NEWER",
            f"The ledger {ledger} has version {version}; this version of delivered knows {known}.",
            next_step="pip install --upgrade delivered",
        )
    return version == known
