"""Data files of a shard: where they are staged, who writes them, and the undecided ones, which are deleted.

    delivered/p-<pipeline>/s-<sink>/i-<incarnation>/<batch / 100>/[<folder>/]
        <batch>-<shard>-<attempt>-<nonce>-<n>.parquet

A file's name identifies its writer, so that only its own pipeline deletes it. Files of direct writers (at_least_once,
at_most_once) are in `direct/` and never deleted: only the table knows whether they are committed.
"""

from __future__ import annotations

import contextlib
import uuid
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from delivered.contract.sink import Committer, Writer
from delivered.kits.table.store import Store
from delivered.model.capability import Guarantee
from delivered.model.errors import DeliveredError, Fenced, InvariantBroken, OutcomeUnknown, Refused
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Scope, Target, Work
from delivered.model.step import Moment, StepId, reach
from delivered.model.work import Decision, Failed, Handle, Ok, Outcome, Prepared, Promise, Unknown

BLOCK_BATCHES = 100
"""Batches per folder: recovery lists only the folders of the newest batches."""
_ROOT = "delivered"


@dataclass(frozen=True)
class Place:
    """Where one writer puts its files."""

    folder: str
    stem: str

    def name(self, folder: str, number: int) -> str:
        """Args: folder: subfolder with a trailing slash; empty: none."""
        return f"{self.folder}/{folder}{self.stem}-{number}.parquet"

    def sibling(self, what: str) -> str:
        """Name of another file of this writer."""
        return f"{self.folder}/{self.stem}-{what}"


def sink_folder(scope: Scope) -> str:
    # Prefixed, so that a pipeline named ".." cannot escape.
    return f"{_ROOT}/p-{scope.pipeline}/s-{scope.sink}"


def direct_folder(scope: Scope) -> str:
    return f"{sink_folder(scope)}/direct"


def incarnation_folder(scope: Scope, incarnation: str) -> str:
    return f"{sink_folder(scope)}/i-{incarnation}"


def parse_incarnation(scope: Scope, name: str) -> str | None:
    """Incarnation of a staged file of this pipeline and sink; None: not such a file."""
    head, _, tail = name.partition(f"{sink_folder(scope)}/i-")
    return None if head or not tail else tail.partition("/")[0]


def block_folder(scope: Scope, incarnation: str, batch: int) -> str:
    return f"{incarnation_folder(scope, incarnation)}/{batch // BLOCK_BATCHES:08d}"


def new_place(work: Work, direct: bool) -> Place:
    scope = work.scope
    folder = direct_folder(scope) if direct else block_folder(scope, scope.incarnation, work.batch)
    return Place(folder, f"{work.batch}-{work.shard}-{work.attempt}-{uuid.uuid4().hex}")


def parse_batch(name: str) -> int | None:
    """Batch of a staged file, by its name; None: not a staged file's name."""
    digits = name.rpartition("/")[2].partition("-")[0]
    return int(digits) if digits.isdigit() else None


def parse_writer(name: str) -> str:
    """Name of a file's writer."""
    return name.rpartition("/")[2].rpartition("-")[0]


def newest_files(store: Store, scope: Scope, incarnation: str, newest: int | None) -> list[str]:
    """Files of an incarnation, from the folder of its newest decided batch on."""
    folder = incarnation_folder(scope, incarnation)
    first = "" if newest is None else block_folder(scope, incarnation, newest)
    blocks = [b for b in (f"{folder}/{name}" for name in store.folders(folder)) if b >= first]
    return [name for block in blocks for name in store.files(block)]


@contextlib.contextmanager
def moving(decision: Decision, prepared: Prepared) -> Iterator[None]:
    """Wraps adding a participant's files to the decision."""
    facts = {"batch": decision.batch, "shard": prepared.shard}
    reach(StepId.COMMIT_APPLY, Moment.BEFORE, **facts)
    yield
    reach(StepId.COMMIT_APPLY, Moment.AFTER, **facts)


def check_complete(there: Mapping[str, int], name: str, size: int) -> None:
    """
    Args:
        there: name -> size of the existing files.

    Raises:
        InvariantBroken: the file is missing, or differs from what was prepared.
    """
    if there.get(name) != size:
        raise InvariantBroken("STAGED_FILE_GONE.SIZE", name=name, actual=there.get(name, "no"), size=size)


def check_count(prepared: Prepared, rows: int) -> None:
    """Raises InvariantBroken: a participant's files have more or fewer rows than were prepared."""
    if rows != prepared.fingerprint.count:
        raise InvariantBroken(
            "STAGED_ROWS_DIFFER.FILES", shard=prepared.shard, rows=rows, count=prepared.fingerprint.count
        )


