"""The ledger in the table's own log: one commit adds a batch's files and its decision. Records are next to the log."""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import json
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from delivered.connectors.delta import DeltaOptions
from delivered.connectors.delta.client import (
    CHECKPOINT_VERSIONS,
    OVERTAKEN,
    RETRIES_MAX,
    DataFile,
    StagedFiles,
    Store,
    TableChange,
    commit,
    explained,
    open_table,
    require_table,
    sync_versions,
    tidy,
)
from delivered.connectors.delta.sink import DeltaFiles
from delivered.connectors.delta.target import (
    TYPES,
    active_files,
    filled,
    open_file,
    required,
    same_columns,
    table_schema,
    text,
)
from delivered.kits.sql.table import stored_columns as kept
from delivered.kits.table import shard
from delivered.kits.table.changes import BATCH_ROWS, Effect, one_of_each, staged_rows, upsert
from delivered.kits.table.shard import StagedFilesCommitter
from delivered.kits.table.store import NO_SEAL, ArchiveFiles, SealFiles, SealPlace
from delivered.ledger import Change, Head, by_time, outdated, state_of
from delivered.model.errors import DeliveredError, InvariantBroken
from delivered.model.identity import OtherLedger, Scope, Target, Work, named_first
from delivered.model.limits import LEDGER_HISTORY_BATCHES, OWNERS_REMEMBERED
from delivered.model.work import STARTED, Decision, Failed, LedgerState, Ok, Outcome, Owner, Prepared, Started

# The ledger's records, in files next to the log. The log's application transactions show which are valid.
#
#     _delivered/p-<pipeline>/s-<sink>/owner/<claim>.json
#                                      decided/<incarnation>/<batch>-<hash>.json
#                                      {STARTED}/<incarnation>/<hash>.json
#                                      archive/<hash>.bin
#                                      seals/...              see `kits.table.store`
#
#     application transaction                              version
#     delivered/<pipeline>/<sink>/owner                    the newest claim: its count, and 32 random bits
#     delivered/<pipeline>/<sink>/batch/<incarnation>      the newest decided batch
#     delivered/<pipeline>/<sink>/record/<incarnation>     the hash of its record
#     delivered/<pipeline>/<sink>/{STARTED}/<incarnation>  the hash of the record of the newest started batch
#     delivered/<pipeline>/<sink>/seal                     the number of the newest seal of an audit
#     delivered/<pipeline>/<sink>/sealed                   its hash
#
# A file is written before the commit that points to it, so unreferenced files never count. Vacuum and readers ignore
# folders whose names start with `_`. Each decision contains the hash of the previous one: a chain. Old incarnations
# leave an entry in the archive; the log keeps their application transactions permanently.

T = TypeVar("T")
_CLAIM_BITS = 32


@dataclass(frozen=True)
class Names:
    """Application transactions and folders of one pipeline and sink."""

    scope: Scope

    @property
    def _base(self) -> str:
        return f"delivered/{self.scope.pipeline}/{self.scope.sink}"

    @property
    def folder(self) -> str:
        return f"_delivered/p-{self.scope.pipeline}/s-{self.scope.sink}"

    @property
    def owner(self) -> str:
        return f"{self._base}/owner"

    @property
    def owner_folder(self) -> str:
        return f"{self.folder}/owner"

    def batch(self, incarnation: str) -> str:
        return f"{self._base}/batch/{incarnation}"

    def record(self, incarnation: str) -> str:
        return f"{self._base}/record/{incarnation}"

    def started(self, incarnation: str) -> str:
        return f"{self._base}/{STARTED}/{incarnation}"

    def owner_file(self, claim: int) -> str:
        return f"{self.owner_folder}/{claim}.json"

    def decided_folder(self, incarnation: str) -> str:
        return f"{self.folder}/decided/{incarnation}"

    def decided_file(self, incarnation: str, batch: int, digest: int) -> str:
        return f"{self.decided_folder(incarnation)}/{batch}-{digest}.json"

    @property
    def seal(self) -> str:
        return f"{self._base}/seal"

    @property
    def sealed(self) -> str:
        return f"{self._base}/sealed"

    def started_folder(self, incarnation: str) -> str:
        return f"{self.folder}/{STARTED}/{incarnation}"

    def started_file(self, incarnation: str, digest: int) -> str:
        return f"{self.started_folder(incarnation)}/{digest}.json"


