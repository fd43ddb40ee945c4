"""What a checkpoint remembers: of its sources, first offsets, metadata of offsets, what precedes a position; of its
query, the deciding sink, dedup, shards, removed sources, registered schemas; of a batch, what its tasks leave for the
driver."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyarrow import fs

from delivered import checkpoint
from delivered.checkpoint import open_folder
from delivered.contract.connector import build
from delivered.contract.source import HeldBack, Offsets, Retained, Slice, Source, SourceDriver
from delivered.model.capability import Dedup
from delivered.model.errors import DeliveredError, InvariantBroken, Refused
from delivered.model.identity import SOURCE, by_source, is_ahead
from delivered.model.limits import OFFSET_METADATA_MAX

# A source's first offsets, stored in the checkpoint sidecar.
#
# Spark logs where a batch ends, but asks the source where batch 0 starts, also on a rerun. With startingOffsets
# "latest" the answer would change, and records in between would be lost. So the source's first start stores the
# offsets, and every later one uses them. The audit reads from there.

FIRST_FILE = "delivered/source-offsets.json"

_SPARKS_OWN = "sources/0/0"
"""First offsets of Spark's own Kafka source: a byte, a version line (not by Spark 2.1.0), the offsets as JSON."""
_SPARKS_VERSION = 1


def read_first(location: str, source: str = SOURCE) -> Offsets | None:
    """The first offsets stored by an earlier start, or by Spark's own Kafka source; None: none.

    Raises:
        InvariantBroken: the file is damaged.
        Refused: a newer Spark wrote it.
        Unreachable: the checkpoint cannot be read.
    """
    file = checkpoint.file_of(FIRST_FILE, source)
    found = checkpoint.read_record(
        location, file, "a source's first offsets", lambda found: dict(found["offsets"]), "SOURCE_OFFSETS_DAMAGED"
    )
    return _first_by_spark(location) if found is None and source == SOURCE else found


def is_ours(location: str) -> bool:
    """Whether a source of this package has stored first offsets here, under any name."""
    return checkpoint.holds(location, "delivered", FIRST_FILE.rsplit("/", 1)[1])


def _first_by_spark(location: str) -> Offsets | None:
    """Raises Refused: in a form that is not known yet."""
    content = (checkpoint.read(location, _SPARKS_OWN) or b"")[1:]
    versioned = re.match(rb"v(\d+)\n", content)
    if versioned is not None and int(versioned[1]) > _SPARKS_VERSION:
        file, version = f"{location}/{_SPARKS_OWN}", int(versioned[1])
        raise Refused("SOURCE_OFFSETS_NEWER", file=file, version=version, known=_SPARKS_VERSION)
    try:
        found = json.loads(content[versioned.end() if versioned else 0 :])
    except ValueError:
        return None  # another source's, in its own format
    return found if isinstance(found, dict) else None


def keep_first(location: str, initial: Callable[[], Offsets], source: str = SOURCE) -> Offsets | None:
    """The start of a source's first batch, as stored by the first start; stored now if this is the first.

    Runs on the driver, before Spark logs that batch. May be called again: the first call wins. None: the checkpoint has
    batches of the source but no stored start, which may have changed since.

    Args:
        initial: asks the source.
    """
    found = read_first(location, source)
    if found is not None or source in by_source(checkpoint.newest_offsets(location)):
        return found
    offsets = initial()
    checkpoint.write_record(location, checkpoint.file_of(FIRST_FILE, source), {"offsets": offsets}, first=True)
    # Another start may have been faster: the file's content counts.
    return read_first(location, source) or offsets


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
        self._file = checkpoint.file_of(LANDMARKS_FILE, name)
        self._checked = False
        self._known: tuple[Offsets, dict[str, str]] | None = None
        self._kept_s = float("-inf")

    def check(self, driver: SourceDriver, position: Offsets) -> None:
        """Compare, once in a process. Nothing is compared if the checkpoint was restored to an earlier position.

        Raises:
            InvariantBroken: the source has other records before the position now, and the user wants to be stopped.
        """
        if self._checked or self._location is None:
            return
        record = checkpoint.read_record(
            self._location, self._file, "the landmarks of a source's offsets", _fields, "LANDMARKS_DAMAGED"
        )
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
        if self._location is None:
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
                checkpoint.write_record(self._location, self._file, {"offsets": position, "landmarks": found})
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
        self._file = checkpoint.file_of(METADATA_FILE, name)
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
            checkpoint.write_record(self._location, self._file, record)
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

    what = "the metadata of a source's offsets"
    return checkpoint.read_record(location, file, what, entries, "OFFSET_METADATA_DAMAGED") or []


