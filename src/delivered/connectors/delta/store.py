"""The ledger in the table's own log: one commit adds a batch's files and its decision.

Claims and decisions are commits that set the application transaction `owner`. Concurrent commits that set the same id
conflict, so a decision in flight never commits after a later claim.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from delivered.connectors.delta.client import Store, explained, open_table, require_table, sync_versions
from delivered.connectors.delta.commit import (
    CHECKPOINT_VERSIONS,
    OVERTAKEN,
    RETRIES_MAX,
    DataFile,
    StagedFiles,
    TableChange,
    commit,
    tidy,
)
from delivered.connectors.delta.options import DeltaOptions
from delivered.connectors.delta.partition import text
from delivered.connectors.delta.read import active_files, whole
from delivered.connectors.delta.records import Names, Record, Records, claim_of, digest, ledger_key, next_claim
from delivered.connectors.delta.target import TYPES, required, same_columns, table_schema
from delivered.connectors.delta.writer import DeltaFiles
from delivered.kits.sql.merge import stored as kept
from delivered.kits.table import stage
from delivered.kits.table.merge import BATCH_ROWS, Effect, one_of_each, staged_rows, upsert
from delivered.ledger.ledger import by_time, outdated, state_of
from delivered.ledger.store import Change, Head
from delivered.model.errors import DeliveredError, InvariantBroken
from delivered.model.identity import OtherLedger, Scope, Work, named_first
from delivered.model.limits import LEDGER_HISTORY_BATCHES, OWNERS_REMEMBERED
from delivered.model.outcome import Failed, Ok, Outcome
from delivered.model.prepared import Prepared
from delivered.model.work import Begun, Decision, LedgerState, Owner


def effect(options: DeltaOptions, table: Any, store: Store, work: Work, shards: Sequence[Sequence[DataFile]]) -> Effect:
    """
    Args:
        shards: the staged files of each, in its order.

    Raises:
        UsageError: without a version, a key is in two shards.
    """
    files = [file for shard in shards for file in shard]
    if options.write.upserts and files:
        rows = staged_rows(store, [[file.path for file in shard] for shard in shards])
        columns = table_schema(table)
        made = DeltaFiles(options.appending, work, columns, direct=False)
        there = [_File(store, file) for file in active_files(options, table)]
        gone = upsert(options.write, one_of_each(options.write, rows, options.path), columns, there, made)
        removes = [file.data["path"] for file in gone]
        return Effect(made.done, removes, made.stem, True, made.discard)
    if options.write.complete:
        return Effect(files, [f["path"] for f in active_files(options, table)], exact=True)
    if options.write.replaces and files:
        partitions = {tuple(file.partition.items()) for file in files}  # in the order of `partitionBy`, as in the table
        found = active_files(options, table)
        gone = [f["path"] for f in found if tuple((n, text(v)) for n, v in f["partition"].items()) in partitions]
        return Effect(files, gone, exact=True)
    return Effect(files)


@dataclass(frozen=True)
class _File:
    """See `delivered.kits.table.merge.TableFile`. `data`: from `active_files`."""

    store: Store
    data: dict[str, Any]

    def bounds(self, key: str) -> tuple[Any, Any] | None:
        if key in self.data["partition"]:
            value = self.data["partition"][key]
            return None if value is None or isinstance(value, str) else (value, value)
        low, high = self.data["min"].get(key), self.data["max"].get(key)
        # The log truncates texts.
        return None if low is None or high is None or isinstance(low, str) else (low, high)

    def rows(self, columns: pa.Schema) -> Iterator[pa.RecordBatch]:
        partition = self.data["partition"]
        with self.store.fs.open_input_file(self.data["path"]) as source:
            reader = pq.ParquetFile(source, pre_buffer=False)
            there = [n for n in columns.names if n not in partition and n in reader.schema_arrow.names]
            if not there:  # without any of them, only the number of rows is known
                yield whole(pa.RecordBatch.from_pylist([{}] * reader.metadata.num_rows), columns, partition)
                return
            for batch in reader.iter_batches(BATCH_ROWS, columns=there, use_threads=False):
                yield whole(batch, columns, partition)


class DeltaStore:
    """See `delivered.ledger.store.Store`."""

    def __init__(self, options: DeltaOptions, scope: Scope) -> None:
        self._options = options
        self._scope = scope
        self._names = Names(scope)
        self._opened: Records | None = None
        self._table: Any = None
        self._earlier: tuple[int, dict[str, tuple[Decision | None, Begun | None]]] | None = None

    @property
    def where(self) -> str:
        return f"in the table at {self._options.path!r}"

    def read(self) -> LedgerState:
        return self._read(self._refresh)

    def peek(self) -> LedgerState:
        return self._read(lambda: open_table(self._options))

    def take(self, successor: Callable[[Head], Owner]) -> Outcome[int]:
        with explained(self._options):
            table = self._refresh()
            # This claim builds on the last commit, which may not be durable if its driver died.
            sync_versions(self._options, table.version() - CHECKPOINT_VERSIONS, table.version())
            head = self._head(table)
            owner, claim = successor(head), next_claim(head.epoch)
            self._records.store.put(self._names.owner_file(claim), owner.to_json().encode())
        outcome = self._commit(table, claim, {})
        if not isinstance(outcome, Ok):
            return outcome
        stage.note_claim(ledger_key(self._options, self._scope), claim)
        with explained(self._options), contextlib.suppress(OSError):
            self._forget(self._refresh())
        return Ok(claim)

    def write(self, rule: Callable[[Head], Change | None]) -> Outcome[None]:
        for _ in range(RETRIES_MAX):
            with explained(self._options):
                table = self._refresh()
                head = self._head(table)
                change = rule(head)
                if change is None:
                    return Ok(None)
                if change.begun is not None:
                    outcome = self._begin(table, head.epoch, change.begun)
                if change.decision is not None:
                    outcome = self._decide(table, head.epoch, change.decision, change.move)
            # Another commit came first, so this one certainly failed: not a blind retry (P19).
            if not (isinstance(outcome, Failed) and OVERTAKEN in outcome.reason):
                break
        return outcome

    def history(self) -> Iterator[Decision]:
        table = open_table(self._options)
        if table is not None:
            with explained(self._options):
                yield from reversed(list(self._records.chain(table, self._scope.incarnation)))

    def others(self) -> list[OtherLedger]:
        found = []
        with explained(self._options):
            table, store = self._refresh(), self._records.store
            for p in store.folders("_delivered"):
                for s in store.folders(f"_delivered/{p}"):
                    theirs = Scope(p.removeprefix("p-"), s.removeprefix("s-"), self._scope.incarnation)
                    names = Names(theirs)
                    known = (names.batch(theirs.incarnation), names.begun(theirs.incarnation))
                    holds = any(table.transaction_version(name) is not None for name in known)
                    if theirs != self._scope:
                        found.append(OtherLedger(theirs.pipeline, theirs.sink, holds))
        return named_first(found)

    def close(self) -> None:
        self._table = self._opened = None

    @property
    def _records(self) -> Records:
        if self._opened is None:
            self._opened = Records(Store(self._options), self._scope)
        return self._opened

    def _head(self, table: Any) -> Head:
        records, incarnation = self._records, self._scope.incarnation
        owner, claim = records.owner(table)
        newest = records.newest(table, incarnation)
        return Head(
            owner,
            claim,
            None if newest is None else newest[0],
            lambda: records.last(table, incarnation),
            lambda: records.begun(table, incarnation),
        )

    def _begin(self, table: Any, claim: int, begun: Begun) -> Outcome[None]:
        name = self._names.begun(self._scope.incarnation)
        data = begun.to_json().encode()
        before = table.transaction_version(name)
        self._records.store.put(self._names.begun_file(self._scope.incarnation, digest(data)), data)
        outcome = self._commit(table, claim, {name: digest(data)})
        if isinstance(outcome, Ok) and before is not None:
            self._take_away([self._names.begun_file(self._scope.incarnation, before)])
        return outcome

    def _decide(self, table: Any, claim: int, decision: Decision, move: Sequence[Prepared]) -> Outcome[None]:
        """The decision and the files of this sink's participants, in one commit of the log.

        1  check that the files exist, are complete and match the table <- crash points of commit.apply
        2  write the record of the decision, which nothing points to yet
        3  one commit: files, batch, hash of the record, claim          <- from here on the batch counts
        4  delete old records; write a checkpoint of the log if due
        """
        incarnation, records = self._scope.incarnation, self._records
        previous = records.newest(table, incarnation)
        if previous is not None and previous[0] == decision.batch:
            # A batch's next revision replaces it in the chain.
            previous = records.decided(incarnation, previous).previous
        shards = self._staged(table, decision, move)
        options = self._options.appending if decision.revision else self._options  # a revision moves nothing
        made = effect(options, table, records.store, Work(self._scope, decision.batch, 0), shards)
        try:
            required(self._options, table, made.adds)
        except BaseException:
            made.discard()
            raise
        data = Record(decision.to_json(), previous, made.writer).encode()
        own = (decision.batch, digest(data))
        name = self._names.decided_file(incarnation, *own)
        records.store.put(name, data)
        before = table.version()

        def there(now: Any) -> bool:
            # Others may have claimed and decided since then: search the chain.
            with explained(self._options):
                return any(at == own for at in records.positions(now, incarnation, own[0]))

        change = {self._names.batch(incarnation): own[0], self._names.record(incarnation): own[1]}
        outcome = self._commit(table, claim, change, made, there)
        if isinstance(outcome, Failed):
            self._take_away([name])
            made.discard()
        if isinstance(outcome, Ok):
            if made.writer:
                self._take_away([f.path for shard in shards for f in shard])
            self._forget_batches(decision.batch)
            tidy(self._options, table, before)
        return outcome

    def _commit(
        self,
        table: Any,
        claim: int,
        transactions: Mapping[str, int],
        made: Effect | None = None,
        there: Callable[[Any], bool] | None = None,
    ) -> Outcome[None]:
        """One commit under a claim: succeeds before any later claim, or not at all."""
        made = made or Effect()
        change = TableChange(made.adds, {**transactions, self._names.owner: claim}, made.removes, made.exact)

        def newest(now: Any) -> bool:
            return all(now.transaction_version(name) == version for name, version in change.transactions.items())

        there = there or newest
        return commit(self._options, table, change, there)  # THE line that decides a batch in this sink

    def _staged(self, table: Any, decision: Decision, move: Sequence[Prepared]) -> list[Sequence[DataFile]]:
        """The files of each participant, verified to exist, to be complete and to match the table.

        Raises:
            InvariantBroken: a file is missing, or differs from what was prepared.
        """
        files: list[Sequence[DataFile]] = []
        if not move:
            return files
        there = self._records.store.files(stage.block_folder(self._scope, self._scope.incarnation, decision.batch))
        for prepared in move:
            with stage.moving(decision, prepared):
                staged = StagedFiles.of(prepared).files
                stage.check_count(prepared, sum(f.rows for f in staged))
                for file in staged:
                    stage.check_whole(there, file.path, file.size)
                if not files:
                    same_columns(self._options, table, self._staged_schema(table, staged[0]))
                files.append(staged)
        return files

    def _staged_schema(self, table: Any, file: DataFile) -> pa.Schema:
        """Schema of a file's rows, including its partition columns."""
        import pyarrow.parquet as pq

        with self._records.store.fs.open_input_file(file.path) as source:
            stored = kept(self._options.write, TYPES.canonical_schema(pq.read_schema(source)))
        known = table_schema(table)
        return pa.schema([*stored, *(known.field(name) for name in file.partition if name in known.names)])

    def _read(self, table: Callable[[], Any]) -> LedgerState:
        """Retried once if records were replaced and deleted in the meantime."""
        with explained(self._options):
            try:
                return self._state(table())
            except InvariantBroken:
                return self._state(table())

    def _state(self, table: Any | None) -> LedgerState:
        if table is None:
            return LedgerState()
        records, own = self._records, self._scope.incarnation
        owner, claim = records.owner(table)
        # Read once per claim, under which records of other incarnations cannot change.
        if self._earlier is None or self._earlier[0] != claim:
            self._earlier = (claim, {i: records.of(table, i) for i in records.incarnations() if i != own})
        found = {**self._earlier[1], own: records.of(table, own)}
        decisions = [d for d, _ in found.values() if d is not None]
        begun = {i: b for i, (_, b) in found.items() if b is not None}
        return state_of(self._scope, owner, claim, by_time(decisions), begun, lambda i: records.archive.read().find(i))

    def _forget(self, table: Any) -> None:
        """Keep only the newest decision of other incarnations, archived entries of very old ones, and newest owners."""
        state, records, names = self._state(table), self._records, self._names
        old = outdated(state)
        records.archive.add(old.entries)
        known = {*(d.scope.incarnation for d in state.earlier), *(i for i, _ in state.earlier_begun)}
        gone: list[str] = []
        for incarnation in records.incarnations():
            if incarnation == self._scope.incarnation:
                continue
            kept, newest = incarnation in known.difference(old.incarnations), records.newest(table, incarnation)
            keep = names.decided_file(incarnation, *newest) if kept and newest else ""
            gone += [f for f in records.store.files(names.decided_folder(incarnation)) if f != keep]
            if not kept:
                gone += records.store.files(names.begun_folder(incarnation))
        # Keep some: another process may be reading one that was the newest until now. Claims in flight have newer
        # files. Files without a claim in their name are being written by another driver.
        owners = sorted((f for f in records.store.files(names.owner_folder) if claim_of(f)), key=claim_of)
        self._take_away(gone + [f for f in owners[:-OWNERS_REMEMBERED] if claim_of(f) < state.epoch])

    def _forget_batches(self, batch: int) -> None:
        horizon = batch - LEDGER_HISTORY_BATCHES
        if horizon < 0 or horizon % stage.BLOCK_BATCHES:
            return
        with contextlib.suppress(OSError):
            files = self._records.store.files(self._names.decided_folder(self._scope.incarnation))
            self._take_away(f for f in files if (stage.batch_of(f) or 0) <= horizon)

    def _take_away(self, names: Iterable[str]) -> None:
        """Delete unreferenced files; the next claim finds those that remain."""
        with contextlib.suppress(OSError, DeliveredError):
            self._records.store.remove(names)

    def _refresh(self) -> Any:
        """The table at its newest version."""
        if self._table is not None:
            try:
                self._table.update_incremental()
            except Exception:  # log cleanup, or the table was recreated: reopen it
                self._table = None
        if self._table is None:
            self._table = require_table(self._options)
        return self._table