_claims: dict[Hashable, int] = {}


def record_claim(ledger: Hashable, claim: int) -> None:
    """Record this process's claim of a ledger: while it is the newest, this process may delete orphans."""
    _claims[ledger] = claim


@dataclass(frozen=True)
class Undecided:
    """Staged files of a pipeline and sink that no decision names.

    Attributes:
        ledger: as passed to `record_claim`.
        decided: incarnation -> its newest decided batch (None: none) and the writers of that batch's files.
        claim: reads the newest claim of the ledger.
    """

    store: Store
    scope: Scope
    ledger: Hashable
    decided: Callable[[str], tuple[int | None, set[str]]]
    claim: Callable[[], int | None]

    def abort_orphans(self, keep: set[str]) -> int:
        """Delete files of undecided batches, of any incarnation, except those of the writers in `keep`. Files of
        batches before the newest decided one, left by late tasks, are up to the table's own maintenance. Returns the
        number of writers.

        Raises:
            Fenced: another process has claimed the ledger since. Nothing was deleted.
        """
        names: list[str] = []
        for folder in self.store.folders(sink_folder(self.scope)):
            if folder.startswith("i-"):
                names += self._open(folder.removeprefix("i-"))
        self.check_claim()
        orphans = [name for name in names if parse_writer(name) not in keep]
        self.store.remove(orphans)
        return len({parse_writer(name) for name in orphans})

    def check_claim(self) -> None:
        """Call between listing and deleting files, so that the list has no file of a later owner.

        Raises:
            Fenced: another process has claimed the ledger since.
        """
        known, newest = _claims.get(self.ledger), self.claim()
        if known is not None and newest != known:
            raise Fenced("FENCED.ORPHANS", sink=self.scope.sink, pipeline=self.scope.pipeline)

    def remove(self, names: Iterable[str]) -> None:
        """Delete those of these files that are undecided; never deletes a decided row, from any caller."""
        undecided = []
        for name in names:
            incarnation = parse_incarnation(self.scope, name)
            newest, decided_writers = (None, set[str]()) if incarnation is None else self.decided(incarnation)
            batch = parse_batch(name)
            if batch is not None and (newest is None or batch >= newest) and parse_writer(name) not in decided_writers:
                undecided.append(name)
        self.store.remove(undecided)

    def _open(self, incarnation: str) -> list[str]:
        """Files of an incarnation that no decision names, in the folders that may have some.

        Decisions are read again after the listing, which may take long: files that appeared meanwhile may have been
        decided by then.
        """
        candidates = newest_files(self.store, self.scope, incarnation, self.decided(incarnation)[0])
        newest, decided_writers = self.decided(incarnation)
        return [
            n
            for n in candidates
            if newest is None or ((parse_batch(n) or 0) >= newest and parse_writer(n) not in decided_writers)
        ]


class ShardFiles(Protocol):
    """The files of one shard. Used by one thread, once."""

    def write(self, batch: pa.RecordBatch) -> None:
        """Write rows, at least one."""

    def finish(self) -> int:
        """Close all files and make them durable; return their number of rows."""

    def handle(self) -> Handle | None:
        """After `finish`: what the driver needs to commit the files. None: there are no files."""

    def check(self) -> None:
        """After `finish`: raise if the table cannot accept the files."""

    def commit(self) -> Outcome[None]:
        """After `check`: commit the files now. Called once."""

    def discard(self) -> None:
        """Delete what was written. Never raises."""