def ledger_key(options: DeltaOptions, scope: Scope) -> tuple[str, ...]:
    """Identifies a ledger in this process."""
    return ("delta", options.path, scope.pipeline, scope.sink)


def next_claim(claim: int) -> int:
    """A unique number that increases with every claim, even among concurrent drivers."""
    return ((claim >> _CLAIM_BITS) + 1) << _CLAIM_BITS | secrets.randbits(_CLAIM_BITS)


def parse_claim(owner_file: str) -> int:
    """The claim in a file name; 0: not such a file."""
    digits = owner_file.rpartition("/")[2].removesuffix(".json")
    return int(digits) if digits.isdigit() else 0


@dataclass(frozen=True)
class Record:
    """A stored decision.

    Attributes:
        text: the decision's JSON.
        previous: (batch, hash) of the previous decision, if any.
        writer: of the committed files, if they are not the staged ones.
    """

    text: str
    previous: tuple[int, int] | None
    writer: str = ""

    def encode(self) -> bytes:
        data = {"decision": self.text, "previous": self.previous, **({"writer": self.writer} if self.writer else {})}
        return json.dumps(data, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> Record:
        document = json.loads(data)
        previous = document["previous"]
        before = None if previous is None else (int(previous[0]), int(previous[1]))
        return cls(document["decision"], before, document.get("writer", ""))

    @property
    def decision(self) -> Decision:
        return Decision.from_json(self.text)


def digest(data: bytes) -> int:
    """63 bits, to fit an application transaction's version; never 0."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") >> 1 or 1


class Records:
    """Reads the records that the log points to. Files never change, so they are cached."""

    def __init__(self, store: Store, scope: Scope) -> None:
        self.store = store
        self.names = Names(scope)
        self._kept: dict[str, bytes] = {}

    def owner(self, table: Any) -> tuple[Owner | None, int]:
        """The last owner and its claim; 0: none."""
        claim = table.transaction_version(self.names.owner)
        if claim is None:
            return None, 0
        return Owner.from_json(self._read(self.names.owner_file(claim)))[0], claim

    def newest(self, table: Any, incarnation: str) -> tuple[int, int] | None:
        """(batch, hash) of the newest decision."""
        batch = table.transaction_version(self.names.batch(incarnation))
        version = table.transaction_version(self.names.record(incarnation))
        return None if batch is None or version is None else (batch, version)

    def decided(self, incarnation: str, at: tuple[int, int]) -> Record:
        return Record.decode(self._read(self.names.decided_file(incarnation, *at), at[1]))

    def last(self, table: Any, incarnation: str) -> Decision | None:
        at = self.newest(table, incarnation)
        return None if at is None else self.decided(incarnation, at).decision

    def started(self, table: Any, incarnation: str) -> Started | None:
        version = table.transaction_version(self.names.started(incarnation))
        if version is None:
            return None
        return Started.from_json(self._read(self.names.started_file(incarnation, version), version))

    def of(self, table: Any, incarnation: str) -> tuple[Decision | None, Started | None]:
        """Newest decision and started batch of an incarnation; neither if it is archived and its records deleted, even
        if the log still points to them."""
        last = self._unless_archived(self.last, table, incarnation)
        return last, self._unless_archived(self.started, table, incarnation)

    def _unless_archived(self, read: Callable[[Any, str], T | None], table: Any, incarnation: str) -> T | None:
        try:
            return read(table, incarnation)
        except InvariantBroken:
            if self.archive.read().find(incarnation) is None:
                raise
            return None

    def chain(self, table: Any, incarnation: str) -> Iterator[Decision]:
        """Newest first, as far back as records are kept."""
        at = self.newest(table, incarnation)
        while at is not None:
            data = self.store.get(self.names.decided_file(incarnation, *at))
            if data is None:
                return
            record = Record.decode(data)
            yield record.decision
            at = record.previous

    def positions(self, table: Any, incarnation: str, batch: int) -> Iterator[tuple[int, int]]:
        """(batch, hash) of the decisions from the newest back to `batch`."""
        at = self.newest(table, incarnation)
        while at is not None and at[0] >= batch:
            yield at
            at = self.decided(incarnation, at).previous

    def incarnations(self) -> list[str]:
        """Those with a decision or a started batch: empty folders remain."""
        folders = [f"{self.names.folder}/{kind}/" for kind in ("decided", STARTED)]
        return sorted({n.removeprefix(f).partition("/")[0] for f in folders for n in self.store.files(f.rstrip("/"))})

    @property
    def archive(self) -> ArchiveFiles:
        return ArchiveFiles(self.store, f"{self.names.folder}/archive")

    def _read(self, name: str, expected: int | None = None) -> bytes:
        data = self._kept.get(name) or self.store.get(name)
        if data is None or (expected is not None and digest(data) != expected):
            raise InvariantBroken(
                "LEDGER_RECORD_MISSING.DELTA", name=name, state="missing" if data is None else "corrupt"
            )
        if len(self._kept) > 16:
            self._kept.clear()
        self._kept[name] = data
        return data


# Aborts staged files. Their rows become visible with the decision.


class DeltaCommitter(StagedFilesCommitter):
    def __init__(self, options: DeltaOptions, scope: Scope) -> None:
        super().__init__(scope)
        self._options = options
        self._opened: Store | None = None

    def was_committed(self, work: Work, prepared: Prepared) -> bool:  # noqa: ARG002 - a batch is one commit
        table = open_table(self._options)
        if table is None:
            return False
        with explained(self._options):
            newest = Records(self._store, work.scope).newest(table, work.scope.incarnation)
        return newest is not None and newest[0] >= work.batch

    def _remove(self, prepared: Prepared) -> None:
        with explained(self._options):
            self._undecided.remove(f.path for f in StagedFiles.of(prepared).files)

    def _remove_orphans(self, keep: Sequence[Prepared]) -> int:
        with explained(self._options):
            return self._undecided.abort_orphans({writer for p in keep for writer in _writers(p)})

    def _target(self) -> Target | None:
        table = open_table(self._options)
        return None if table is None else Target(f"table {self._options.path}", str(table.metadata().id))

    def close(self) -> None:
        self._opened = None

    @property
    def _store(self) -> Store:
        if self._opened is None:
            self._opened = Store(self._options)
        return self._opened

    @property
    def _undecided(self) -> shard.Undecided:
        return shard.Undecided(
            self._store, self._scope, ledger_key(self._options, self._scope), self._decided, self._claim
        )

    def _claim(self) -> int | None:
        table = open_table(self._options)
        return None if table is None else Records(self._store, self._scope).owner(table)[1] or None

    def _decided(self, incarnation: str) -> tuple[int | None, set[str]]:
        """The newest decided batch, and the writers whose files it names."""
        table = open_table(self._options)
        records = Records(self._store, self._scope)
        newest = None if table is None else records.newest(table, incarnation)
        if newest is None:
            return None, set()
        try:
            record = records.decided(incarnation, newest)
        except InvariantBroken:  # archived: nothing is open
            return newest[0] + 1, set()
        if self._options.write.upserts:  # the staged files themselves are not in the table
            return newest[0], {record.writer} - {""}
        return newest[0], {writer for p in record.decision.of(self._scope.sink) for writer in _writers(p)}


def _writers(prepared: Prepared) -> set[str]:
    return {shard.parse_writer(f.path) for f in StagedFiles.of(prepared).files} if prepared.handle else set()


# The ledger in the table's own log: one commit adds a batch's files and its decision.
#
# Claims and decisions are commits that set the application transaction `owner`. Concurrent commits that set the same id
# conflict, so a decision in flight never commits after a later claim.


def build_effect(
    options: DeltaOptions, table: Any, store: Store, work: Work, shards: Sequence[Sequence[DataFile]]
) -> Effect:
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
        written = DeltaFiles(options.appending, work, columns, direct=False)
        there = [_File(store, file) for file in active_files(options, table)]
        replaced = upsert(options.write, one_of_each(options.write, rows, options.path), columns, there, written)
        removes = [file.data["path"] for file in replaced]
        return Effect(written.done, removes, written.stem, True, written.discard)
    if options.write.complete:
        return Effect(files, [f["path"] for f in active_files(options, table)], exact=True)
    if options.write.replaces and files:
        partitions = {tuple(file.partition.items()) for file in files}  # in the order of `partitionBy`, as in the table
        active = active_files(options, table)
        removes = [f["path"] for f in active if tuple((n, text(v)) for n, v in f["partition"].items()) in partitions]
        return Effect(files, removes, exact=True)
    return Effect(files)


_MILLISECOND = dt.timedelta(milliseconds=1)


@dataclass(frozen=True)
class _File:
    """See `delivered.kits.table.changes.TableFile`. `data`: from `active_files`."""

    store: Store
    data: dict[str, Any]

    def bounds(self, key: str) -> tuple[Any, Any] | None:
        if key in self.data["partition"]:
            value = self.data["partition"][key]
            return None if value is None or isinstance(value, str) else (value, value)
        low, high = self.data["min"].get(key), self.data["max"].get(key)
        # Other writers cut times to milliseconds, round decimals to doubles, and truncate texts.
        if isinstance(low, dt.datetime) and isinstance(high, dt.datetime):
            return (low, high + _MILLISECOND) if high.year < dt.MAXYEAR else None
        exact = isinstance(low, int | dt.date) and isinstance(high, int | dt.date)
        return (low, high) if exact else None

    def rows(self, columns: pa.Schema) -> Iterator[pa.RecordBatch]:
        partition = self.data["partition"]
        with open_file(self.store, self.data["path"]) as source:
            reader = pq.ParquetFile(source, pre_buffer=False)
            there = [n for n in columns.names if n not in partition and n in reader.schema_arrow.names]
            if not there:  # all are in the log; a batch without columns would have no rows
                yield filled(pa.record_batch([pa.nulls(reader.metadata.num_rows)], [""]), columns, partition)
                return
            for batch in reader.iter_batches(BATCH_ROWS, columns=there, use_threads=False):
                yield filled(batch, columns, partition)


class DeltaStore:
    """See `delivered.ledger.Store`."""

    def __init__(self, options: DeltaOptions, scope: Scope) -> None:
        self._options = options
        self._scope = scope
        self._names = Names(scope)
        self._opened: Records | None = None
        self._table: Any = None
        self._earlier: tuple[int, dict[str, tuple[Decision | None, Started | None]]] | None = None

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
        shard.record_claim(ledger_key(self._options, self._scope), claim)
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
                if change.started is not None:
                    outcome = self._begin(table, head.epoch, change.started)
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
        ledgers = []
        with explained(self._options):
            table, store = self._refresh(), self._records.store
            for p in store.folders("_delivered"):
                for s in store.folders(f"_delivered/{p}"):
                    theirs = Scope(p.removeprefix("p-"), s.removeprefix("s-"), self._scope.incarnation)
                    names = Names(theirs)
                    known = (names.batch(theirs.incarnation), names.started(theirs.incarnation))
                    holds = any(table.transaction_version(name) is not None for name in known)
                    if theirs != self._scope:
                        ledgers.append(OtherLedger(theirs.pipeline, theirs.sink, holds))
        return named_first(ledgers)

    def last_seal(self, sink: str) -> str | None:
        table = open_table(self._options)
        if table is None:
            return None
        with explained(self._options):
            return self._seals(sink).last(self._sealed(table, sink))

    def seals(self, sink: str, first: int = 0) -> Iterator[str]:
        table = open_table(self._options)
        if table is not None:
            with explained(self._options):
                yield from self._seals(sink).texts(self._sealed(table, sink), first)

    def add_seal(self, sink: str, number: int, text: str) -> Outcome[None]:
        """A commit that adds no rows: of two with the same application transaction, the later one fails. It sets
        no owner, so it meets no claim and no decision."""
        names, seals = self._names_of(sink), self._seals(sink)

        def newest() -> SealPlace:
            return self._sealed(self._refresh(), sink)

        def move(before: SealPlace, after: SealPlace) -> Outcome[None]:
            def there(now: Any) -> bool:
                # Others may have sealed since then: search the chain.
                with explained(self._options):
                    return seals.holds(self._sealed(now, sink), after)

            table = self._refresh()
            if self._sealed(table, sink) != before:
                return Failed("another audit has sealed meanwhile")
            change = TableChange(transactions={names.seal: after.number, names.sealed: after.digest})
            return commit(self._options, table, change, there)

        with explained(self._options):
            return seals.add(sink, number, text, newest, move)

    def close(self) -> None:
        self._table = self._opened = None

    def _names_of(self, sink: str) -> Names:
        return Names(replace(self._scope, sink=sink))

    def _seals(self, sink: str) -> SealFiles:
        return SealFiles(self._records.store, f"{self._names_of(sink).folder}/seals")

    def _sealed(self, table: Any, sink: str) -> SealPlace:
        names = self._names_of(sink)
        number, sealed = table.transaction_version(names.seal), table.transaction_version(names.sealed)
        return NO_SEAL if number is None or sealed is None else SealPlace(number, sealed)

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
            lambda: records.started(table, incarnation),
        )

    def _begin(self, table: Any, claim: int, started: Started) -> Outcome[None]:
        name = self._names.started(self._scope.incarnation)
        data = started.to_json().encode()
        before = table.transaction_version(name)
        self._records.store.put(self._names.started_file(self._scope.incarnation, digest(data)), data)
        outcome = self._commit(table, claim, {name: digest(data)})
        if isinstance(outcome, Ok) and before is not None:
            self._take_away([self._names.started_file(self._scope.incarnation, before)])
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
        effect = build_effect(options, table, records.store, Work(self._scope, decision.batch, 0), shards)
        try:
            required(self._options, table, effect.adds)
        except BaseException:
            effect.discard()
            raise
        data = Record(decision.to_json(), previous, effect.writer).encode()
        own = (decision.batch, digest(data))
        name = self._names.decided_file(incarnation, *own)
        records.store.put(name, data)
        before = table.version()

        def there(now: Any) -> bool:
            # Others may have claimed and decided since then: search the chain.
            with explained(self._options):
                return any(at == own for at in records.positions(now, incarnation, own[0]))

        change = {self._names.batch(incarnation): own[0], self._names.record(incarnation): own[1]}
        outcome = self._commit(table, claim, change, effect, there)
        if isinstance(outcome, Failed):
            self._take_away([name])
            effect.discard()
        if isinstance(outcome, Ok):
            if effect.writer:
                self._take_away([f.path for shard in shards for f in shard])
            self._forget_batches(decision.batch)
            tidy(self._options, table, before)
        return outcome

    def _commit(
        self,
        table: Any,
        claim: int,
        transactions: Mapping[str, int],
        effect: Effect | None = None,
        there: Callable[[Any], bool] | None = None,
    ) -> Outcome[None]:
        """One commit under a claim: succeeds before any later claim, or not at all."""
        effect = effect or Effect()
        change = TableChange(effect.adds, {**transactions, self._names.owner: claim}, effect.removes, effect.exact)

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
        there = self._records.store.files(shard.block_folder(self._scope, self._scope.incarnation, decision.batch))
        for prepared in move:
            with shard.moving(decision, prepared):
                staged = StagedFiles.of(prepared).files
                shard.check_count(prepared, sum(f.rows for f in staged))
                for file in staged:
                    shard.check_complete(there, file.path, file.size)
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
        records_by_incarnation = {**self._earlier[1], own: records.of(table, own)}
        decisions = [d for d, _ in records_by_incarnation.values() if d is not None]
        started = {i: b for i, (_, b) in records_by_incarnation.items() if b is not None}
        return state_of(
            self._scope, owner, claim, by_time(decisions), started, lambda i: records.archive.read().find(i)
        )

    def _forget(self, table: Any) -> None:
        """Keep only the newest decision of other incarnations, archived entries of very old ones, and newest owners."""
        state, records, names = self._state(table), self._records, self._names
        old = outdated(state)
        records.archive.add(old.entries)
        known = {*(d.scope.incarnation for d in state.earlier), *(i for i, _ in state.earlier_started)}
        expired: list[str] = []
        for incarnation in records.incarnations():
            if incarnation == self._scope.incarnation:
                continue
            kept, newest = incarnation in known.difference(old.incarnations), records.newest(table, incarnation)
            keep = names.decided_file(incarnation, *newest) if kept and newest else ""
            expired += [f for f in records.store.files(names.decided_folder(incarnation)) if f != keep]
            if not kept:
                expired += records.store.files(names.started_folder(incarnation))
        # Keep some: another process may be reading one that was the newest until now. Claims in flight have newer
        # files. Files without a claim in their name are being written by another driver.
        owners = sorted((f for f in records.store.files(names.owner_folder) if parse_claim(f)), key=parse_claim)
        self._take_away(expired + [f for f in owners[:-OWNERS_REMEMBERED] if parse_claim(f) < state.epoch])

    def _forget_batches(self, batch: int) -> None:
        horizon = batch - LEDGER_HISTORY_BATCHES
        if horizon < 0 or horizon % shard.BLOCK_BATCHES:
            return
        with contextlib.suppress(OSError):
            files = self._records.store.files(self._names.decided_folder(self._scope.incarnation))
            self._take_away(f for f in files if (shard.parse_batch(f) or 0) <= horizon)

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
