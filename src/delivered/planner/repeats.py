"""The plan's lines on `dedup`: which duplicates are recognised, which keys expire, and the cost."""

from __future__ import annotations

from delivered.model.dedup import Dedup
from delivered.model.limits import KEY_TABLE_BYTES, STATE_BYTES_PER_KEY


def says(dedup: Dedup, system: str = "") -> tuple[str, ...]:
    """One line for each thing worth knowing before the start.

    Args:
        system: of the sink that decides.
    """
    if dedup.in_table:
        return _says_of_table(dedup, system)
    twice = Dedup(dedup.by, 2 * dedup.within_ms).within
    return (
        f"by {dedup.by_text}, before the transform: under every guarantee, a record whose {dedup.time} is at most "
        f"{dedup.within} after that of its key's first record is dropped; the audit counts it and does not call it "
        "lost",
        f"forgets: a duplicate more than {dedup.within} after its key's first record is a new record once the newest "
        f"{dedup.time} of the previous batches is {twice} past that first record",
        f"late: a record more than {dedup.within} older than the newest of the previous batches is dropped, even if it "
        "is the first of its key; one timestamp in the future makes all later records late",
        "a record without a key (one of the expressions is null) is a duplicate of no other",
        f"state: about {STATE_BYTES_PER_KEY} bytes of executor memory per key of 36 characters, for every key of the "
        f"last {twice} by {dedup.time}; all rows are shuffled by key",
    )


def _says_of_table(dedup: Dedup, system: str) -> tuple[str, ...]:
    size = KEY_TABLE_BYTES.get(system, max(KEY_TABLE_BYTES.values()))
    return (
        f"by {dedup.by_text}, before the transform: under every guarantee, a record whose {dedup.time} is at most "
        f"{dedup.within} from that of a delivered record of its key is dropped; the audit counts it and does not call "
        "it lost",
        "kept in tables next to the ledger: a key counts as seen if and only if its batch is decided",
        f"forgets: a key whose {dedup.time} is more than {dedup.within} before the newest one that the previous "
        "batches delivered; a later duplicate is a new record. A timestamp in the future counts as now",
        "late: no record is dropped for being late",
        "a record without a key (one of the expressions is null) is a duplicate of no other",
        f"costs: about {size} bytes in the database for every key of the last {dedup.within} by {dedup.time}, whatever "
        "its length; each key is looked up once, written twice and deleted twice; all rows are shuffled by key and "
        "buffered in their task until it has seen all its keys",
    )
