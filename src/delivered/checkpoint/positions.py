"""What a checkpoint remembers of its sources: first offsets, their metadata, and what precedes a position."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from delivered.checkpoint import folder
from delivered.contract.landmarks import HasLandmarks
from delivered.contract.powers import HasOffsetMetadata
from delivered.contract.source import Offsets, Slice, Source, SourceDriver
from delivered.model.errors import DeliveredError, InvariantBroken
from delivered.model.limits import OFFSET_METADATA_MAX
from delivered.model.offsets import SOURCE, by_source, is_ahead

# A source's first offsets, stored in the checkpoint sidecar.
#
# Spark logs where a batch ends, but asks the source where batch 0 starts, also on a rerun. With startingOffsets
# "latest" the answer would change, and records in between would be lost. So the source's first start stores the
# offsets, and every later one uses them. The audit reads from there.

FIRST_FILE = "delivered/source-offsets.json"

_SPARKS_OWN = "sources/0/0"
"""First offsets of Spark's own Kafka source: a zero byte, a version line, the offsets as JSON."""


def kept_first(location: str, source: str = SOURCE) -> Offsets | None:
    """The first offsets stored by an earlier start, or by Spark's own Kafka source; None: none.

    Raises:
        InvariantBroken: the file is damaged.
        Unreachable: the checkpoint cannot be read.
    """
    file = folder.sidecar(FIRST_FILE, source)
    found = folder.read_record(
        location, file, "a source's first offsets", lambda found: dict(found["offsets"]), "SOURCE_OFFSETS_DAMAGED"
    )
    return _first_by_spark(location) if found is None and source == SOURCE else found


def is_ours(location: str) -> bool:
    """Whether a source of this package has stored first offsets here, under any name."""
    return folder.holds(location, "delivered", FIRST_FILE.rsplit("/", 1)[1])


def _first_by_spark(location: str) -> Offsets | None:
    text = folder.read(location, _SPARKS_OWN)
    if text is None:
        return None
    try:
        found = json.loads(text.lstrip(b"\0").split(b"\n", 1)[1])
    except (ValueError, IndexError):
        return None  # another source's, in its own format
    return found if isinstance(found, dict) else None


def keep_first(location: str, initial: Callable[[], Offsets], source: str = SOURCE) -> Offsets | None:
    """The start of a source's first batch, as stored by the first start; stored now if this is the first.

    Runs on the driver, before Spark logs that batch. May be called again: the first call wins. None: the checkpoint has
    batches of the source but no stored start, which may have changed since.

    Args:
        initial: asks the source.
    """
    found = kept_first(location, source)
    if found is not None or source in by_source(folder.newest_offsets(location)):
        return found
    offsets = initial()
    folder.write_record(location, folder.sidecar(FIRST_FILE, source), {"offsets": offsets}, first=True)
    # Another start may have been faster: the file's content counts.
    return kept_first(location, source) or offsets


# What stands right before a stream's position, kept in the checkpoint sidecar and compared at each start.
#
# A source that was restored from an older copy, or deleted and recreated, may have grown past the position: offsets
# alone do not show that the records before it are others. Landmarks are kept now and then, so an ordinary batch costs
# nothing.

LANDMARKS_FILE = "delivered/landmarks.json"

log = logging.getLogger("delivered")


class Landmarks:
    """Of one stream, in one process.

    Args:
        location: of the checkpoint; None: unknown, and nothing is kept.
        name: of the source.
    """

    def __init__(self, location: str | None, name: str = SOURCE) -> None:
        self._location = location
        self._file = folder.sidecar(LANDMARKS_FILE, name)
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


# Offset metadata that Spark's own connector cannot read, stored in the checkpoint sidecar.
#
# So Spark's offset log has the format of Spark's own connector, and either can continue from a checkpoint (decision
# 032). The metadata of an end offset is durable before Spark gets the offset: it never lags behind the log. It may
# lead: an offset that Spark never logged is superseded by the next one.

METADATA_FILE = "delivered/offset-metadata.json"


@dataclass(frozen=True)
class _Entry:
    at: Offsets
    metadata: Offsets


