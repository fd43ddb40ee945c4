"""Aborts staged files. Their rows become visible with the decision."""

from __future__ import annotations

from collections.abc import Sequence

from delivered.connectors.delta.client import Store, explained, open_table
from delivered.connectors.delta.commit import StagedFiles
from delivered.connectors.delta.options import DeltaOptions
from delivered.connectors.delta.records import Records, ledger_key
from delivered.contract.sink import Committer
from delivered.kits.table import stage
from delivered.model.errors import DeliveredError, InvariantBroken
from delivered.model.identity import Scope, Target, Work
from delivered.model.outcome import Ok, Outcome, Unknown
from delivered.model.prepared import Prepared


class DeltaCommitter(Committer):
    """See `delivered.contract.sink.Committer`."""

    def __init__(self, options: DeltaOptions, scope: Scope) -> None:
        self._options = options
        self._scope = scope
        self._opened: Store | None = None

    def commit(self, work: Work, prepared: Prepared) -> Outcome[None]:
        """The decision has already made the rows visible."""
        del work, prepared
        return Ok(None)

    def was_committed(self, work: Work, prepared: Prepared) -> bool:  # noqa: ARG002 - a batch is one commit
        table = open_table(self._options)
        if table is None:
            return False
        with explained(self._options):
            newest = Records(self._store, work.scope).newest(table, work.scope.incarnation)
        return newest is not None and newest[0] >= work.batch

    def abort(self, prepared: Prepared) -> Outcome[None]:
        if not prepared.handle:
            return Ok(None)
        try:
            with explained(self._options):
                self._undecided.remove(f.path for f in StagedFiles.of(prepared).files)
        except DeliveredError as error:
            return Unknown(str(error))
        return Ok(None)

    def abort_orphans(self, keep: Sequence[Prepared]) -> Outcome[int]:
        try:
            with explained(self._options):
                return Ok(self._undecided.abort_orphans({writer for p in keep for writer in _writers(p)}))
        except DeliveredError as error:
            return Unknown(str(error))

    def targets(self) -> dict[str, Target]:
        """The table's id. See `delivered.contract.sink.Committer`."""
        table = open_table(self._options)
        if table is None:
            return {}
        return {self._scope.sink: Target(f"table {self._options.path}", str(table.metadata().id))}

    def close(self) -> None:
        self._opened = None

    @property
    def _store(self) -> Store:
        if self._opened is None:
            self._opened = Store(self._options)
        return self._opened

    @property
    def _undecided(self) -> stage.Undecided:
        return stage.Undecided(
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
    return {stage.writer_of(f.path) for f in StagedFiles.of(prepared).files} if prepared.handle else set()
