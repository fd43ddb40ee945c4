"""Staged files: tasks write them to the table's folder before they are committed. Aborts those of undecided batches.

    delivered/p-<pipeline>/s-<sink>/i-<incarnation>/<batch / 100>/[<folder>/]
        <batch>-<shard>-<attempt>-<nonce>-<n>.parquet

A file's name identifies its writer, so that only its own pipeline deletes it. Files of direct writers (at_least_once,
at_most_once) are in `direct/` and never deleted: only the table knows whether they are committed.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from delivered.kits.table.store import Store
from delivered.model.errors import Fenced, InvariantBroken
from delivered.model.identity import Scope, Work
from delivered.model.prepared import Prepared
from delivered.model.step import Moment, StepId, reach
from delivered.model.work import Decision

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


def incarnation_of(scope: Scope, name: str) -> str | None:
    """Incarnation of a staged file of this pipeline and sink; None: not such a file."""
    head, _, tail = name.partition(f"{sink_folder(scope)}/i-")
    return None if head or not tail else tail.partition("/")[0]


def block_folder(scope: Scope, incarnation: str, batch: int) -> str:
    return f"{incarnation_folder(scope, incarnation)}/{batch // BLOCK_BATCHES:08d}"


def new_place(work: Work, direct: bool) -> Place:
    scope = work.scope
    folder = direct_folder(scope) if direct else block_folder(scope, scope.incarnation, work.batch)
    return Place(folder, f"{work.batch}-{work.shard}-{work.attempt}-{uuid.uuid4().hex}")


def batch_of(name: str) -> int | None:
    """Batch of a staged file, by its name; None: not a staged file's name."""
    digits = name.rpartition("/")[2].partition("-")[0]
    return int(digits) if digits.isdigit() else None


def writer_of(name: str) -> str:
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


def check_whole(there: Mapping[str, int], name: str, size: int) -> None:
    """
    Args:
        there: name -> size of the existing files.

    Raises:
        InvariantBroken: the file is missing, or differs from what was prepared.
    """
    if there.get(name) != size:
        raise InvariantBroken(
            "STAGED_FILE_GONE",
            f"The staged file {name!r} has {there.get(name, 'no')} bytes, but {size} were prepared. Nothing of the "
            "batch is visible.",
            next_step="start the pipeline again; the batch runs again",
        )


def check_count(prepared: Prepared, rows: int) -> None:
    """
    Raises:
        InvariantBroken: a participant's files have more or fewer rows than were prepared.
    """
    if rows != prepared.fingerprint.count:
        raise InvariantBroken(
            "STAGED_ROWS_DIFFER",
            f"Shard {prepared.shard}: its files have {rows} rows, but its fingerprint counts "
            f"{prepared.fingerprint.count}.",
            next_step="start the pipeline again; the batch runs again",
        )


_claims: dict[Hashable, int] = {}


def note_claim(ledger: Hashable, claim: int) -> None:
    """Record this process's claim of a ledger: while it is the newest, this process may delete orphans."""
    _claims[ledger] = claim


@dataclass(frozen=True)
class Undecided:
    """Staged files of a pipeline and sink that no decision names.

    Attributes:
        ledger: as passed to `note_claim`.
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
        gone = [name for name in names if writer_of(name) not in keep]
        self.store.remove(gone)
        return len({writer_of(name) for name in gone})

    def check_claim(self) -> None:
        """Call between listing and deleting files, so that the list has no file of a later owner.

        Raises:
            Fenced: another process has claimed the ledger since.
        """
        known, newest = _claims.get(self.ledger), self.claim()
        if known is not None and newest != known:
            raise Fenced(
                "FENCED",
                f"The ledger of sink {self.scope.sink!r} of pipeline {self.scope.pipeline!r} was claimed by a later "
                "start while this one was aborting orphans. Nothing was deleted.",
                next_step="nothing, if the later start is running; otherwise start the pipeline again",
            )

    def remove(self, names: Iterable[str]) -> None:
        """Delete those of these files that are undecided; never deletes a decided row, whoever calls it."""
        undecided = []
        for name in names:
            incarnation = incarnation_of(self.scope, name)
            newest, decided_writers = (None, set[str]()) if incarnation is None else self.decided(incarnation)
            batch = batch_of(name)
            if batch is not None and (newest is None or batch >= newest) and writer_of(name) not in decided_writers:
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
            if newest is None or ((batch_of(n) or 0) >= newest and writer_of(n) not in decided_writers)
        ]
