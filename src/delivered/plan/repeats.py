"""What a plan says of `dedup`: what is known again, what is forgotten, what that costs."""

from __future__ import annotations

from delivered.model.dedup import Dedup
from delivered.model.limits import STATE_BYTES_PER_KEY


def says(dedup: Dedup) -> tuple[str, ...]:
    """One line for each thing worth knowing before the start."""
    twice = Dedup(dedup.by, 2 * dedup.within_ms).within
    return (
        f"by {dedup.by_text}, before the transform: a record whose {dedup.time} is at most {dedup.within} after that "
        "of the first one of its key is dropped, under every guarantee; the audit counts it, and does not miss it",
        f"forgets: a repeat that comes later than {dedup.within} after the first is a new record as soon as the newest "
        f"{dedup.time} of the batches before is {twice} past the first one's",
        f"late: a record more than {dedup.within} older than the newest of the batches before it is dropped, also if "
        "it is the first of its key; one time in the future makes all that follow late",
        "a record without a key (one of the expressions is null) is no repeat of any other",
        f"state: about {STATE_BYTES_PER_KEY} bytes of executor memory for a key of 36 characters, for every key of the "
        f"last {twice} by {dedup.time}; all rows are shuffled by key",
    )
