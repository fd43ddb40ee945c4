"""The ledger in the table's own metadata, and a batch's effect on the table: one commit adds its files and decision.

How rows of a batch meet those of the table: `delivered.kits.table.changes`.
"""

from __future__ import annotations

import base64
import contextlib
import sys
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from delivered.connectors.iceberg import IcebergOptions, writer
from delivered.connectors.iceberg.client import (
    TableChange,
    commit,
    data_path,
    explained,
    keep_nulls,
    metadata_path,
    open_table,
    require_table,
    store,
)
from delivered.connectors.iceberg.target import TYPES, check_features, compare, plain, same_columns
from delivered.connectors.iceberg.writer import IcebergFiles, StagedFiles
from delivered.kits.sql.table import stored_columns
from delivered.kits.table import shard
from delivered.kits.table.changes import Effect, one_of_each, staged_rows, upsert
from delivered.kits.table.shard import StagedFilesCommitter
from delivered.kits.table.store import NO_SEAL, SealFiles, SealPlace, Store
from delivered.ledger import Change, Head, by_time, outdated, state_of
from delivered.model.errors import DeliveredError, InvariantBroken, UsageError
from delivered.model.identity import OtherLedger, Scope, Target, Work, named_first
from delivered.model.limits import LEDGER_HISTORY_BATCHES
from delivered.model.rows import fitted
from delivered.model.work import (
    STARTED,
    Archive,
    Archived,
    Decision,
    Failed,
    LedgerState,
    Ok,
    Outcome,
    Owner,
    Prepared,
    Started,
)

# The ledger's records, in the table's own metadata.
#
#     property                                             value
#     delivered/<pipeline>/<sink>/owner                    the owner and the epoch of its claim, as JSON
#     delivered/<pipeline>/<sink>/decided/<incarnation>    the newest decision: its batch, the commit's mark, the record
#     delivered/<pipeline>/<sink>/{STARTED}/<incarnation>  the newest started batch, as JSON
#     delivered/<pipeline>/<sink>/archive                  entries of old incarnations, in base64
#
#     branch                                               snapshot
#     delivered/<pipeline>/<sink>                          of the newest claim; empty, without a parent
#     delivered/<pipeline>/<sink>/seal                     empty; its summary names the newest seal of an audit
#
# Properties survive snapshot expiry. A decision is also in the summary of its snapshot, where the audit reads older
# ones for as long as the table keeps them. A record is deflated JSON in base64.

# Seals are files in `_delivered` below the table's location, which procedures that remove orphan files skip.

IN_SUMMARY = "delivered.decision"
_SEAL = "delivered.seal"


@dataclass(frozen=True)
class Names:
    """Properties and branch of one pipeline and sink."""

    scope: Scope

    @property
    def branch(self) -> str:
        return f"delivered/{self.scope.pipeline}/{self.scope.sink}"

    @property
    def seals(self) -> str:
        """Branch of the newest seal."""
        return f"{self.branch}/seal"

    @property
    def owner(self) -> str:
        return f"{self.branch}/owner"

    def decided(self, incarnation: str) -> str:
        return f"{self.branch}/decided/{incarnation}"

    @property
    def archive(self) -> str:
        return f"{self.branch}/archive"

    def started(self, incarnation: str) -> str:
        return f"{self.branch}/{STARTED}/{incarnation}"

    def summary(self, decision: Decision) -> dict[str, str]:
        """Summary of a decision's snapshot."""
        return {
            "delivered.pipeline": self.scope.pipeline,
            "delivered.sink": self.scope.sink,
            "delivered.incarnation": decision.scope.incarnation,
            "delivered.batch": str(decision.batch),
            IN_SUMMARY: packed(decision.to_json()),
        }


@dataclass(frozen=True)
class Claim:
    """
    Attributes:
        epoch: grows with every claim.
        snapshot: of the branch.
    """

    owner: Owner
    epoch: int
    snapshot: int | None


