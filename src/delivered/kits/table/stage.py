"""Files that tasks write into a table's folder before anything names them, and which of them nobody decided.

    delivered/p-<pipeline>/s-<sink>/i-<incarnation>/<batch / 100>/[<folder>/]
        <batch>-<shard>-<attempt>-<nonce>-<n>.parquet

Who wrote a file stands in its name, so that only its own pipeline ever takes one away. Files of direct writers
(at_least_once, at_most_once) lie in `direct/` and are not removed: whether one counts, only the table knows.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from delivered.kits.table.store import Store
from delivered.model.errors import Fenced, InvariantBroken
from delivered.model.identity import Scope, Work
from delivered.model.step import Moment, StepId, reach
from delivered.model.work import Decision, Prepared

BLOCK_BATCHES = 100
"""Batches in one folder: recovery lists the folders of the newest batches alone."""
_ROOT = "delivered"


@dataclass(frozen=True)
class Place:
    """Where the files of one writer lie."""

    folder: str
    stem: str

    def name(self, folder: str, number: int) -> str:
        """Args: folder: below the writer's own, with a slash at its end; empty: none."""
        return f"{self.folder}/{folder}{self.stem}-{number}.parquet"

    def beside(self, what: str) -> str:
        """Name of another file of this writer."""
        return f"{self.folder}/{self.stem}-{what}"


def sink_folder(scope: Scope) -> str:
    # Prefixed, so that a pipeline named ".." stays inside.
    return f"{_ROOT}/p-{scope.pipeline}/s-{scope.sink}"


def direct_folder(scope: Scope) -> str:
    return f"{sink_folder(scope)}/direct"


def incarnation_folder(scope: Scope, incarnation: str) -> str:
    return f"{sink_folder(scope)}/i-{incarnation}"


def incarnation_of(scope: Scope, name: str) -> str | None:
    """Of a staged file of this sink of this pipeline; None if it is none."""
    head, _, tail = name.partition(f"{sink_folder(scope)}/i-")
    return None if head or not tail else tail.partition("/")[0]


def block_folder(scope: Scope, incarnation: str, batch: int) -> str:
    return f"{incarnation_folder(scope, incarnation)}/{batch // BLOCK_BATCHES:08d}"


def new_place(work: Work, direct: bool) -> Place:
    scope = work.scope
    folder = direct_folder(scope) if direct else block_folder(scope, scope.incarnation, work.batch)
    return Place(folder, f"{work.batch}-{work.shard}-{work.attempt}-{uuid.uuid4().hex}")


def batch_of(name: str) -> int | None:
    """The batch that a staged file belongs to, by its name; None if it is no name of ours."""
    digits = name.rpartition("/")[2].partition("-")[0]
    return int(digits) if digits.isdigit() else None


def writer_of(name: str) -> str:
    """One text for all files of one writer."""
    return name.rpartition("/")[2].rpartition("-")[0]


def newest_files(store: Store, scope: Scope, incarnation: str, newest: int | None) -> list[str]:
    """Files of one incarnation in the folders from that of its newest decided batch on."""
    folder = incarnation_folder(scope, incarnation)
    first = "" if newest is None else block_folder(scope, incarnation, newest)
    blocks = [b for b in (f"{folder}/{name}" for name in store.folders(folder)) if b >= first]
    return [name for block in blocks for name in store.files(block)]


@contextlib.contextmanager
def moving(decision: Decision, prepared: Prepared) -> Iterator[None]:
    """While a participant's files are taken into the decision."""
    facts = {"batch": decision.batch, "shard": prepared.shard}
    reach(StepId.COMMIT_APPLY, Moment.BEFORE, **facts)
    yield
    reach(StepId.COMMIT_APPLY, Moment.AFTER, **facts)


def check_whole(there: Mapping[str, int], name: str, size: int) -> None:
    """
    Args:
        there: name -> size of the files that are there.

    Raises:
        InvariantBroken: the file is gone, or is not what was prepared.
    """
    if there.get(name) != size:
        raise InvariantBroken(
            "STAGED_FILE_GONE",
            f"The staged file {name!r} has {there.get(name, 'no')} bytes, prepared were {size}. Nothing of the batch "
            "is visible.",
            next_step="start the pipeline again; the batch runs again",
        )


def check_count(prepared: Prepared, rows: int) -> None:
    """
    Raises:
        InvariantBroken: a participant's files hold more or fewer rows than were prepared.
    """
    if rows != prepared.fingerprint.count:
        raise InvariantBroken(
            "STAGED_ROWS_DIFFER",
            f"Shard {prepared.shard}: {rows} rows are in its files, its fingerprint counts "
            f"{prepared.fingerprint.count}.",
            next_step="start the pipeline again; the batch runs again",
        )


_claims: dict[Hashable, int] = {}


def note_claim(ledger: Hashable, claim: int) -> None:
    """This process claimed a ledger, and may remove orphans for as long as that claim is the newest."""
    _claims[ledger] = claim


@dataclass(frozen=True)
class Undecided:
    """The staged files of a sink of a pipeline that no decision names.

    Attributes:
        ledger: as `note_claim` knows it.
        decided: incarnation -> its newest decided batch (None: none) and the writers whose files that one names.
        claim: the newest claim of the ledger, now.
    """

    store: Store
    scope: Scope
    ledger: Hashable
    decided: Callable[[str], tuple[int | None, set[str]]]
    claim: Callable[[], int | None]

    def abort_orphans(self, keep: set[str]) -> int:
        """Take away files of batches that no decision names, of any incarnation, but for those of the writers in
        `keep`. Those of older batches than the newest decided one, which a task that nobody waited for may leave, are
        for the table's own upkeep. Returns how many writers there were.

        Raises:
            Fenced: somebody else claimed the ledger since this process did. Nothing was taken away.
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
        """Called between a look at what is there and the removal: then nothing of a later owner is in that look.

        Raises:
            Fenced: somebody else claimed the ledger since this process did.
        """
        mine, newest = _claims.get(self.ledger), self.claim()
        if mine is not None and newest != mine:
            raise Fenced(
                "FENCED",
                f"The ledger of sink {self.scope.sink!r} of pipeline {self.scope.pipeline!r} was claimed by a later "
                "start while this one removed orphans. Nothing was taken away.",
                next_step="nothing, if the later start is running; else start the pipeline again",
            )

    def remove(self, names: Iterable[str]) -> None:
        """Of these files those that do not count, whoever asks: a decided row is never taken away from here."""
        found = []
        for name in names:
            incarnation = incarnation_of(self.scope, name)
            newest, named = (None, set[str]()) if incarnation is None else self.decided(incarnation)
            batch = batch_of(name)
            if batch is not None and (newest is None or batch >= newest) and writer_of(name) not in named:
                found.append(name)
        self.store.remove(found)

    def _open(self, incarnation: str) -> list[str]:
        """Files of one incarnation that no decision names, in the folders where such can be.

        What is decided is asked again after the look at the files, which may have taken long: what got there in between
        may have been decided in between.
        """
        found = newest_files(self.store, self.scope, incarnation, self.decided(incarnation)[0])
        newest, named = self.decided(incarnation)
        return [n for n in found if newest is None or ((batch_of(n) or 0) >= newest and writer_of(n) not in named)]
