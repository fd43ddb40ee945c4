"""What happens to a row that is invalid for a sink."""

from __future__ import annotations

from enum import StrEnum


class OnBadRow(StrEnum):
    """The pipeline's choice."""

    FAIL = "fail"
    """The query stops; nothing of the batch counts."""
    DEAD_LETTER = "dead_letter"
    """The row goes to the dead-letter sink, in the same batch, with the reason and its source coordinates."""
    DROP = "drop"
    """at_most_once: the row is dropped and counted as given up."""