class PlainDriver(SourceDriver):
    """A source's driver that takes and returns offsets in the format of Spark's own connector."""

    def __init__(self, driver: SourceDriver, metadata: OffsetMetadata) -> None:
        self._driver = driver
        self._metadata = metadata

    def initial(self) -> Offsets:
        return self._kept(self._driver.initial())

    def recorded(self, offsets: Offsets) -> Offsets:
        """First offsets stored by an earlier start, perhaps with metadata."""
        plain, metadata = self._metadata.split(offsets)
        return self._kept(offsets) if metadata else plain

    def check_offsets(self, offsets: Offsets) -> None:
        self._driver.check_offsets(offsets)

    def parts(self, at: Offsets) -> Mapping[str, Any]:
        return self._driver.parts(self._metadata.joined(at))

    def latest(self, start: Offsets, rows_max: int | None) -> Offsets:
        complete = self._metadata.joined(start)
        end = self._driver.latest(complete, rows_max)
        # Unchanged: another notation of the same position would create an empty batch.
        return start if end == complete else self._kept(end, self._metadata.split(start)[0])

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

    def held_back(self) -> HeldBack | None:
        return self._driver.held_back()

    def retained(self, at: Offsets) -> Retained | None:
        return self._driver.retained(self._metadata.joined(at))

    def compacted(self) -> Sequence[str]:
        return self._driver.compacted()

    def landmarks(self, at: Offsets) -> Mapping[str, str]:
        return self._driver.landmarks(self._metadata.joined(at))

    def check_landmarks(self, at: Offsets, known: Mapping[str, str]) -> None:
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
    driver = build(SourceDriver, source.driver)
    known = source.capability()
    if not known.offset_metadata:
        return driver
    metadata = OffsetMetadata(location, known.offset_metadata, known.lasting_metadata, writes=writes, name=name)
    return PlainDriver(driver, metadata)


def first_of_stream(driver: SourceDriver, location: str | None, name: str = SOURCE) -> Offsets:
    """Where batch 0 starts, also if it runs again: fixed the first time, whatever "latest" is by then.

    Args:
        driver: from `stream_driver`.
    """
    known = keep_first(location, driver.initial, name) if location is not None else None
    if known is None:
        return driver.initial()
    return driver.recorded(known) if isinstance(driver, PlainDriver) else known


# The sink whose ledger decides the batches of a pipeline with several sinks, stored in the checkpoint's sidecar.
#
# A pipeline without that sink asks another ledger, which may lack the newest batch: it would be written again.

DECIDER_FILE = "delivered/deciding-sink.json"


def read_decider(location: str) -> str | None:
    """Name of the sink that decided for several sinks when the query was last started; None: it never had several.

    Raises:
        InvariantBroken: the file is damaged.
        Unreachable: the checkpoint cannot be read.
    """
    what = "a checkpoint's deciding sink"
    return checkpoint.read_record(
        location, DECIDER_FILE, what, lambda found: str(found["sink"]), "DECIDING_SINK_DAMAGED"
    )


def keep_decider(location: str, sink: str, *, several: bool) -> None:
    """Store which sink decides. Runs on the driver, before the query starts. May be called again.

    Raises:
        Unreachable: the checkpoint cannot be written to.
    """
    before = read_decider(location)
    if sink != before and (several or before is not None):
        checkpoint.write_record(location, DECIDER_FILE, {"sink": sink})


# The dedup that created a checkpoint's state, stored in its sidecar.
#
# If the dedup does not match the state, Spark at best reports its internal row layout; with another `within`, it
# silently continues. So the first start stores the dedup, and later starts with another one are refused.

DEDUP_FILE = "delivered/dedup.json"


@dataclass(frozen=True)
class _KeptDedup:
    dedup: Dedup | None
    sink: str
    """The one whose database has the key table."""

    @classmethod
    def of(cls, found: dict[str, Any]) -> _KeptDedup:
        dedup = found["dedup"]
        return cls(None if dedup is None else Dedup.from_json(dedup), str(found.get("sink", "")))


def _read_dedup(location: str) -> _KeptDedup | None:
    return checkpoint.read_record(location, DEDUP_FILE, "a dedup's settings", _KeptDedup.of, "DEDUP_DAMAGED")