def packed(text: str) -> str:
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def unpacked(where: str, text: str) -> str:
    """Raises InvariantBroken: it is corrupt."""
    try:
        return zlib.decompress(base64.b64decode(text)).decode()
    except ValueError as error:
        raise _spoiled(where, error) from None
    except zlib.error as error:
        raise _spoiled(where, error) from None


class Records:
    """Reads the metadata of a loaded table."""

    def __init__(self, table: Any, scope: Scope) -> None:
        self._table = table
        self._names = Names(scope)
        self._properties: Mapping[str, str] = table.properties

    def claim(self) -> Claim | None:
        text = self._properties.get(self._names.owner)
        if text is None:
            return None
        try:
            owner, more = Owner.from_json(text)
            epoch = int(more["epoch"])
        except (ValueError, TypeError, KeyError) as error:
            raise _spoiled(self._names.owner, error) from None
        branch = self._table.metadata.refs.get(self._names.branch)
        return Claim(owner, epoch, branch.snapshot_id if branch else None)

    def decided(self, incarnation: str) -> Decision | None:
        name = self._names.decided(incarnation)
        text = self._properties.get(name)
        if text is None:
            return None
        return Decision.from_json(unpacked(name, text.rpartition(" ")[2]))

    def mark(self, incarnation: str) -> str | None:
        """Mark of the commit that decided the newest batch; part of its manifests' names."""
        text = self._properties.get(self._names.decided(incarnation))
        return None if text is None else text.split(" ")[1]

    def writer(self, incarnation: str) -> str | None:
        """Writer of the newest batch's files, if they are not the staged ones."""
        parts = (self._properties.get(self._names.decided(incarnation)) or "").split(" ")
        return parts[2] if len(parts) == 4 else None

    def newest(self, incarnation: str) -> int | None:
        """The newest decided batch."""
        text = self._properties.get(self._names.decided(incarnation))
        return None if text is None else int(text.partition(" ")[0])

    def started(self, incarnation: str) -> Started | None:
        name = self._names.started(incarnation)
        text = self._properties.get(name)
        if text is None:
            return None
        try:
            return Started.from_json(text)
        except (ValueError, KeyError) as error:
            raise _spoiled(name, error) from None

    def archive(self) -> Archive:
        name = self._names.archive
        try:
            return Archive(base64.b64decode(self._properties.get(name, ""), validate=True), repr(name))
        except ValueError as error:
            raise _spoiled(name, error) from None

    def archived(self, incarnation: str) -> Archived | None:
        return self.archive().find(incarnation)

    def incarnations(self) -> list[str]:
        """Incarnations that decided or began a batch."""
        starts = (self._names.decided(""), self._names.started(""))
        return sorted({name.removeprefix(s) for s in starts for name in self._properties if name.startswith(s)})

    def history(self, incarnation: str) -> Iterator[Decision]:
        """Decisions still kept, oldest first; only the newest revision of each."""
        scope = self._names.scope
        own = {"delivered.pipeline": scope.pipeline, "delivered.sink": scope.sink, "delivered.incarnation": incarnation}
        decisions: dict[int, Decision] = {}
        for snapshot in sorted(self._table.metadata.snapshots, key=lambda s: s.sequence_number or 0):
            properties = snapshot.summary.additional_properties if snapshot.summary is not None else {}
            if IN_SUMMARY in properties and own.items() <= properties.items():
                text = unpacked(f"the summary of snapshot {snapshot.snapshot_id}", properties[IN_SUMMARY])
                decision = Decision.from_json(text)
                decisions[decision.batch] = decision
        last = self.decided(incarnation)
        if last is not None:
            decisions[last.batch] = last
            yield from (decisions[batch] for batch in sorted(decisions) if batch <= last.batch)


def decided_text(decision: Decision, mark: uuid.UUID, writer: str = "") -> str:
    """Args: writer: of files that are not the staged ones. Our names contain no spaces."""
    return f"{decision.batch} {mark} {writer + ' ' if writer else ''}{packed(decision.to_json())}"