class StagingWriter(Writer):
    """exactly_once: files stay invisible until the driver commits them."""

    def __init__(self, work: Work, files: ShardFiles) -> None:
        self._work = work
        self._files = files

    def stage(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows:
            with while_staging(self._work):
                self._files.write(batch)

    def prepare(self, fingerprint: Fingerprint) -> Promise:
        self._finish(fingerprint)
        return Promise(self._files.handle())

    def abort(self) -> None:
        self._files.discard()

    def _finish(self, fingerprint: Fingerprint) -> int:
        with while_staging(self._work):
            rows = self._files.finish()
        if rows != fingerprint.count:
            raise InvariantBroken(
                "ROWS_DIFFER.TABLE", shard=self._work.shard, batch=self._work.batch, rows=rows, count=fingerprint.count
            )
        return rows


class DirectWriter(StagingWriter):
    """at_least_once, at_most_once: the task commits its own files."""

    def __init__(self, work: Work, guarantee: Guarantee, files: ShardFiles) -> None:
        super().__init__(work, files)
        self._guarantee = guarantee
        self._committed = False

    def prepare(self, fingerprint: Fingerprint) -> Promise:
        if not self._finish(fingerprint):
            return Promise()
        self._files.check()
        self._committed = True  # the files may be visible from here on, and must not be deleted
        match self._files.commit():
            case Ok():
                return Promise()
            case Failed(reason):
                self._committed = False
                raise InvariantBroken("COMMIT_FAILED", shard=self._work.shard, batch=self._work.batch, reason=reason)
            case Unknown(reason):
                if self._guarantee is Guarantee.AT_MOST_ONCE:
                    return Promise(given_up={"unknown": fingerprint.count})
                raise OutcomeUnknown("COMMIT_UNKNOWN", shard=self._work.shard, batch=self._work.batch, reason=reason)

    def abort(self) -> None:
        if not self._committed:
            self._files.discard()


def shard_writer(work: Work, guarantee: Guarantee, files: ShardFiles) -> StagingWriter:
    if guarantee is Guarantee.EXACTLY_ONCE:
        return StagingWriter(work, files)
    return DirectWriter(work, guarantee, files)


@contextlib.contextmanager
def while_staging(work: Work) -> Iterator[None]:
    """Raises InvariantBroken if a file of this task is missing."""
    try:
        yield
    except FileNotFoundError:
        raise InvariantBroken("STAGED_FILE_GONE.CLEANED", shard=work.shard, batch=work.batch) from None


GROUP_ROWS = 1 << 20
GROUP_BYTES = 32 << 20
"""Size of a row group; also bounds the buffered rows of all open files together."""
OPEN_FILES_MAX = 100
"""Maximum open files of a shard; with more parts, some are written to several files."""

_SAMPLE_ROWS = 8_192

Part = TypeVar("Part", bound=Hashable)


@dataclass(frozen=True)
class Written(Generic[Part]):
    """A written and closed file.

    Attributes:
        name: in the store.
        size: in bytes.
        footer: Parquet metadata.
        not_a_number: columns that contain NaN.
    """

    name: str
    size: int
    part: Part
    footer: Any
    not_a_number: frozenset[str]

    @property
    def rows(self) -> int:
        return int(self.footer.num_rows)


@dataclass
class _Open(Generic[Part]):
    """A data file being written."""

    name: str
    part: Part
    schema: pa.Schema
    options: Mapping[str, Any]
    sink: Any
    writer: Any = None
    footers: list[Any] = field(default_factory=list)
    not_a_number: set[str] = field(default_factory=set)
    waiting: list[pa.RecordBatch] = field(default_factory=list)
    rows: int = 0
    bytes: int = 0

    def flush(self) -> None:
        """Write the buffered rows as one row group."""
        if not self.rows:
            return
        rows = pa.Table.from_batches(self.waiting, self.schema)
        for f in self.schema:
            if pa.types.is_floating(f.type) and pc.any(pc.is_nan(rows[f.name])).as_py():
                self.not_a_number.add(f.name)
        if self.writer is None:
            import pyarrow.parquet as pq  # not loaded for files of another format

            self.writer = pq.ParquetWriter(
                self.sink, self.schema, use_dictionary=_repeating(rows), metadata_collector=self.footers,
                store_schema=False, **self.options,
            )  # fmt: skip
        self.writer.write_table(rows, row_group_size=GROUP_ROWS)
        self.waiting, self.rows, self.bytes = [], 0, 0

    def close(self) -> int:
        """Return the size of the file in bytes."""
        if self.writer is not None:
            self.writer.close()
        size = int(self.sink.tell())
        self.sink.close()
        return size


class PartFiles(Generic[Part]):
    """The files of one shard. Used by one thread.

    Args:
        open_store: called on the first row.
        schema: of the files.
        options: for Arrow's ParquetWriter.
        folder_of: subfolder for the files of a part, with a trailing slash; empty: the writer's folder.
    """

    def __init__(
        self,
        open_store: Callable[[], Store],
        place: Place,
        schema: pa.Schema,
        options: Mapping[str, Any],
        folder_of: Callable[[Part], str] = lambda _: "",
    ) -> None:
        self._open_store = open_store
        self._place = place
        self._schema = schema
        self._options = options
        self._folder_of = folder_of
        self._store: Store | None = None
        self._open: OrderedDict[Part, _Open[Part]] = OrderedDict()
        self._waiting = 0
        self._names: list[str] = []
        self._done: list[Written[Part]] = []

    def write(self, part: Part, rows: pa.RecordBatch) -> None:
        """Write rows that have the columns of `schema`."""
        file = self._file(part)
        file.waiting.append(rows)
        file.rows += rows.num_rows
        file.bytes += rows.nbytes
        self._waiting += rows.nbytes
        if file.rows >= GROUP_ROWS:
            self._flush(file)
        while self._waiting >= GROUP_BYTES:
            self._flush(max(self._open.values(), key=lambda f: f.bytes))

    def finish(self) -> Sequence[Written[Part]]:
        """Close all files and make them durable."""
        while self._open:
            self._close(next(iter(self._open)))
        if self._store is not None:
            self._store.sync([f.name for f in self._done])
        return self._done

    def discard(self) -> None:
        for file in self._open.values():
            with contextlib.suppress(Exception):
                file.close()
        self._open.clear()
        if self._store is not None:
            with contextlib.suppress(Exception):
                self._store.remove(self._names)

    def _file(self, part: Part) -> _Open[Part]:
        if part in self._open:
            self._open.move_to_end(part)
            return self._open[part]
        while len(self._open) >= OPEN_FILES_MAX:
            self._close(next(iter(self._open)))
        if self._store is None:
            self._store = self._open_store()
        name = self._place.name(self._folder_of(part), len(self._names))
        self._store.make_folder(name.rpartition("/")[0])
        self._names.append(name)
        self._open[part] = _Open(name, part, self._schema, self._options, self._store.create(name))
        return self._open[part]

    def _flush(self, file: _Open[Part]) -> None:
        self._waiting -= file.bytes
        file.flush()

    def _close(self, part: Part) -> None:
        file = self._open.pop(part)
        self._flush(file)
        size = file.close()
        [footer] = file.footers
        self._done.append(Written(file.name, size, part, footer, frozenset(file.not_a_number)))


def split(keys: pa.RecordBatch, rows: pa.RecordBatch) -> list[tuple[tuple[Any, ...], pa.RecordBatch]]:
    """Group rows by the values of the key columns; keeps the order within a group."""
    numbered = pa.Table.from_batches([keys]).append_column("\0row", pa.array(np.arange(rows.num_rows)))
    groups = numbered.group_by(keys.schema.names, use_threads=False).aggregate([("\0row", "list")])
    members = groups.column("\0row_list").combine_chunks()
    return [
        (tuple(values.values()), rows.take(members[i].values))
        for i, values in enumerate(groups.select(keys.schema.names).to_pylist())
    ]


def _repeating(rows: pa.Table) -> list[str]:
    """Columns whose first values repeat: dictionary encoding only pays off for these."""
    sample = rows.slice(0, _SAMPLE_ROWS)
    return [
        f.name
        for f in rows.schema
        if not pa.types.is_nested(f.type) and 2 * pc.count_distinct(sample[f.name]).as_py() <= sample.num_rows
    ]


T = TypeVar("T")


class StagedFilesCommitter(Committer):
    """See `delivered.contract.sink.Committer`."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope

    @abstractmethod
    def _remove(self, prepared: Prepared) -> None:
        """Delete a participant's staged files, unless they are decided."""

    @abstractmethod
    def _remove_orphans(self, keep: Sequence[Prepared]) -> int:
        """Delete all other staged files of this sink that are undecided; return how many, or of how many writers."""

    @abstractmethod
    def _target(self) -> Target | None:
        """Where the rows are; None: nowhere yet."""

    def commit(self, work: Work, prepared: Prepared) -> Outcome[None]:
        """The decision has already made the rows visible."""
        del work, prepared
        return Ok(None)

    def abort(self, prepared: Prepared) -> Outcome[None]:
        return _outcome(lambda: self._remove(prepared)) if prepared.handle else Ok(None)

    def abort_orphans(self, keep: Sequence[Prepared]) -> Outcome[int]:
        return _outcome(lambda: self._remove_orphans([p for p in keep if p.handle]))

    def targets(self) -> dict[str, Target]:
        target = self._target()
        return {} if target is None else {self._scope.sink: target}


def unlink_others(paths: Iterable[Path], keep: Collection[str]) -> int:
    """Delete the files whose names are not in `keep`; return how many."""
    others = [path for path in paths if path.name not in keep]
    for path in others:
        path.unlink(missing_ok=True)
    return len(others)


def _outcome(work: Callable[[], T]) -> Outcome[T]:
    try:
        return Ok(work())
    except Refused:
        raise  # a later version prepared it
    except (DeliveredError, OSError) as error:
        return Unknown(str(error))
