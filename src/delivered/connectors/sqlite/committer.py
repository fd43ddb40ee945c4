"""Deletes staged files. Their rows become visible with the decision."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from delivered.connectors.sqlite import stage, target
from delivered.connectors.sqlite.database import DIALECT, SqliteDatabase, connect, explained, version_of
from delivered.connectors.sqlite.options import SqliteOptions
from delivered.contract.powers import LeftOutRow
from delivered.kits.sql.conditional import LEFT_OUT_VERSION, counted, kept
from delivered.kits.sql.database import Dialect
from delivered.model.identity import Scope, Target, Work
from delivered.model.outcome import Ok, Outcome, Unknown
from delivered.model.prepared import Prepared
from delivered.model.work import Decision

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
        if not Path(self._options.path).exists():
            return False
        connection = connect(self._options.path, mode="ro")
        try:
            if version_of(connection) == 0:
                return False
            row = connection.execute(
                "SELECT decision FROM _delivered_decision WHERE pipeline = ? AND sink = ? AND incarnation = ? "
                "AND batch = ?",
                (work.scope.pipeline, work.scope.sink, work.scope.incarnation, work.batch),
            ).fetchone()
        except sqlite3.Error as error:
            raise explained(error, self._options.path) from error
        finally:
            connection.close()
        participants = Decision.from_json(row[0]).of(work.scope.sink) if row is not None else ()
        return any(p.shard == work.shard for p in participants)

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
        if not Path(self._options.path).exists():
            return {}
        connection = connect(self._options.path, mode="ro")
        try:
            known = target.identity(connection, self._options.table)
        except sqlite3.Error as error:
            raise explained(error, self._options.path) from error
        finally:
            connection.close()
        return {} if known is None else {self._scope.sink: Target(f"table {self._options.table}", known)}

    def left_out(self) -> dict[str, int]:
        """See `delivered.contract.powers.CountsLeftOut`."""
        return self._ask(counted, {})

    def dead_letters(self) -> list[LeftOutRow]:
        """See `delivered.contract.powers.KeepsDeadLetters`."""
        return self._ask(kept, [])

    def _ask(self, question: Callable[[sqlite3.Connection, Dialect, Scope], T], nothing: T) -> T:
        """What the ledger's tables say of rows that were left out; `nothing`: there are no such tables."""
        if not Path(self._options.path).exists():
            return nothing
        with (
            contextlib.closing(connect(self._options.path, mode="ro")) as connection,
            SqliteDatabase(self._options.path).explaining(),
        ):
            is_there = version_of(connection) >= LEFT_OUT_VERSION
            return question(connection, DIALECT, self._scope) if is_there else nothing

    def close(self) -> None:
        """Nothing to close."""