def ledger_key(options: IcebergOptions, scope: Scope) -> tuple[str, ...]:
    """Identifies a ledger in this process."""
    return ("iceberg", options.catalog["uri"], options.catalog_name, options.table, scope.pipeline, scope.sink)


def _spoiled(where: str, error: Exception) -> InvariantBroken:
    return InvariantBroken("LEDGER_RECORD_MISSING.ICEBERG", where=where, error=error)


# Aborts staged files. Their rows become visible with the decision.


class IcebergCommitter(StagedFilesCommitter):
    def __init__(self, options: IcebergOptions, scope: Scope) -> None:
        super().__init__(scope)
        self._options = options

    def was_committed(self, work: Work, prepared: Prepared) -> bool:  # noqa: ARG002 - a batch is one commit
        table = open_table(self._options)
        newest = None if table is None else Records(table, work.scope).newest(work.scope.incarnation)
        return newest is not None and newest >= work.batch

    def _remove(self, prepared: Prepared) -> None:
        staged = StagedFiles.of(prepared)
        names = [f"{staged.writer}-{n}.parquet" for n in range(staged.files)]
        with explained(self._options):
            table = require_table(self._options)
            self._undecided(store(table, data_path(table))).remove([*names, staged.manifest])

    def _remove_orphans(self, keep: Sequence[Prepared]) -> int:
        """Data files first, then manifests of failed commits."""
        with explained(self._options):
            table = open_table(self._options)
            if table is None:
                return 0
            undecided = self._undecided(store(table, data_path(table)))
            count = undecided.abort_orphans(_writers(keep))
            self._remove_manifests(table, undecided)
            return count

    def _target(self) -> Target | None:
        table = open_table(self._options)
        return None if table is None else Target(f"table {self._options.table}", str(table.metadata.table_uuid))

    def _undecided(self, files: Store) -> shard.Undecided:
        return shard.Undecided(
            files, self._scope, ledger_key(self._options, self._scope), self._decided, lambda: self._epoch()
        )

    def _decided(self, incarnation: str) -> tuple[int | None, set[str]]:
        """The newest decided batch, and the writers whose files it names."""
        table = open_table(self._options)
        records = None if table is None else Records(table, self._scope)
        decision = None if records is None else records.decided(incarnation)
        if records is None or decision is None:
            # An archived incarnation has nothing open; any of its files may be decided.
            long_past = records is not None and records.archived(incarnation) is not None
            return sys.maxsize if long_past else None, set()
        merged_by = records.writer(incarnation)
        merged = set() if merged_by is None else {shard.parse_writer(f"{merged_by}-")}
        return decision.batch, _writers(decision.of(self._scope.sink)) | merged

    def _epoch(self) -> int | None:
        table = open_table(self._options)
        held = None if table is None else Records(table, self._scope).claim()
        return None if held is None else held.epoch

    def _remove_manifests(self, table: Any, undecided: shard.Undecided) -> None:
        """Delete those of undecided batches, of failed attempts at the newest decided one, and of earlier claims."""
        files = store(table, metadata_path(table))
        manifests: list[str] = []
        for folder in files.folders(shard.sink_folder(self._scope)):
            if folder.startswith("i-"):
                incarnation = folder.removeprefix("i-")
                before = Records(table, self._scope)
                if before.newest(incarnation) is None and before.archived(incarnation) is not None:
                    continue
                newest = before.newest(incarnation)
                there = shard.newest_files(files, self._scope, incarnation, newest)
                records = Records(require_table(self._options), self._scope)
                newest, mark = records.newest(incarnation), records.mark(incarnation) or "none"
                for name in there:
                    batch = shard.parse_batch(name)
                    if batch is not None and (
                        newest is None or batch > newest or (batch == newest and mark not in name)
                    ):
                        manifests.append(name)
        claims = list(files.files(claims_folder(self._scope)))
        now = require_table(self._options)
        held = Records(now, self._scope).claim()
        branch = now.snapshot_by_name(Names(self._scope).branch)
        current = branch.manifest_list if branch is not None else ""
        undecided.check_claim()
        # Higher numbers may belong to a claim in flight.
        old = [c for c in claims if held is not None and (shard.parse_batch(c) or 0) <= held.epoch]
        files.remove([*manifests, *(c for c in old if not current.endswith(c))])