def find_changed_dedup(location: str, dedup: Dedup | None, sink: str = "") -> str | None:
    """The checkpoint's dedup, for messages, if the pipeline's differs; else None.

    Args:
        sink: the deciding sink, whose database has the key table.
    """
    found = _read_dedup(location)
    if found is None or found.dedup is None:
        return None if dedup is None else "no dedup"
    before = found.dedup
    at = found.sink if before.in_table else sink
    if dedup is not None and dedup.remembers_as(before) and at == sink:
        return None
    return f"dedup {before.says}" + f" of the database of sink {at!r}" * before.in_table


def keep_dedup(location: str, dedup: Dedup | None, *, fresh: bool, sink: str = "") -> None:
    """Store the dedup before there is any state.

    Args:
        sink: the deciding sink.
        fresh: no query has run on this checkpoint; what a failed start left behind is replaced.

    Raises:
        Refused: the checkpoint started with another one. The plan checks this first; it is enforced here.
    """
    before = find_changed_dedup(location, dedup, sink)
    if before is None:
        return
    if not fresh:
        raise Refused("DEDUP_CHANGED.STORED", location=location, before=before)
    place = {"sink": sink} if dedup is not None and dedup.in_table else {}
    checkpoint.write_record(location, DEDUP_FILE, {"dedup": dedup.to_json() if dedup is not None else None, **place})


# How each sink was written, stored in the checkpoint's sidecar, because an audit compares rows as they are written now.

MODES_FILE = "delivered/write-modes.json"


@dataclass(frozen=True)
class WrittenModes:
    """
    Attributes:
        now: sink -> mode since the newest start. changed: sink -> newest batch with another mode, and that mode; empty:
            the pipeline did not have the sink. removed: sink -> the last batch before a start without it.
    """

    now: Mapping[str, str]
    changed: Mapping[str, tuple[int, str]]
    removed: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> WrittenModes:
        changed = {n: (int(batch), str(mode)) for n, (batch, mode) in found["changed"].items()}
        return cls(dict(found["now"]), changed, {n: int(batch) for n, batch in found.get("removed", {}).items()})


def read_modes(location: str) -> WrittenModes:
    """Raises InvariantBroken: the file is damaged. Unreachable: the checkpoint cannot be read."""
    known = checkpoint.read_record(
        location, MODES_FILE, "the modes of a checkpoint's sinks", WrittenModes.of, "REMOVED_SOURCES_DAMAGED"
    )
    return known or WrittenModes({}, {})


def keep_modes(location: str, now: Mapping[str, str]) -> None:
    """Store them, before the query starts. May be called again. Raises as `read_modes`."""
    known, newest = read_modes(location), checkpoint.read_logged(location)[1]
    changed, removed = dict(known.changed), dict(known.removed)
    if newest is not None and known.now:
        changed |= {n: (newest, known.now.get(n, "")) for n, mode in now.items() if known.now.get(n) != mode}
        changed |= {n: (newest, "") for n in now if removed.pop(n, newest) < newest}
        last = newest if checkpoint.is_done(location, newest) else newest - 1
        removed = {**dict.fromkeys(known.now.keys() - now.keys(), last), **removed}
    modes = {**known.now, **now}
    if (modes, changed, removed) != (known.now, known.changed, known.removed):
        checkpoint.write_record(location, MODES_FILE, {"now": modes, "changed": changed, "removed": removed})


# Settings by which Spark divides a batch into shards, stored in the checkpoint's sidecar.
#
# Shards whose prepared rows expired are written again after a restart, and compared with the decided ones: a rerun must
# divide the batch alike. Spark keeps none of these settings for stateless queries, and derives some from the number of
# cores.

SHARDS_FILE = "delivered/shards.json"


def keep_shards(location: str, now: Mapping[str, str]) -> dict[str, str]:
    """The settings for a query that starts: `now`, unless a batch is unfinished; then those that it was started with.

    Runs on the driver, before the query starts, and stores them.

    Raises:
        InvariantBroken: the file is damaged.
        Unreachable: the checkpoint cannot be read or written to.
    """
    what = "the settings of a checkpoint's shards"
    before = checkpoint.read_record(location, SHARDS_FILE, what, _settings, "SHARDS_DAMAGED")
    _, newest = checkpoint.read_logged(location)
    if before is not None and newest is not None and not checkpoint.is_done(location, newest):
        return before
    if before != now:
        checkpoint.write_record(location, SHARDS_FILE, {"settings": dict(now)})
    return dict(now)


def _settings(found: Mapping[str, dict[str, str]]) -> dict[str, str]:
    return {str(k): str(v) for k, v in found["settings"].items()}


