"""Modes of writing that take files of a table away."""

from __future__ import annotations

from delivered.contract.finding import Finding
from delivered.model.capability import APPEND, WriteMode
from delivered.model.guarantee import Guarantee


def refused(mode: WriteMode, guarantee: Guarantee) -> Finding | None:
    """Why a mode cannot be had under a guarantee, if so."""
    if mode == APPEND or guarantee is Guarantee.EXACTLY_ONCE:
        return None
    return Finding(
        "MODE_GUARANTEE",
        f"Mode {'upsert' if mode.upserts else 'overwrite'} takes files of the table away, and under "
        f"{guarantee.value} each task would do so for itself: they would meet at the same files.",
        True,
        "choose exactly_once, where one commit does it for all shards",
    )
