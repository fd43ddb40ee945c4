"""What becomes of a row that a sink refuses for itself."""

from __future__ import annotations

from enum import StrEnum


class OnBadRow(StrEnum):
    """The pipeline's choice."""

    FAIL = "fail"
    """The query stops, nothing of the batch counts."""
    DEAD_LETTER = "dead_letter"
    """The row goes to the dead-letter sink, in the same batch, with the reason and where it came from."""
    DROP = "drop"
    """at_most_once: the row is left out and counted as given up."""
