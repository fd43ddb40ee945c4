"""Aborts staged files. Their rows become visible with the decision."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from delivered.connectors.iceberg.client import data_path, explained, metadata_path, open_table, require_table, store
from delivered.connectors.iceberg.options import IcebergOptions
from delivered.connectors.iceberg.records import Names, Records, ledger_key
from delivered.connectors.iceberg.staged import StagedFiles
from delivered.contract.sink import Committer
from delivered.kits.table import stage
from delivered.kits.table.store import Store
from delivered.model.errors import DeliveredError
from delivered.model.identity import Scope, Target, Work
from delivered.model.outcome import Ok, Outcome, Unknown
from delivered.model.prepared import Prepared


class IcebergCommitter(Committer):
    """See `delivered.contract.sink.Committer`."""

    def __init__(self, options: IcebergOptions, scope: Scope) -> None:
        self._options = options
        self._scope = scope

    def commit(self, work: Work, prepared: Prepared) -> Outcome[None]:
        """The decision has already made the rows visible."""
        del work, prepared
        return Ok(None)

    def was_committed(self, work: Work, prepared: Prepared) -> bool:  # noqa: ARG002 - a batch is one commit
        table = open_table(self._options)
        newest = None if table is None else Records(table, work.scope).newest(work.scope.incarnation)
        return newest is not None and newest >= work.batch

    def abort(self, prepared: Prepared) -> Outcome[None]:
        if not prepared.handle:
            return Ok(None)
        staged = StagedFiles.of(prepared)
        names = [f"{staged.writer}-{n}.parquet" for n in range(staged.files)]
        try:
            with explained(self._options):
                table = require_table(self._options)
                self._undecided(store(table, data_path(table))).remove([*names, staged.manifest])
        except DeliveredError as error:
            return Unknown(str(error))
        return Ok(None)

    def abort_orphans(self, keep: Sequence[Prepared]) -> Outcome[int]:
        """Data files first, then manifests of failed commits."""
        try:
            with explained(self._options):
                table = open_table(self._options)
                if table is None:
                    return Ok(0)
                undecided = self._undecided(store(table, data_path(table)))
                count = undecided.abort_orphans(_writers(keep))
                self._remove_manifests(table, undecided)
                return Ok(count)
        except DeliveredError as error:
            return Unknown(str(error))

    def targets(self) -> dict[str, Target]:
        """The table's UUID. See `delivered.contract.sink.Committer`."""
        table = open_table(self._options)
        if table is None:
            return {}
        return {self._scope.sink: Target(f"table {self._options.table}", str(table.metadata.table_uuid))}

    def close(self) -> None:
        """Catalogs stay open in this process, for later batches."""

    def _undecided(self, files: Store) -> stage.Undecided:
        return stage.Undecided(
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
        made = records.writer(incarnation)
        merged = set() if made is None else {stage.writer_of(f"{made}-")}
        return decision.batch, _writers(decision.of(self._scope.sink)) | merged

    def _epoch(self) -> int | None:
        table = open_table(self._options)
        held = None if table is None else Records(table, self._scope).claim()
        return None if held is None else held.epoch

    def _remove_manifests(self, table: Any, undecided: stage.Undecided) -> None:
        """Delete those of undecided batches, of failed attempts at the newest decided one, and of earlier claims."""
        files = store(table, metadata_path(table))
        found: list[str] = []
        for folder in files.folders(stage.sink_folder(self._scope)):
            if folder.startswith("i-"):
                incarnation = folder.removeprefix("i-")
                before = Records(table, self._scope)
                if before.newest(incarnation) is None and before.archived(incarnation) is not None:
                    continue
                newest = before.newest(incarnation)
                there = stage.newest_files(files, self._scope, incarnation, newest)
                records = Records(require_table(self._options), self._scope)
                newest, mark = records.newest(incarnation), records.mark(incarnation) or "none"
                for name in there:
                    batch = stage.batch_of(name)
                    if batch is not None and (
                        newest is None or batch > newest or (batch == newest and mark not in name)
                    ):
                        found.append(name)
        claims = list(files.files(claims_folder(self._scope)))
        now = require_table(self._options)
        held = Records(now, self._scope).claim()
        branch = now.snapshot_by_name(Names(self._scope).branch)
        current = branch.manifest_list if branch is not None else ""
        undecided.check_claim()
        # Higher numbers may belong to a claim in flight.
        old = [c for c in claims if held is not None and (stage.batch_of(c) or 0) <= held.epoch]
        files.remove([*found, *(c for c in old if not current.endswith(c))])


def _writers(prepared: Sequence[Prepared]) -> set[str]:
    return {stage.writer_of(f"{StagedFiles.of(p).writer}-") for p in prepared if p.handle}


def claims_folder(scope: Scope) -> str:
    return f"{stage.sink_folder(scope)}/claims"
