"""What a checkpoint remembers of its query: deciding sink, dedup, shards, removed sources, registered schemas."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from delivered.checkpoint import folder
from delivered.model.dedup import Dedup
from delivered.model.errors import Refused
from delivered.model.offsets import SOURCE, by_source

# The sink whose ledger decides the batches of a pipeline with several sinks, stored in the checkpoint's sidecar.
#
# A pipeline without that sink asks another ledger, which may lack the newest batch: it would be written again.

DECIDER_FILE = "delivered/deciding-sink.json"


def decider(location: str) -> str | None:
    """Name of the sink that decided for several sinks when the query was last started; None: it never had several.

    Raises:
        InvariantBroken: the file is damaged.
        Unreachable: the checkpoint cannot be read.
    """
    what = "a checkpoint's deciding sink"
    return folder.read_record(location, DECIDER_FILE, what, lambda found: str(found["sink"]), "DECIDING_SINK_DAMAGED")


def keep_decider(location: str, sink: str, *, several: bool) -> None:
    """Store which sink decides. Runs on the driver, before the query starts. May be called again.

    Raises:
        Unreachable: the checkpoint cannot be written to.
    """
    before = decider(location)
    if sink != before and (several or before is not None):
        folder.write_record(location, DECIDER_FILE, {"sink": sink})


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
    return folder.read_record(location, DEDUP_FILE, "a dedup's settings", _KeptDedup.of, "DEDUP_DAMAGED")


def changed_dedup(location: str, dedup: Dedup | None, sink: str = "") -> str | None:
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
    before = changed_dedup(location, dedup, sink)
    if before is None:
        return
    if not fresh:
        raise Refused("DEDUP_CHANGED", f"The checkpoint {location!r} started with {before}.", "restore that setting")
    place = {"sink": sink} if dedup is not None and dedup.in_table else {}
    folder.write_record(location, DEDUP_FILE, {"dedup": dedup.to_json() if dedup is not None else None, **place})


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
    before = folder.read_record(location, SHARDS_FILE, what, _settings, "SHARDS_DAMAGED")
    _, newest = folder.logged(location)
    if before is not None and newest is not None and not folder.is_done(location, newest):
        return before
    if before != now:
        folder.write_record(location, SHARDS_FILE, {"settings": dict(now)})
    return dict(now)


def _settings(found: Mapping[str, dict[str, str]]) -> dict[str, str]:
    return {str(k): str(v) for k, v in found["settings"].items()}


# Sources removed from a query, stored in the checkpoint sidecar with their end offsets.
#
# Spark's offset log forgets a source once a batch has run without it. If it returns under its name, Spark reads it from
# the start again (4.3.0: unless only one batch ran without it).

REMOVED_FILE = "delivered/removed-sources.json"


def removed(location: str) -> Mapping[str, str]:
    """Where each removed source ended, by name.

    Raises:
        InvariantBroken: the file is damaged.
        Unreachable: the checkpoint cannot be read.
    """
    what = "a checkpoint's removed sources"
    of = folder.read_record(
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
    gone = {n: at for n, at in by_source(folder.newest_offsets(location)).items() if n not in names}
    if gone:
        folder.write_record(location, REMOVED_FILE, {"removed": {**removed(location), **gone}})


# Versions and ids of the registered schemas that a query reads and writes with, stored in the checkpoint's sidecar.
#
# A registry moves on while a query is stopped; a batch that runs again after its decision must not.

READ_FILE = "delivered/reader-schemas.json"
WRITTEN_FILE = "delivered/writer-schemas.json"
_SCHEMAS_MAX = 16
"""Changes of the schemas written with. Only the newest decided batch can run again."""


def written_schemas(location: str, batch: int) -> dict[str, int] | None:
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
        folder.write_record(location, WRITTEN_FILE, {"changes": changes[-_SCHEMAS_MAX:]})


def read_schemas(location: str) -> dict[str, dict[str, int]]:
    """Versions by source and column that the query was last started with. Raises as `written`."""
    what = "the schemas that a query reads with"
    found = folder.read_record(location, READ_FILE, what, lambda found: dict(found["sources"]), "SCHEMAS_DAMAGED")
    return found or {}


def keep_read_schemas(location: str, versions: Mapping[str, Mapping[str, int]]) -> None:
    """Store them, before the query starts. Raises as `keep_written`."""
    if read_schemas(location) != versions:
        folder.write_record(location, READ_FILE, {"sources": versions})


def _schema_changes(location: str) -> list[tuple[int, dict[str, int]]]:
    what = "the schemas that batches were written with"
    found = folder.read_record(
        location,
        WRITTEN_FILE,
        what,
        lambda found: [(int(b), dict(ids)) for b, ids in found["changes"]],
        "SCHEMAS_DAMAGED",
    )
    return found or []
