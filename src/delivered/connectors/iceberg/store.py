"""The ledger in the table's own metadata: one commit adds a batch's files and its decision.

A claim is a commit that moves a branch of the table to a new, empty snapshot; every decision asserts the snapshot of
its claim, and the catalog rejects it if the branch has moved. So a decision in flight never commits after a later
claim, and concurrent appends by others fence nobody.
"""

from __future__ import annotations

import base64
import contextlib
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from delivered.connectors.iceberg import manifest
from delivered.connectors.iceberg.client import data_path, explained, open_table, require_table, store
from delivered.connectors.iceberg.commit import TableChange, commit
from delivered.connectors.iceberg.committer import claims_folder
from delivered.connectors.iceberg.merge import overwritten, replaced, upserted
from delivered.connectors.iceberg.options import IcebergOptions
from delivered.connectors.iceberg.records import Names, Records, decided_text, ledger_key
from delivered.connectors.iceberg.staged import StagedFiles
from delivered.connectors.iceberg.target import check_features, same_columns
from delivered.kits.table import stage
from delivered.kits.table.merge import Effect
from delivered.ledger.ledger import by_time, outdated, state_of
from delivered.ledger.store import Change, Head
from delivered.model.errors import DeliveredError
from delivered.model.identity import OtherLedger, Scope, Work, named_first
from delivered.model.limits import LEDGER_HISTORY_BATCHES
from delivered.model.outcome import Failed, Ok, Outcome
from delivered.model.prepared import Prepared
from delivered.model.work import Decision, LedgerState, Owner

Staged = list[tuple[Prepared, list[Any]]]
"""Participants and their data files; for mode upsert, their file names."""


class IcebergStore:
    """See `delivered.ledger.store.Store`."""

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
        stage.note_claim(ledger_key(self._options, self._scope), epoch)
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
        made = Effect()

        def change(table: Any) -> TableChange | None:
            nonlocal staged, made
            head, held = self._head(table), Records(table, self._scope).claim()
            wanted = rule(head)
            claim = None if held is None or held.snapshot is None else (self._names.branch, held.snapshot)
            if wanted is not None and wanted.begun is not None:
                properties = {self._names.begun(self._scope.incarnation): wanted.begun.to_json()}
                return TableChange(folder="", prefix="", properties=properties, claim=claim)
            if wanted is not None and wanted.decision is not None:
                made.discard()  # from an attempt that lost against another commit
                made = Effect()
                if staged is None:
                    staged = self._staged(table, wanted.decision, wanted.move)
                made = self._effect(table, wanted.decision, staged)
                return self._decided(wanted.decision, made, claim)
            return None

        try:
            outcome = commit(self._options, change)  # THE line that decides a batch in this sink
        except DeliveredError:
            # `commit` only raises before it sends anything to the catalog.
            made.discard()
            raise
        if isinstance(outcome, Failed):
            made.discard()
        if isinstance(outcome, Ok) and staged:
            handles = [StagedFiles.of(p) for p, _ in staged]
            rows = [name for handle in handles for name, _, _ in handle.rows]
            self._take_away(rows or [handle.manifest for handle in handles])
        return outcome

    def history(self) -> Iterator[Decision]:
        table = open_table(self._options)
        if table is not None:
            found = list(Records(table, self._scope).history(self._scope.incarnation))
            yield from found[-LEDGER_HISTORY_BATCHES:]

    def others(self) -> list[OtherLedger]:
        properties, found = require_table(self._options).properties, []
        for name in properties:
            match name.split("/"):
                case ["delivered", pipeline, sink, "owner"] if name != self._names.owner:
                    names = Names(Scope(pipeline, sink, self._scope.incarnation))
                    known = (names.decided(names.scope.incarnation), names.begun(names.scope.incarnation))
                    found.append(OtherLedger(pipeline, sink, any(k in properties for k in known)))
                case _:
                    pass
        return named_first(found)

    def close(self) -> None:
        """Catalogs stay open in this process, for later batches."""

    def _head(self, table: Any) -> Head:
        records, incarnation = Records(table, self._scope), self._scope.incarnation
        held = records.claim()
        return Head(
            held.owner if held else None,
            # A claim whose branch was dropped fences nobody, and no longer counts.
            held.epoch if held is not None and held.snapshot is not None else 0,
            records.newest(incarnation),
            lambda: records.decided(incarnation),
            lambda: records.begun(incarnation),
        )

    def _decided(self, decision: Decision, made: Effect, claim: tuple[str, int] | None) -> TableChange:
        incarnation, mark = self._scope.incarnation, uuid.uuid4()
        return TableChange(
            folder=stage.block_folder(self._scope, incarnation, decision.batch),
            prefix=f"{decision.batch}-",
            summary=self._names.summary(decision),
            files=made.adds,
            removes=made.removes,
            properties={self._names.decided(incarnation): decided_text(decision, mark, made.writer)},
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
            there = store(table, path).files(stage.block_folder(self._scope, self._scope.incarnation, decision.batch))
        for prepared in move:
            with stage.moving(decision, prepared):
                if rows := StagedFiles.of(prepared).rows:
                    for name, size, _ in rows:
                        stage.check_whole(there, name, size)
                    stage.check_count(prepared, sum(count for _, _, count in rows))
                    found.append((prepared, [name for name, _, _ in rows]))
                else:
                    files = self._named(table, prepared, there)
                    for file in files:
                        name = file.file_path.removeprefix(f"{path}/")
                        stage.check_whole(there, name, file.file_size_in_bytes)
                    stage.check_count(prepared, sum(file.record_count for file in files))
                    found.append((prepared, files))
        return found

    def _named(self, table: Any, prepared: Prepared, there: Mapping[str, int]) -> list[Any]:
        """The data files in a participant's manifest."""
        handle = StagedFiles.of(prepared)
        name, size = handle.manifest, handle.bytes
        stage.check_whole(there, name, size)
        try:
            with explained(self._options):
                return manifest.get(table, f"{data_path(table)}/{name}", size, handle.spec)
        except DeliveredError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                stage.check_whole({}, name, size)
            raise

    def _state(self, table: Any) -> LedgerState:
        records = Records(table, self._scope)
        held = records.claim()
        found = [(i, records.decided(i), records.begun(i)) for i in records.incarnations()]
        return state_of(
            self._scope,
            held.owner if held else None,
            held.epoch if held else 0,
            by_time(d for _, d, _ in found if d is not None),
            {i: b for i, _, b in found if b is not None},
            records.archived,
        )

    def _forgotten(self, table: Any) -> tuple[dict[str, str], list[str]]:
        """Properties of very old incarnations to delete, and the archive property that replaces them."""
        old = outdated(self._state(table))
        if not old.incarnations:
            return {}, []
        kept = base64.b64encode(Records(table, self._scope).archive().with_more(old.entries).data).decode()
        names = [name for i in old.incarnations for name in (self._names.decided(i), self._names.begun(i))]
        return {self._names.archive: kept}, [name for name in names if name in table.properties]

    def _take_away(self, names: Iterable[str]) -> None:
        """Delete unreferenced files; the next claim finds those that remain."""
        with contextlib.suppress(OSError, DeliveredError):
            table = require_table(self._options)
            store(table, data_path(table)).remove(names)