# Sources removed from a query, stored in the checkpoint sidecar with their end offsets.
#
# Spark's offset log forgets a source once a batch has run without it. If it returns under its name, Spark reads it from
# the start again (4.3.0: unless only one batch ran without it).

REMOVED_FILE = "delivered/removed-sources.json"


def read_removed(location: str) -> Mapping[str, str]:
    """Where each removed source ended, by name.

    Raises:
        InvariantBroken: the file is damaged.
        Unreachable: the checkpoint cannot be read.
    """
    what = "a checkpoint's removed sources"
    of = checkpoint.read_record(
        location, REMOVED_FILE, what, lambda found: dict(found["removed"]), "REMOVED_SOURCES_DAMAGED"
    )
    return of or {}


def keep_removed(location: str, names: Collection[str]) -> None:
    """Store where sources ended that the newest logged batch read and this start does not.

    Runs on the driver, before the query starts. May be called again.

    Args:
        names: of the sources that the query will read.

    Raises:
        Unreachable: the checkpoint cannot be written to.
    """
    if set(names) == {SOURCE}:
        return  # Spark's log identifies a source without a name by its position
    dropped = {n: at for n, at in by_source(checkpoint.newest_offsets(location)).items() if n not in names}
    if dropped:
        checkpoint.write_record(location, REMOVED_FILE, {"removed": {**read_removed(location), **dropped}})


# What the sources of a query without names read, in the query's order, stored in the checkpoint sidecar.
#
# Spark gives them their offsets by position, and offsets of a log or of a table do not say whose they are.

ORDER_FILE = "delivered/sources-in-order.json"


def read_order(location: str) -> list[list[str]] | None:
    """As `keep_order` stored it; None: never.

    Raises:
        InvariantBroken: the file is damaged.
        Unreachable: the checkpoint cannot be read.
    """
    what = "the order of a checkpoint's sources"
    return checkpoint.read_record(
        location, ORDER_FILE, what, lambda found: [list(map(str, s)) for s in found["sources"]], "SOURCE_ORDER_DAMAGED"
    )


def keep_order(location: str, sources: Sequence[Sequence[str]]) -> None:
    """Store it, before the query starts. Raises Unreachable: the checkpoint cannot be written to."""
    checkpoint.write_record(location, ORDER_FILE, {"sources": sources})


# Topics and streams removed from a source, with their last positions.
#
# Offsets forget them. If one returned, it would be read from its first record again.

REMOVED_PARTS_FILE = "delivered/removed-topics.json"
_REMOVED_PARTS_MAX = 1_000
"""With subscribePattern, most of them are of topics that were deleted."""


class RemovedParts:
    """Of one stream.

    Args:
        location: of the checkpoint; None: unknown, and nothing is kept.
        name: of the source.
    """

    def __init__(self, location: str | None, name: str = SOURCE) -> None:
        self._location = location
        self._file = checkpoint.file_of(REMOVED_PARTS_FILE, name)

    def check(self, driver: SourceDriver, start: Offsets, end: Offsets) -> None:
        """Store what `start` names and `end` does not, before Spark logs `end`.

        Raises:
            InvariantBroken: one that was removed earlier has returned.
        """
        if self._location is None or _names(start) == _names(end):
            return
        before, now = driver.parts(start), driver.parts(end)
        if before.keys() == now.keys():
            return
        what = "a source's removed topics"
        known = checkpoint.read_record(
            self._location, self._file, what, lambda found: dict(found["removed"]), "REMOVED_SOURCES_DAMAGED"
        )
        removed = dict(known or {})
        if back := sorted(removed.keys() & now.keys() - before.keys()):
            file = f"{self._location.removeprefix('file://').rstrip('/')}/{self._file}"
            raise InvariantBroken("TOPIC_RETURNED", part=back[0], position=removed[back[0]], file=file)
        if left := {part: at for part, at in before.items() if part not in now}:
            kept = dict([*removed.items(), *left.items()][-_REMOVED_PARTS_MAX:])
            checkpoint.write_record(self._location, self._file, {"removed": kept})


def _names(offsets: Offsets) -> dict[str, Any]:
    """Topics or streams, and their partitions."""
    return {k: v.keys() if isinstance(v, Mapping) else None for k, v in offsets.items() if not k.startswith("#")}


# Versions and ids of the registered schemas that a query reads and writes with, stored in the checkpoint's sidecar.
#
# A registry moves on while a query is stopped; a batch that runs again after its decision must not.

READ_FILE = "delivered/reader-schemas.json"
WRITTEN_FILE = "delivered/writer-schemas.json"
_SCHEMAS_MAX = 16
"""Changes of the schemas written with. Only the newest decided batch can run again."""


