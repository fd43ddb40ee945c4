"""Deletes staged files. Their rows become visible with the decision."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from typing import TypeVar

from delivered.connectors.sqlite import stage, target
from delivered.connectors.sqlite.database import DIALECT, SqliteDatabase, version_of
from delivered.connectors.sqlite.options import SqliteOptions
from delivered.contract.powers import LeftOutRow
from delivered.kits.sql.committer import decided
from delivered.kits.sql.conditional import LEFT_OUT_VERSION, counted, kept
from delivered.model.identity import Scope, Target, Work
from delivered.model.outcome import Ok, Outcome, Unknown
from delivered.model.prepared import Prepared

T = TypeVar("T")


class SqliteCommitter:
    """See `delivered.contract.sink.Committer`."""

    def __init__(self, options: SqliteOptions, scope: Scope) -> None:
        self._options = options
        self._scope = scope

    def commit(self, work: Work, prepared: Prepared) -> Outcome[None]:
        """Only deletes the staged copy: the decision has already made the rows visible."""
        del work
        return self.abort(prepared)

    def was_committed(self, work: Work, prepared: Prepared) -> bool:  # noqa: ARG002 - with the decision
        return self._ask(1, lambda c: any(p.shard == work.shard for p in decided(c, DIALECT, work)), default=False)

    def abort(self, prepared: Prepared) -> Outcome[None]:
        if not prepared.handle:
            return Ok(None)
        try:
            stage.remove(self._options, self._scope, stage.StagedRows.of(prepared))
        except OSError as error:
            return Unknown(str(error))
        return Ok(None)

    def abort_orphans(self, keep: Sequence[Prepared]) -> Outcome[int]:
        kept = {stage.StagedRows.of(p).path for p in keep if p.handle}
        count = 0
        try:
            for path in stage.staged_files(self._options, self._scope):
                if path.name not in kept:
                    path.unlink(missing_ok=True)
                    count += 1
        except OSError as error:
            return Unknown(str(error))
        return Ok(count)

    def targets(self) -> dict[str, Target]:
        """See `delivered.contract.powers.KnowsTarget`; only for tables that this package created."""
        known = self._ask(0, lambda c: target.identity(c, self._options.table), default=None)
        return {} if known is None else {self._scope.sink: Target(f"table {self._options.table}", known)}

    def left_out(self) -> dict[str, int]:
        """See `delivered.contract.powers.CountsLeftOut`."""
        return self._ask(LEFT_OUT_VERSION, lambda c: counted(c, DIALECT, self._scope), default={})

    def dead_letters(self) -> list[LeftOutRow]:
        """See `delivered.contract.powers.KeepsDeadLetters`."""
        return self._ask(LEFT_OUT_VERSION, lambda c: kept(c, DIALECT, self._scope), default=[])

    def _ask(self, version: int, question: Callable[[sqlite3.Connection], T], *, default: T) -> T:
        """Ask the database; `default`: it does not exist, or its ledger's tables are older than this version."""
        database = SqliteDatabase(self._options.path)
        if not database.exists():
            return default
        return database.ask(lambda connection: question(connection) if version_of(connection) >= version else default)

    def close(self) -> None:
        """Nothing to close."""
