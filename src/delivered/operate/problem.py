"""What is wrong with a pipeline, and what fixes it."""

from __future__ import annotations

from dataclasses import dataclass

from delivered.model.errors import PREFIX, texts

_NAMES = ("id", "sink", "source")
"""Values of a text that say what it is about."""


@dataclass(frozen=True)
class Problem:
    """
    Attributes:
        code: of an error, or DELIVERED_ and one of TRANSACTION_ORPHANED, TRANSACTION_UNAPPLIED, TRANSACTION_OLD,
            TRANSACTION_HANGING, TRANSACTION_BLOCKS, STALLED, STOPPED_WITH_LAG, FALLING_BEHIND, RUN_FAILED,
            DEAD_LETTERS, RECEIVER_GONE, DEDUP_WINDOW_SHORT, AUDIT_BROKEN, RECORDS_GIVEN_UP, AUDIT_NOT_RUN, SEAL_OLD,
            SEAL_BROKEN, SEALS_CHANGED, SEALS_AHEAD, UNSEALED_EXPIRING, UNSEALED_EXPIRED; or of a finding that would
            refuse a start now.
        next_step: what fixes it.
        about: what has it, if a pipeline may have several of a code: a transaction, sink or source.
    """

    code: str
    text: str
    next_step: str | None
    about: str = ""

    @classmethod
    def build(cls, code: str, **values: object) -> Problem:
        """With the texts of the catalogue; `code` with its condition, without the prefix."""
        text, next_step = texts(code, values)
        about = next((str(values[name]) for name in _NAMES if values.get(name)), "")
        return cls(PREFIX + code.partition(".")[0], text, next_step, about)

    @property
    def is_unanswered(self) -> bool:
        """Something did not answer."""
        return self.code.endswith(("UNREACHABLE", "NO_ANSWER", "UNREADABLE", "LOGIN", "CREDENTIALS"))