def _writers(prepared: Sequence[Prepared]) -> set[str]:
    return {shard.parse_writer(f"{StagedFiles.of(p).writer}-") for p in prepared if p.handle}


def claims_folder(scope: Scope) -> str:
    return f"{shard.sink_folder(scope)}/claims"


# The ledger in the table's own metadata: one commit adds a batch's files and its decision.
#
# A claim is a commit that moves a branch of the table to a new, empty snapshot; every decision asserts the snapshot of
# its claim, and the catalog rejects it if the branch has moved. So a decision in flight never commits after a later
# claim, and concurrent appends by others do not fence the owner.

Staged = list[tuple[Prepared, list[Any]]]
"""Participants and their data files; for mode upsert, their file names."""


class IcebergStore:
    """See `delivered.ledger.Store`."""

    def __init__(self, options: IcebergOptions, scope: Scope) -> None:
        self._options = options
        self._scope = scope
        self._names = Names(scope)

    @property
    def where(self) -> str:
        return f"in the table {self._options.where}"

    def read(self) -> LedgerState:
        return self._state(require_table(self._options))

    def peek(self) -> LedgerState:
        table = open_table(self._options)
        return LedgerState() if table is None else self._state(table)

    def take(self, successor: Callable[[Head], Owner]) -> Outcome[int]:
        epoch = 0

        def change(table: Any) -> TableChange:
            nonlocal epoch
            held = Records(table, self._scope).claim()
            owner = successor(self._head(table))
            epoch = 1 if held is None else held.epoch + 1
            archive, removals = self._forgotten(table)
            return TableChange(
                folder=claims_folder(self._scope),
                prefix=f"{epoch}-",
                summary={"delivered.pipeline": self._scope.pipeline, "delivered.sink": self._scope.sink},
                branch=self._names.branch,
                properties={self._names.owner: owner.to_json(epoch=epoch), **archive},
                removals=removals,
                expires=[held.snapshot] if held is not None and held.snapshot is not None else [],
            )

        outcome = commit(self._options, change)
        if not isinstance(outcome, Ok):
            return outcome
        shard.record_claim(ledger_key(self._options, self._scope), epoch)
        return Ok(epoch)

    def write(self, rule: Callable[[Head], Change | None]) -> Outcome[None]:
        """A decision and the files of this sink's participants, in one commit.

        1  read the table; call the rule
        2  check that the files exist, are complete and match the table <- crash points of commit.apply
        3  write the manifests of a new snapshot, which nothing points to yet
        4  one commit: the snapshot, and the record of the decision     <- from here on the batch counts
        5  delete files that only the driver needed
        """
        staged: Staged | None = None
        effect = Effect()

        def change(table: Any) -> TableChange | None:
            nonlocal staged, effect
            head, held = self._head(table), Records(table, self._scope).claim()
            wanted = rule(head)
            claim = None if held is None or held.snapshot is None else (self._names.branch, held.snapshot)
            if wanted is not None and wanted.started is not None:
                properties = {self._names.started(self._scope.incarnation): wanted.started.to_json()}
                return TableChange(folder="", prefix="", properties=properties, claim=claim)
            if wanted is not None and wanted.decision is not None:
                effect.discard()  # from an attempt that lost against another commit
                effect = Effect()
                if staged is None:
                    staged = self._staged(table, wanted.decision, wanted.move)
                effect = self._effect(table, wanted.decision, staged)
                return self._decided(wanted.decision, effect, claim)
            return None

        try:
            outcome = commit(self._options, change)  # THE line that decides a batch in this sink
        except DeliveredError:
            # `commit` only raises before it sends anything to the catalog.
            effect.discard()
            raise
        if isinstance(outcome, Failed):
            effect.discard()
        if isinstance(outcome, Ok) and staged:
            handles = [StagedFiles.of(p) for p, _ in staged]
            rows = [name for handle in handles for name, _, _ in handle.rows]
            self._take_away(rows or [handle.manifest for handle in handles])
        return outcome

    def history(self) -> Iterator[Decision]:
        table = open_table(self._options)
        if table is not None:
            decisions = list(Records(table, self._scope).history(self._scope.incarnation))
            yield from decisions[-LEDGER_HISTORY_BATCHES:]

    def others(self) -> list[OtherLedger]:
        properties, ledgers = require_table(self._options).properties, []
        for name in properties:
            match name.split("/"):
                case ["delivered", pipeline, sink, "owner"] if name != self._names.owner:
                    names = Names(Scope(pipeline, sink, self._scope.incarnation))
                    known = (names.decided(names.scope.incarnation), names.started(names.scope.incarnation))
                    ledgers.append(OtherLedger(pipeline, sink, any(k in properties for k in known)))
                case _:
                    pass
        return named_first(ledgers)

    def last_seal(self, sink: str) -> str | None:
        table = open_table(self._options)
        if table is None:
            return None
        with explained(self._options):
            return self._seals(table, sink).last(self._sealed(table, sink))

    def seals(self, sink: str, first: int = 0) -> Iterator[str]:
        table = open_table(self._options)
        if table is not None:
            with explained(self._options):
                yield from self._seals(table, sink).texts(self._sealed(table, sink), first)

    def add_seal(self, sink: str, number: int, text: str) -> Outcome[None]:
        """A commit that moves the branch of the seals, and asserts where it was; it touches neither rows nor claims."""
        names = Names(replace(self._scope, sink=sink))
        table = require_table(self._options)
        folder = f"{shard.sink_folder(names.scope)}/seals"

        def newest() -> SealPlace:
            return self._sealed(require_table(self._options), sink)

        def move(before: SealPlace, after: SealPlace) -> Outcome[None]:
            old: list[Any] = []
            overtaken = False

            def change(now: Any) -> TableChange | None:
                nonlocal overtaken
                overtaken = self._sealed(now, sink) != before
                old[:] = [s for s in (now.snapshot_by_name(names.seals),) if s is not None]
                summary = {
                    "delivered.pipeline": names.scope.pipeline,
                    "delivered.sink": sink,
                    _SEAL: f"{after.number} {after.digest}",
                }
                expires = [s.snapshot_id for s in old]
                moved = TableChange(folder, f"{after.number}-", summary, branch=names.seals, expires=expires)
                return None if overtaken else moved

            outcome = commit(self._options, change)
            if overtaken:
                return Failed("another audit has sealed meanwhile")
            if isinstance(outcome, Ok):
                with contextlib.suppress(Exception):  # nothing points to it
                    for snapshot in old:
                        table.io.delete(snapshot.manifest_list)
            return outcome

        return self._seals(table, sink).add(sink, number, text, newest, move)

    def close(self) -> None:
        """Catalogs stay open in this process, for later batches."""

    def _seals(self, table: Any, sink: str) -> SealFiles:
        folder = f"_delivered/p-{self._scope.pipeline}/s-{sink}/seals"
        return SealFiles(store(table, table.location().rstrip("/")), folder)

    def _sealed(self, table: Any, sink: str) -> SealPlace:
        """What the branch of a sink's seals names."""
        branch = Names(replace(self._scope, sink=sink)).seals
        snapshot = table.snapshot_by_name(branch)
        if snapshot is None:
            return NO_SEAL
        try:
            number, digest = snapshot.summary.additional_properties[_SEAL].split(" ")
            return SealPlace(int(number), int(digest))
        except (KeyError, ValueError, AttributeError) as error:
            raise _spoiled(branch, error) from None

    def _head(self, table: Any) -> Head:
        records, incarnation = Records(table, self._scope), self._scope.incarnation
        held = records.claim()
        return Head(
            held.owner if held else None,
            # A claim whose branch was dropped fences no owner, and no longer counts.
            held.epoch if held is not None and held.snapshot is not None else 0,
            records.newest(incarnation),
            lambda: records.decided(incarnation),
            lambda: records.started(incarnation),
        )

    def _decided(self, decision: Decision, effect: Effect, claim: tuple[str, int] | None) -> TableChange:
        incarnation, mark = self._scope.incarnation, uuid.uuid4()
        return TableChange(
            folder=shard.block_folder(self._scope, incarnation, decision.batch),
            prefix=f"{decision.batch}-",
            summary=self._names.summary(decision),
            files=effect.adds,
            removes=effect.removes,
            properties={self._names.decided(incarnation): decided_text(decision, mark, effect.writer)},
            claim=claim,
            mark=mark,
        )

    def _effect(self, table: Any, decision: Decision, staged: Staged) -> Effect:
        """The effect of the batch on the current table."""
        with explained(self._options):
            if self._options.write.upserts:
                check_features(self._options, table)
                work = Work(decision.scope, decision.batch, 0, 0)
                return upserted(self._options, table, work, [files for _, files in staged])
            for prepared, _ in staged:
                handle = StagedFiles.of(prepared)
                same_columns(self._options, table, handle.schema, handle.spec, handle.columns)
            files = [file for _, files in staged for file in files]
            if self._options.write.complete and not decision.revision:
                return replaced(table, files)
            return overwritten(self._options, table, files) if self._options.write.replaces else Effect(files)

    def _staged(self, table: Any, decision: Decision, move: Sequence[Prepared]) -> Staged:
        """The staged files, verified to exist and be complete.

        Raises:
            InvariantBroken: a file is missing, or differs from what was prepared.
        """
        if not move:
            return []
        path, found = data_path(table), []
        with explained(self._options):
            there = store(table, path).files(shard.block_folder(self._scope, self._scope.incarnation, decision.batch))
        for prepared in move:
            with shard.moving(decision, prepared):
                if rows := StagedFiles.of(prepared).rows:
                    for name, size, _ in rows:
                        shard.check_complete(there, name, size)
                    shard.check_count(prepared, sum(count for _, _, count in rows))
                    found.append((prepared, [name for name, _, _ in rows]))
                else:
                    files = self._named(table, prepared, there)
                    for file in files:
                        name = file.file_path.removeprefix(f"{path}/")
                        shard.check_complete(there, name, file.file_size_in_bytes)
                    shard.check_count(prepared, sum(file.record_count for file in files))
                    found.append((prepared, files))
        return found

    def _named(self, table: Any, prepared: Prepared, there: Mapping[str, int]) -> list[Any]:
        """The data files in a participant's manifest."""
        handle = StagedFiles.of(prepared)
        name, size = handle.manifest, handle.bytes
        shard.check_complete(there, name, size)
        try:
            with explained(self._options):
                return writer.get(table, f"{data_path(table)}/{name}", size, handle.spec)
        except DeliveredError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                shard.check_complete({}, name, size)
            raise

    def _state(self, table: Any) -> LedgerState:
        records = Records(table, self._scope)
        held = records.claim()
        states = [(i, records.decided(i), records.started(i)) for i in records.incarnations()]
        return state_of(
            self._scope,
            held.owner if held else None,
            held.epoch if held else 0,
            by_time(d for _, d, _ in states if d is not None),
            {i: b for i, _, b in states if b is not None},
            records.archived,
        )

    def _forgotten(self, table: Any) -> tuple[dict[str, str], list[str]]:
        """Properties of very old incarnations to delete, and the archive property that replaces them."""
        old = outdated(self._state(table))
        if not old.incarnations:
            return {}, []
        kept = base64.b64encode(Records(table, self._scope).archive().with_more(old.entries).data).decode()
        names = [name for i in old.incarnations for name in (self._names.decided(i), self._names.started(i))]
        return {self._names.archive: kept}, [name for name in names if name in table.properties]

    def _take_away(self, names: Iterable[str]) -> None:
        """Delete unreferenced files; the next claim finds those that remain."""
        with contextlib.suppress(OSError, DeliveredError):
            table = require_table(self._options)
            store(table, data_path(table)).remove(names)