def read_written_schemas(location: str, batch: int) -> dict[str, int] | None:
    """Ids of the schemas that a decided batch was written with, by sink and column; None: not stored.

    Raises:
        InvariantBroken: the file is damaged.
        Unreachable: the checkpoint cannot be read.
    """
    return next((ids for first, ids in reversed(_schema_changes(location)) if first <= batch), None)


def keep_written_schemas(location: str, batch: int, ids: Mapping[str, int]) -> None:
    """Store the ids that an undecided batch, and those after it, are written with. Before its tasks start.

    Raises:
        Unreachable: the checkpoint cannot be written to.
    """
    known = _schema_changes(location)
    changes = [(first, each) for first, each in known if first < batch]  # later ones were never decided
    if not changes or changes[-1][1] != ids:
        changes.append((batch, dict(ids)))
    if changes != known:
        checkpoint.write_record(location, WRITTEN_FILE, {"changes": changes[-_SCHEMAS_MAX:]})


def read_schemas(location: str) -> dict[str, dict[str, int]]:
    """Versions by source and column that the query was last started with. Raises as `written`."""
    what = "the schemas that a query reads with"
    found = checkpoint.read_record(location, READ_FILE, what, lambda found: dict(found["sources"]), "SCHEMAS_DAMAGED")
    return found or {}


def keep_read_schemas(location: str, versions: Mapping[str, Mapping[str, int]]) -> None:
    """Store them, before the query starts. Raises as `keep_written`."""
    if read_schemas(location) != versions:
        checkpoint.write_record(location, READ_FILE, {"sources": versions})


def _schema_changes(location: str) -> list[tuple[int, dict[str, int]]]:
    what = "the schemas that batches were written with"
    found = checkpoint.read_record(
        location,
        WRITTEN_FILE,
        what,
        lambda found: [(int(b), dict(ids)) for b, ids in found["changes"]],
        "SCHEMAS_DAMAGED",
    )
    return found or []


# What the tasks of a batch leave for its driver: rows that were rejected before the transform, which go past it.
#
# What the driver gathered once all tasks were done is kept until the next batch, so that a repair finds the same.

_FOLDER = "delivered/rejected"
_GATHERED = "gathered.arrow"


def put_task_file(location: str, batch: int, start: str, name: str, data: bytes) -> None:
    """Store a task's file of a running batch. Runs on an executor; may be called again by another attempt.

    Args:
        start: of the query.
        name: unique among those of a start and batch, the same in every attempt.

    Raises:
        Unreachable: the checkpoint cannot be written to from here.
    """
    checkpoint.write(location, f"{_FOLDER}/{batch}/{start}/{name}.arrow", data, first=False)


def forget_task_files(location: str, batch: int, *, decided: bool) -> None:
    """Remove what earlier batches left, and what an undecided run of this batch did. Before the batch's tasks start."""
    filesystem, where = _place(location)

    def remove() -> None:
        for found in filesystem.get_file_info(fs.FileSelector(where, allow_not_found=True)):
            if found.base_name != str(batch) or not decided:
                filesystem.delete_dir(found.path)

    _guard(location, remove)


def gather_task_files(location: str, batch: int, start: str, join: Callable[[Sequence[bytes]], bytes]) -> bytes | None:
    """A batch's files, joined; the same at every call after the first. None: there are none. Runs on the driver."""
    known = checkpoint.read(location, f"{_FOLDER}/{batch}/{_GATHERED}")
    if known is not None:
        return known
    filesystem, where = _place(location)
    selector = fs.FileSelector(f"{where}/{batch}/{start}", allow_not_found=True)

    def names() -> list[str]:
        files = filesystem.get_file_info(selector)
        return sorted(f.base_name for f in files if f.base_name.endswith(".arrow"))

    stored = [checkpoint.read(location, f"{_FOLDER}/{batch}/{start}/{n}") for n in _guard(location, names)]
    if not stored:
        return None
    data = join([s for s in stored if s is not None])
    checkpoint.write(location, f"{_FOLDER}/{batch}/{_GATHERED}", data, first=False)
    return data


def _place(location: str) -> tuple[fs.FileSystem, str]:
    filesystem, path = open_folder(location)
    return filesystem, f"{path.rstrip('/')}/{_FOLDER}"


def _guard(location: str, act: Callable[[], checkpoint.T]) -> checkpoint.T:
    try:
        return act()
    except OSError as error:
        raise checkpoint.unusable(location, error) from error
