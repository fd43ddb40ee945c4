"""Shares of the keys of a table: which one an audit compares, and how likely it finds wrong keys. Pure.

A table of one row per key, or of aggregates, has no part that is finished: any batch may change any row. So its audit
cannot continue where the last one stopped. Instead it can compare a share of the keys, by their hash, with the complete
source: another share each time.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from delivered.audit.evidence import Counts
from delivered.model.errors import UsageError

SHARES_MAX = 1_000_000
_SHARE = re.compile(r"\s*(?P<fixed>#)?(?P<number>\d+)\s*/\s*(?P<of>[\d,_]+)\s*")
WRONG = (1, 10, 100, 1_000)
"""Numbers of wrong keys for which a report gives the probability."""


@dataclass(frozen=True)
class KeyShare:
    """One of `of` shares of all keys, of about the same size.

    Attributes:
        number: from 1 to `of`. 0: the one after the last that was compared.
    """

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> KeyShare:
        """From "1/1000": a thousandth of the keys, the next one; "7/1000" or "#1/1000": this one.

        Raises:
            UsageError: it is none of these.
        """
        found = _SHARE.fullmatch(text)
        if found is None:
            raise UsageError("AUDIT_KEYS.SHARE", text=text, shares_max=f"{SHARES_MAX:,}")
        number, of = int(found["number"]), int(re.sub("[,_]", "", found["of"]) or 0)
        if not 1 <= number <= of <= SHARES_MAX:
            raise UsageError("AUDIT_KEYS.SHARE", text=text, shares_max=f"{SHARES_MAX:,}")
        return cls(0 if number == 1 and not found["fixed"] else number, of)

    @property
    def text(self) -> str:
        """As `parse` reads it."""
        return f"#{self.number}/{self.of}" if self.number else f"1/{self.of}"

    def after(self, audits: Iterable[Mapping[str, Any]], sink: str, seed: str) -> KeyShare:
        """This share; if it has no number, the one after the newest that was compared.

        Args:
            audits: earlier ones, oldest first, as `checkpoint.history` keeps them.
            seed: chooses the first one: audits that are neither recorded nor sealed compare shares at random.
        """
        if self.number:
            return self
        kept = [a["keys"] for a in audits if a["sink"] == sink and a.get("keys", {}).get("of") == self.of]
        before = int(kept[-1]["share"]) if kept else int(hashlib.sha256(seed.encode()).hexdigest(), 16)
        return KeyShare(before % self.of + 1, self.of)

    def found(self, wrong: int) -> float:
        """The probability that this share has one of so many wrong keys, if what went wrong did not depend on the
        keys' hashes."""
        return 1 - (1 - 1 / self.of) ** wrong


@dataclass(frozen=True)
class KeyCheck:
    """What an audit compared of the keys.

    Attributes:
        compared: keys of this share, in the source or in the sink.
        selected: where rows of other keys were dropped, for display.
    """

    share: KeyShare
    compared: int = 0
    selected: str = ""

    @classmethod
    def of_counts(cls, share: KeyShare, counts: Counts, selected: str) -> KeyCheck:
        return cls(share, counts.sent + counts.unexpected + counts.duplicated, selected)

    @property
    def probabilities(self) -> dict[int, float]:
        """By number of wrong keys in the table."""
        return {wrong: self.share.found(wrong) for wrong in WRONG}

    def lines(self) -> list[str]:
        """For a report."""
        chances = ", ".join(f"{n:,}: {_percent(p)}" for n, p in self.probabilities.items())
        return [
            f"share {self.share.number:,} of {self.share.of:,} of the keys: {self.compared:,} keys compared, selected "
            f"{self.selected}; this one again: --keys '{self.share.text}'",
            f"probability that wrong keys would have been found, by their number in the table: {chances}",
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "share": self.share.number,
            "of": self.share.of,
            "compared": self.compared,
            "selected": self.selected,
            "probability_found": {str(n): round(p, 9) for n, p in self.probabilities.items()},
        }


def found_by(keys: Mapping[str, Any]) -> str:
    """What a seal of a share says of it, for display. Args: keys: as `KeyCheck.to_json`."""
    chance = _percent(KeyShare(keys["share"], keys["of"]).found(1))
    return (
        f"{keys['compared']:,} keys compared; a single wrong key would have been found with a probability of {chance}"
    )


def _percent(probability: float) -> str:
    text = f"{100 * probability:.3g}"
    return "> 99.9 %" if text == "100" and probability < 1 else f"{text} %"