# The effect of a batch on the table: see `delivered.kits.table.changes`.
#
# It is based on a snapshot, which its commit asserts, and is recomputed if there is a newer one.


def overwritten(options: IcebergOptions, table: Any, files: Sequence[Any]) -> Effect:
    """
    Args:
        files: of all shards, by the table's partitions.

    Raises:
        UsageError: the table has files of an earlier partition spec, which cannot be compared.
    """
    if not files:
        return Effect()
    partitions = {tuple(f.partition) for f in files}
    spec = table.metadata.default_spec_id
    removes = []
    for task in _tasks(table):
        if task.file.spec_id != spec:
            raise UsageError("PARTITIONS.ICEBERG_OLD_SPEC", where=options.where)
        if tuple(task.file.partition) in partitions:
            removes.append(task.file)
    return Effect(files, removes)


def replaced(table: Any, files: Sequence[Any]) -> Effect:
    """Replace all of the table's files with `files`."""
    return Effect(files, [task.file for task in _tasks(table)])


def upserted(options: IcebergOptions, table: Any, work: Work, shards: Sequence[Sequence[str]]) -> Effect:
    """
    Args:
        shards: names of the staged files of each, in order.

    Raises:
        UsageError: without a version, a key is in two shards; or the rows no longer match the table.
    """
    if not any(shards):
        return Effect()
    mode = options.write
    rows = one_of_each(mode, staged_rows(store(table, data_path(table)), shards), options.table)
    shown = [f for f in stored_columns(mode, rows.schema) if not f.name.startswith("\0")]  # without helpers
    compare(options, table, TYPES.canonical_schema(pa.schema(shown)))
    columns = plain(table.schema())
    files = IcebergFiles(options.appending, work, columns, direct=False)
    replaced_files = upsert(mode, rows, columns, [_File(table, task) for task in _tasks(table)], files)
    removes = [file.task.file for file in replaced_files]
    return Effect(files.done, removes, files.writer if files.done else "", True, files.discard)