class OffsetMetadata:
    """The metadata of one stream's offsets, oldest first; one entry per change, not per batch.

    Args:
        location: of the checkpoint; None: unknown, and the metadata lives as long as this object.
        lasting: keys that apply to every offset from an entry on. Other keys apply to the entry's own offset.
        writes: False for an audit, which changes nothing.
        name: of the source.
    """

    def __init__(
        self,
        location: str | None,
        keys: frozenset[str],
        lasting: frozenset[str],
        *,
        writes: bool = True,
        name: str = SOURCE,
    ) -> None:
        self._file = folder.sidecar(METADATA_FILE, name)
        self._location = location
        self._writes = writes and location is not None
        self._keys = keys
        self._lasting = lasting
        self._entries: list[_Entry] | None = None

    def split(self, offsets: Offsets) -> tuple[Offsets, Offsets]:
        """Offsets in the format of Spark's own connector, and their metadata."""
        plain = {k: v for k, v in offsets.items() if k not in self._keys}
        return plain, {k: v for k, v in offsets.items() if k in self._keys}

    def joined(self, offsets: Offsets) -> Offsets:
        """Offsets with their metadata. Offsets logged by earlier versions contain it themselves."""
        plain, own = self.split(offsets)
        return offsets if own else {**plain, **self.find(plain)}

    def find(self, plain: Offsets) -> Offsets:
        """Metadata of offsets: of the newest entry at exactly these; else the lasting keys of the newest one before."""
        entries = self._loaded()
        for entry in reversed(entries):
            if entry.at == plain:
                return entry.metadata
        for entry in reversed(entries):
            if not is_ahead(entry.at, plain):
                return self._of_others(entry)
        return self.lasting()

    def lasting(self) -> Offsets:
        """The newest lasting metadata."""
        entries = self._loaded()
        return self._of_others(entries[-1]) if entries else {}

    def keep(self, plain: Offsets, metadata: Offsets, start: Offsets | None = None) -> None:
        """Store metadata, so that `find(plain)` returns it, in other processes too if the location is known.

        Args:
            start: plain offsets that precede `plain`. Until Spark logs `plain`, they are the stream's position and keep
                their metadata.

        Raises:
            Unreachable: the checkpoint cannot be written to.
        """
        if self.find(plain) == metadata:
            return
        if self._writes:
            self._entries = None  # another process may have written
        entries = list(self._loaded())
        if start is not None and start != plain:
            entries.append(_Entry(start, self.find(start)))
        entries = [*entries, _Entry(plain, metadata)][-OFFSET_METADATA_MAX:]
        if self._writes and self._location is not None:
            record = {"entries": [{"offsets": e.at, "metadata": e.metadata} for e in entries]}
            folder.write_record(self._location, self._file, record)
        self._entries = entries

    def _of_others(self, entry: _Entry) -> Offsets:
        return {k: v for k, v in entry.metadata.items() if k in self._lasting}

    def _loaded(self) -> list[_Entry]:
        if self._entries is None:
            self._entries = _read(self._location, self._file) if self._location is not None else []
        return self._entries


def _read(location: str, file: str) -> list[_Entry]:
    def entries(found: dict[str, Any]) -> list[_Entry]:
        return [_Entry(dict(entry["offsets"]), dict(entry["metadata"])) for entry in found["entries"]]

    lost = "without it a topic that was recreated while the query was stopped is not detected"
    what = "the metadata of a source's offsets"
    return folder.read_record(location, file, what, entries, "OFFSET_METADATA_DAMAGED", without=lost) or []


class PlainDriver:
    """A source's driver that takes and returns offsets in the format of Spark's own connector."""

    def __init__(self, driver: SourceDriver, metadata: OffsetMetadata) -> None:
        self._driver = driver
        self._metadata = metadata

    def initial(self) -> Offsets:
        return self._kept(self._driver.initial())

    def begun(self, offsets: Offsets) -> Offsets:
        """First offsets stored by an earlier start, perhaps with metadata."""
        plain, metadata = self._metadata.split(offsets)
        return self._kept(offsets) if metadata else plain

    def latest(self, start: Offsets, rows_max: int | None) -> Offsets:
        whole = self._metadata.joined(start)
        end = self._driver.latest(whole, rows_max)
        # Unchanged: another notation of the same position would create an empty batch.
        return start if end == whole else self._kept(end, self._metadata.split(start)[0])

    def bounded(self, end: Offsets, sooner: Offsets, start: Offsets) -> None:
        """A batch that starts at `start` ends sooner than `latest` said: what it knew of the end holds there, too."""
        self._metadata.keep(sooner, self._metadata.find(end), start)

    def newest(self) -> Offsets | None:
        newest = self._driver.newest()
        return None if newest is None else self._metadata.split(newest)[0]

    def freeze(self) -> None:
        self._driver.freeze()

    def slices(self, start: Offsets, end: Offsets) -> Sequence[Slice]:
        return self._driver.slices(self._metadata.joined(start), self._metadata.joined(end))

    def batch(self) -> tuple[Offsets, Offsets]:
        return self._driver.batch()

    def acknowledge(self, end: Offsets) -> None:
        self._driver.acknowledge(end)

    def landmarks(self, at: Offsets) -> Mapping[str, str]:
        return self._driver.landmarks(self._metadata.joined(at)) if isinstance(self._driver, HasLandmarks) else {}

    def check_landmarks(self, at: Offsets, known: Mapping[str, str]) -> None:
        if isinstance(self._driver, HasLandmarks):
            # The stream's first position may have none of its own.
            self._driver.check_landmarks({**self._metadata.lasting(), **self._metadata.joined(at)}, known)

    def close(self) -> None:
        self._driver.close()

    def _kept(self, offsets: Offsets, start: Offsets | None = None) -> Offsets:
        plain, metadata = self._metadata.split(offsets)
        self._metadata.keep(plain, metadata, start)
        return plain


def stream_driver(source: Source, location: str | None, *, writes: bool = True, name: str = SOURCE) -> SourceDriver:
    """The driver of a stream, for Spark's offset log.

    Args:
        location: of the checkpoint, as Spark spells it, if it is known.
        writes: whether the sidecar is written to.
        name: of the source.
    """
    driver = source.driver()
    if not isinstance(source, HasOffsetMetadata):
        return driver
    metadata = OffsetMetadata(location, source.offset_metadata, source.lasting_metadata, writes=writes, name=name)
    return PlainDriver(driver, metadata)
