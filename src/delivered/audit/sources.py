"""A pipeline's sources as one: offsets and slices of each, by name. Queries the sources; does not use Spark."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from delivered.contract.source import Offsets, Slice, SourceDriver
from delivered.model.errors import DeliveredError
from delivered.model.identity import SOURCE, by_source

Positions = dict[str, Offsets]
"""Offsets by source."""


def parsed(text: str) -> Positions:
    """The offsets of a batch, as stored in the ledger and Spark's offset log."""
    return {name: json.loads(offsets) for name, offsets in by_source(text).items()}


def plain(positions: Positions) -> dict[str, Any]:
    """For reports: offsets of a single unnamed source appear alone."""
    return positions[SOURCE] if list(positions) == [SOURCE] else positions


class SourceSet:
    """The drivers of all sources.

    Args:
        first: where each source's first batch began: the default for sources missing from a range's start.
    """

    def __init__(self, drivers: Mapping[str, SourceDriver], first: Mapping[str, Offsets | None]) -> None:
        self._drivers = drivers
        self.unknown = [n for n, offsets in first.items() if offsets is None]
        self.first: Positions = {n: drivers[n].initial() if at is None else at for n, at in first.items()}

    def newest(self) -> Positions:
        """The current ends. Raises DeliveredError: a source has none."""
        ends = {name: driver.newest() for name, driver in self._drivers.items()}
        found = {name: end for name, end in ends.items() if end is not None}
        if len(found) < len(ends):
            raise DeliveredError(
                "AUDIT_SOURCES",
                f"The end of {', '.join(ends.keys() - found.keys())} is not known.",
                next_step="run the audit again; if it stays, read the error above it",
            )
        return found

    def slices(self, start: Positions, end: Positions) -> list[Slice]:
        """Slices whose data is (name of the source, its slice).

        Raises:
            DeliveredError: the range names a source that the pipeline does not have.
        """
        strange = sorted(end.keys() - self._drivers.keys())
        if strange:
            raise DeliveredError(
                "AUDIT_SOURCES",
                f"The pipeline's batches read the sources {', '.join(end)}, but it now has {', '.join(self._drivers)}.",
                next_step="audit with the sources that the pipeline ran with",
            )
        slices = []
        for name in (n for n in self._drivers if n in end):
            prefix = "" if name == SOURCE else f"{name} "
            for piece in self._drivers[name].slices(start.get(name, self.first[name]), end[name]):
                slices.append(Slice((name, piece), prefix + piece.partition if piece.partition else ""))
        return slices

    def close(self) -> None:
        for driver in self._drivers.values():
            driver.close()


def of_source(slices: Sequence[Slice], name: str) -> list[Slice]:
    """The slices of one source."""
    return [s.data[1] for s in slices if s.data[0] == name]
