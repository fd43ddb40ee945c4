"""An optional protocol of source drivers: telling one history of a source from another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from delivered.contract.source import Offsets


@runtime_checkable
class HasLandmarks(Protocol):
    """A source driver that can describe the records right before a position.

    Where a source was restored from an older copy, or deleted and recreated, other records may have the positions that
    were read. A landmark shows it where positions do not.
    """

    def landmarks(self, at: Offsets) -> Mapping[str, str]:
        """Partition -> description of its last record before `at`, which another history would not have.

        The same for as long as the record exists; a partition without one is absent. Runs on the driver; read-only.
        Raises Unreachable, UsageError.
        """

    def check_landmarks(self, at: Offsets, known: Mapping[str, str]) -> None:
        """Compare what `landmarks(at)` returned at an earlier start with what the source has now.

        Raises InvariantBroken if another record is there, and the options say to stop; else logs a warning. A record
        that is missing proves nothing here: retention or compaction may have removed it.

        The identity in `at` (a topic's or a table's id, a server's), if the source has one, is compared first, and then
        epochs: what was recreated has other records too, and the user is told of the cause. A difference that `latest`
        and `slices` report is left to them.
        """