def _tasks(table: Any) -> list[Any]:
    """Scan tasks for the table's rows, one per data file."""
    if table.metadata.current_snapshot_id is None:
        return []
    return sorted(table.scan().plan_files(), key=lambda task: task.file.file_path)


@dataclass(frozen=True)
class _File:
    """See `delivered.kits.table.changes.TableFile`. `task`: from `_tasks`."""

    table: Any
    task: Any

    def bounds(self, key: str) -> tuple[Any, Any] | None:
        """Only exact ones: bounds of texts and bytes may be truncated."""
        from pyiceberg.conversions import from_bytes
        from pyiceberg.types import IntegerType, LongType

        field, file = self.table.schema().find_field(key), self.task.file
        low, high = ((b or {}).get(field.field_id) for b in (file.lower_bounds, file.upper_bounds))
        if low is None or high is None or not isinstance(field.field_type, IntegerType | LongType):
            return None
        return from_bytes(field.field_type, low), from_bytes(field.field_type, high)

    def rows(self, columns: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Without rows that delete files mask."""
        from pyiceberg.expressions import AlwaysTrue
        from pyiceberg.io.pyarrow import ArrowScan

        keep_nulls()
        chosen = self.table.schema().select(*columns.names)
        for batch in ArrowScan(self.table.metadata, self.table.io, chosen, AlwaysTrue()).to_record_batches([self.task]):
            yield fitted(batch, columns)
