"""What stands right before a stream's position, kept in the checkpoint sidecar and compared at each start.

A source that was restored from an older copy, or deleted and recreated, may have grown past the position: offsets alone
do not show that the records before it are others. Landmarks are kept now and then, so an ordinary batch costs nothing.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from delivered.checkpoint import folder
from delivered.contract.landmarks import HasLandmarks
from delivered.contract.source import Offsets, SourceDriver
from delivered.model.errors import DeliveredError, InvariantBroken
from delivered.model.offsets import SOURCE, is_ahead

FILE = "delivered/landmarks.json"

log = logging.getLogger("delivered")


class Landmarks:
    """Of one stream, in one process.

    Args:
        location: of the checkpoint; None: unknown, and nothing is kept.
        name: of the source.
    """

    def __init__(self, location: str | None, name: str = SOURCE) -> None:
        self._location = location
        self._file = folder.sidecar(FILE, name)
        self._checked = False
        self._known: tuple[Offsets, dict[str, str]] | None = None
        self._kept_s = float("-inf")

    def check(self, driver: SourceDriver, position: Offsets) -> None:
        """Compare, once in a process. Nothing is compared if the checkpoint was restored to an earlier position.

        Raises:
            InvariantBroken: the source has other records before the position now, and the user wants to be stopped.
        """
        if self._checked or self._location is None or not isinstance(driver, HasLandmarks):
            return
        record = folder.read_record(
            self._location, self._file, "the landmarks of a source's offsets", _fields, "LANDMARKS_DAMAGED",
            without="without it, a source that was restored from an older copy may not be detected",
        )  # fmt: skip
        if record is not None and not is_ahead(record[0], position):
            driver.check_landmarks(*record)
            self._known = record
        self._checked = True

    def keep(self, driver: SourceDriver, position: Offsets, every_s: float) -> None:
        """Keep those of a position that Spark has logged, unless it did so less than `every_s` ago.

        The earlier ones are compared for the last time.

        Raises:
            InvariantBroken: as `check`.
        """
        if self._location is None or not isinstance(driver, HasLandmarks):
            return
        if self._known is not None and self._known[0] == position:
            return
        if time.monotonic() - self._kept_s < every_s:
            return
        self._kept_s = time.monotonic()
        try:
            if self._known is not None:
                driver.check_landmarks(*self._known)
            found = dict(driver.landmarks(position))
            if found:
                folder.write_record(self._location, self._file, {"offsets": position, "landmarks": found})
            self._known = position, found
        except InvariantBroken:
            raise
        except DeliveredError as error:
            # Without them the stream is as correct as before, and a later position has others.
            log.warning("landmarks of the source's position were not kept: %s", error)


def _fields(found: dict[str, Any]) -> tuple[Offsets, dict[str, str]]:
    return dict(found["offsets"]), {str(k): str(v) for k, v in found["landmarks"].items()}
