"""The ledger in the table's own log: a batch's files and its decision get in by one commit.

One owner at a time: a claim is a commit that names the application transaction `owner`, and so does every decision.
Two commits that name one id, and do not know of each other, conflict in the client, so a decision never gets in behind
a later claim, whatever was under way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa

from delivered.connectors.delta import earlier, types
from delivered.connectors.delta.client import Store, explained, open_table, require_table, sync_versions
from delivered.connectors.delta.commit import (
    CHECKPOINT_VERSIONS,
    OVERTAKEN,
    RETRIES_MAX,
    Change,
    DataFile,
    commit,
    tidy,
)
from delivered.connectors.delta.earlier import Earlier
from delivered.connectors.delta.merge import NOTHING, Effect, effect
from delivered.connectors.delta.options import DeltaOptions
from delivered.connectors.delta.records import Names, Record, Records, digest, ledger_key, next_claim
from delivered.connectors.delta.target import required, same_columns, table_schema
from delivered.kits.sql.merge import stored as kept
from delivered.kits.table import stage
from delivered.model.errors import DeliveredError, Fenced, InvariantBroken, Unreachable
from delivered.model.guarantee import Guarantee
from delivered.model.identity import OtherLedger, Scope, Work
from delivered.model.limits import CONNECT_TIMEOUT_S, LEDGER_HISTORY_BATCHES, OWNERS_REMEMBERED
from delivered.model.outcome import Failed, Ok, Outcome, Unknown
from delivered.model.step import Moment, StepId, reach
from delivered.model.work import Begun, Decision, LedgerState, Owner


class DeltaLedger:
    """See `delivered.contract.sink.Ledger`. Works by one claim; a later one, also of the same owner, voids it."""

    def __init__(self, options: DeltaOptions, scope: Scope) -> None:
        self._options = options
        self._scope = scope
        self._names = Names(scope)
        self._opened: Records | None = None
        self._table: Any = None
        self._claimed: tuple[str, int] | None = None
        self._earlier: tuple[int, Earlier] | None = None

    def claim(self, owner: Owner) -> LedgerState:
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while True:
            table = self._refresh()
            # A commit of a driver that died may not be durable yet, and this claim builds on it.
            sync_versions(self._options, table.version() - CHECKPOINT_VERSIONS, table.version())
            outcome = self._claim_once(table, owner)
            if isinstance(outcome, Ok):
                break
            if time.monotonic() > deadline:
                raise Unreachable(
                    "LEDGER_CONTENDED",
                    f"The ledger of sink {self._scope.sink!r} of pipeline {self._scope.pipeline!r} at "
                    f"{self._options.path!r} could not be claimed within {CONNECT_TIMEOUT_S:.0f} s: {outcome.reason}",
                    next_step="see whether another driver of this pipeline starts again and again; then start again",
                )
        self._forget(self._refresh())
        state = self._state(self._refresh())
        if self._claimed is None or state.epoch != self._claimed[1]:
            raise self._fenced(owner.id, state.owner)  # by a claim that came right behind
        stage.note_claim(ledger_key(self._options, self._scope), state.epoch)
        return state

    def resume(self, owner_id: str) -> LedgerState:
        state = self._read(self._refresh)
        if state.owner is None or state.owner.id != owner_id:
            raise self._fenced(owner_id, state.owner)
        self._claimed = (owner_id, state.epoch)
        return state

    def look(self) -> LedgerState:
        return self._read(lambda: open_table(self._options))

    def begin(self, begun: Begun) -> Outcome[None]:
        incarnation = self._scope.incarnation
        data = json.dumps(dataclasses.asdict(begun), separators=(",", ":")).encode()

        def write(table: Any) -> Outcome[None]:
            if self._records.begun(table, incarnation) == begun:
                return Ok(None)
            before = table.transaction_version(self._names.begun(incarnation))
            self._records.store.put(self._names.begun_file(incarnation, digest(data)), data)
            outcome = self._commit(table, {self._names.begun(incarnation): digest(data)})
            if isinstance(outcome, Ok) and before is not None:
                self._take_away([self._names.begun_file(incarnation, before)])
            return outcome

        return self._as_owner(write)

    def decide(self, decision: Decision) -> Outcome[None]:
        """The decision and the files of this sink's participants, in one commit of the log.

        1  read the log; check that this claim is the newest, and whether this very decision is in
        2  check that the files are there, whole, and fit the table   <- crash points of commit.apply
        3  write the record of the decision, which nothing points to yet
        4  one commit: files, batch, hash of the record, claim        <- from here on the batch counts
        5  forget old records; a checkpoint of the log when one is due
        """
        incarnation, text = self._scope.incarnation, decision.to_json()

        def write(table: Any) -> Outcome[None]:
            newest = self._records.newest(table, incarnation)
            previous, revised = newest, False
            if newest is not None and newest[0] >= decision.batch:
                known = self._records.decided(incarnation, newest)
                if known.text == text:
                    return Ok(None)
                # The next revision of this very batch takes its place in the chain.
                revised = newest[0] == decision.batch and known.decision.revision < decision.revision
                previous = known.previous
            if newest is not None and newest[0] >= decision.batch and not revised:
                raise InvariantBroken(
                    "DECIDED_OTHERWISE",
                    f"Batch {decision.batch} of {self._scope} is decided already, or a later one is. What is visible "
                    "stays; nothing was added.",
                    next_step="stop every other driver on this checkpoint, then start the pipeline again",
                )
            store = self._records.store
            shards = self._staged(table, decision)
            made = effect(self._options, table, store, Work(self._scope, decision.batch, 0), shards)
            try:
                required(self._options, table, made.adds)
            except BaseException:
                made.discard()
                raise
            data = Record(text, previous, made.writer).encode()
            mine = (decision.batch, digest(data))
            name = self._names.decided_file(incarnation, *mine)
            self._records.store.put(name, data)
            change = {self._names.batch(incarnation): mine[0], self._names.record(incarnation): mine[1]}
            before = table.version()

            def there(now: Any) -> bool:
                # Others may have claimed and decided since: look along the chain.
                with explained(self._options):
                    return any(at == mine for at in self._records.positions(now, incarnation, mine[0]))

            outcome = self._commit(table, change, made, there)
            if isinstance(outcome, Failed):
                self._take_away([name])
                made.discard()
            if isinstance(outcome, Ok):
                if made.writer:
                    self._take_away([f.path for shard in shards for f in shard])
                self._forget_old(incarnation, decision.batch)
                tidy(self._options, table, before)
            return outcome

        for _ in range(RETRIES_MAX):
            outcome = self._as_owner(write)
            # Others were first, so it is not in and cannot get in: this is no repetition of a request (P19).
            if not (isinstance(outcome, Failed) and OVERTAKEN in outcome.reason):
                break
        return outcome

    def history(self) -> Iterator[Decision]:
        table = open_table(self._options)
        if table is not None:
            with explained(self._options):
                yield from reversed(list(self._records.chain(table, self._scope.incarnation)))

    def others(self) -> list[OtherLedger]:
        """See `delivered.contract.powers.KnowsOthers`."""
        with explained(self._options):
            return earlier.other_ledgers(self._records, self._refresh())

    def close(self) -> None:
        self._table = self._opened = None

    @property
    def _records(self) -> Records:
        if self._opened is None:
            self._opened = Records(Store(self._options), self._scope)
        return self._opened

    def _claim_once(self, table: Any, owner: Owner) -> Ok[None] | Failed | Unknown:
        with explained(self._options):
            current, before = self._records.owner(table) or (None, None)
            superseded = current.superseded if current is not None else ()
            if current is not None and owner.id in superseded:
                raise self._fenced(owner.id, current)
            if current is not None and current.id != owner.id:
                superseded = (current.id, *superseded)[:OWNERS_REMEMBERED]
            claim = next_claim(before)
            data = json.dumps(dataclasses.asdict(replace(owner, superseded=superseded))).encode()
            self._records.store.put(self._names.owner_file(claim), data)
        self._claimed = (owner.id, claim)
        return self._commit(table, {})

    def _commit(
        self,
        table: Any,
        transactions: Mapping[str, int],
        made: Effect = NOTHING,
        there: Callable[[Any], bool] | None = None,
    ) -> Outcome[None]:
        """One commit under this claim: in before any later claim, or not at all."""
        claim = self._claimed[1] if self._claimed else 0
        change = Change(made.adds, {**transactions, self._names.owner: claim}, made.removes, made.exact)

        def newest(now: Any) -> bool:
            return all(now.transaction_version(name) == version for name, version in change.transactions.items())

        there = there or newest
        return commit(self._options, table, change, there)  # THE line that decides a batch in this sink

    def _as_owner(self, write: Callable[[Any], Outcome[None]]) -> Outcome[None]:
        """Run `write` once under this claim. Never runs it twice (P19)."""
        try:
            with explained(self._options):
                table = self._refresh()
                found = self._records.owner(table)
                mine = self._claimed
                if found is None or mine is None or (found[0].id, found[1]) != mine:
                    raise self._fenced(mine[0] if mine else "none", found[0] if found else None)
                return write(table)
        except DeliveredError as error:
            # `write` returns what it knows after its commit; what raises comes before.
            return Failed(str(error))

    def _staged(self, table: Any, decision: Decision) -> list[list[DataFile]]:
        """The files of each of this sink's participants, after a check that they are there, whole, and fit the table.

        Raises:
            InvariantBroken: a file is gone, or is not what was prepared.
        """
        participants = [p for p in decision.to_move if p.handle]
        if decision.guarantee is not Guarantee.EXACTLY_ONCE or not participants:
            return []
        files: list[list[DataFile]] = []
        there = self._records.store.files(stage.block_folder(self._scope, self._scope.incarnation, decision.batch))
        for prepared in participants:
            facts = {"batch": decision.batch, "shard": prepared.shard}
            reach(StepId.COMMIT_APPLY, Moment.BEFORE, **facts)
            staged = [DataFile.from_json(f) for f in prepared.handle["files"]]
            if sum(f.rows for f in staged) != prepared.fingerprint.count:
                raise InvariantBroken(
                    "STAGED_ROWS_DIFFER",
                    f"Shard {prepared.shard}: {sum(f.rows for f in staged)} rows are in its files, its fingerprint "
                    f"counts {prepared.fingerprint.count}.",
                    next_step="start the pipeline again; the batch runs again",
                )
            for file in staged:
                if there.get(file.path) != file.size:
                    raise InvariantBroken(
                        "STAGED_FILE_GONE",
                        f"The staged file {file.path!r} has {there.get(file.path, 'no')} bytes, prepared were "
                        f"{file.size}. Nothing of the batch is visible.",
                        next_step="start the pipeline again; the batch runs again",
                    )
            if not files:
                same_columns(self._options, table, self._staged_schema(table, staged[0]))
            files.append(staged)
            reach(StepId.COMMIT_APPLY, Moment.AFTER, **facts)
        return files

    def _staged_schema(self, table: Any, file: DataFile) -> pa.Schema:
        """Of the rows in a file, with the columns that its folder names."""
        import pyarrow.parquet as pq

        with self._records.store.fs.open_input_file(file.path) as source:
            stored = kept(self._options.write, types.canonical_schema(pq.read_schema(source)))
        known = table_schema(table)
        return pa.schema([*stored, *(known.field(name) for name in file.partition if name in known.names)])

    def _read(self, table: Callable[[], Any]) -> LedgerState:
        """Once more, if what the log pointed to was replaced and taken away in between."""
        for attempt in (1, 2):
            now = table()
            try:
                return LedgerState() if now is None else self._state(now)
            except InvariantBroken:
                if attempt == 2:
                    raise
        raise AssertionError("not reached")

    def _state(self, table: Any) -> LedgerState:
        with explained(self._options):
            incarnation = self._scope.incarnation
            held = self._records.owner(table)
            others = self._others(table, held[1] if held else 0)
            last, begun, archived = None, None, None
            try:
                last, begun = self._records.last(table, incarnation), self._records.begun(table, incarnation)
            except InvariantBroken:  # the log names records that are gone
                archived = self._records.archive.read().find(incarnation)
                if archived is None:
                    raise
            return LedgerState(
                owner=held[0] if held else None,
                last=last,
                begun=begun,
                earlier=others.decisions,
                earlier_begun=others.begun,
                epoch=held[1] if held else 0,
                archived=archived,
            )

    def _others(self, table: Any, claim: int) -> Earlier:
        """What other incarnations left cannot change while one owner holds the ledger: read once for each claim."""
        if self._earlier is None or self._earlier[0] != claim:
            self._earlier = (claim, earlier.read(self._records, table))
        return self._earlier[1]

    def _forget(self, table: Any) -> None:
        """Of other incarnations keep the newest decision; of very old ones the archived entry; of owners the newest."""
        with explained(self._options), contextlib.suppress(OSError):
            held = self._records.owner(table)
            claim = held[1] if held else 0
            self._take_away(earlier.outdated(self._records, table, self._others(table, claim), claim))

    def _forget_old(self, incarnation: str, batch: int) -> None:
        horizon = batch - LEDGER_HISTORY_BATCHES
        if horizon < 0 or horizon % stage.BLOCK_BATCHES:
            return
        with contextlib.suppress(OSError):
            files = self._records.store.files(self._names.decided_folder(incarnation))
            self._take_away([f for f in files if (stage.batch_of(f) or 0) <= horizon])

    def _take_away(self, names: list[str]) -> None:
        """What nothing points to any more. Missed now, it is found at the next claim."""
        with contextlib.suppress(OSError, DeliveredError):
            self._records.store.remove(names)

    def _refresh(self) -> Any:
        """The table at its newest version."""
        if self._table is not None:
            try:
                self._table.update_incremental()
            except Exception:  # the log behind this handle was cleaned up, or the table made anew: look again
                self._table = None
        if self._table is None:
            self._table = require_table(self._options)
        return self._table

    def _fenced(self, owner_id: str, current: Owner | None) -> Fenced:
        other = "nobody" if current is None else f"{current.id} (process {current.process} on {current.host!r})"
        return Fenced(
            "FENCED",
            f"Driver {owner_id} does not own the ledger of sink {self._scope.sink!r} of pipeline "
            f"{self._scope.pipeline!r} in the table at {self._options.path!r} any more; it belongs to {other}, or to a "
            "later start.",
            next_step="nothing, if the later start is running; else start the pipeline again",
        )
