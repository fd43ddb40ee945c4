"""The three guarantees, as a reader of the sink can observe them."""

from __future__ import annotations

from enum import StrEnum

from delivered.model.errors import UsageError


class Guarantee(StrEnum):
    """What a pipeline guarantees about its records in a sink. There is no default."""

    AT_MOST_ONCE = "at_most_once"
    AT_LEAST_ONCE = "at_least_once"
    EXACTLY_ONCE = "exactly_once"

    @classmethod
    def parse(cls, text: str | Guarantee | None) -> Guarantee:
        """Read a guarantee from an option's value.

        Raises:
            UsageError: `text` is missing or names none of the three.
        """
        known = ", ".join(g.value for g in cls)
        if text is None:
            raise UsageError("GUARANTEE_MISSING", known=known)
        try:
            return cls(str(text).strip().lower())
        except ValueError:
            raise UsageError("GUARANTEE_UNKNOWN", text=text, known=known) from None

    @property
    def may_lose(self) -> bool:
        return self is Guarantee.AT_MOST_ONCE

    @property
    def may_duplicate(self) -> bool:
        return self is Guarantee.AT_LEAST_ONCE
