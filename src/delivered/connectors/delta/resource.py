"""The driver's hand on staged files. The rows themselves got in with the decision, or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from delivered.connectors.delta import stage
from delivered.connectors.delta.client import Store, explained, open_table
from delivered.connectors.delta.options import DeltaOptions
from delivered.connectors.delta.records import Records
from delivered.model.errors import DeliveredError
from delivered.model.identity import Scope, Work
from delivered.model.outcome import Ok, Outcome, Unknown
from delivered.model.work import Prepared


class DeltaResource:
    """See `delivered.contract.Resource`."""

    def __init__(self, options: DeltaOptions, scope: Scope) -> None:
        self._options = options
        self._scope = scope
        self._opened: Store | None = None

    def apply(self, work: Work, prepared: Prepared) -> Outcome[None]:
        """The decision made the rows visible already."""
        del work, prepared
        return Ok(None)

    def applied(self, work: Work) -> bool:
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
                self._store.remove(self._undecided(str(f["path"]) for f in prepared.handle["files"]))
        except DeliveredError as error:
            return Unknown(str(error))
        return Ok(None)

    def sweep(self, keep: Sequence[Prepared]) -> Outcome[int]:
        """Files of batches that no decision names, of any incarnation. Those of older batches than the newest decided
        one, which a task that nobody waited for may leave, are for the table's own vacuum."""
        kept = {str(f["path"]) for p in keep if p.handle for f in p.handle["files"]}
        try:
            with explained(self._options):
                names = []
                for folder in self._store.folders(stage.sink_folder(self._scope)):
                    if folder.startswith("i-"):
                        names += self._open_files(folder.removeprefix("i-"))
                gone = [name for name in names if name not in kept]
                self._store.remove(gone)
        except DeliveredError as error:
            return Unknown(str(error))
        return Ok(len({stage.writer_of(name) for name in gone}))

    def close(self) -> None:
        self._opened = None

    @property
    def _store(self) -> Store:
        if self._opened is None:
            self._opened = Store(self._options)
        return self._opened

    def _open_files(self, incarnation: str) -> list[str]:
        """Files of one incarnation that no decision names, in the folders where such can be."""
        folder = stage.incarnation_folder(self._scope, incarnation)
        newest, named = self._decided(incarnation)
        if newest is None:
            return list(self._store.files(folder))
        first = stage.block_folder(self._scope, incarnation, newest)
        blocks = [b for b in (f"{folder}/{name}" for name in self._store.folders(folder)) if b >= first]
        found = [name for block in blocks for name in self._store.files(block)]
        return [n for n in found if (stage.batch_of(n) or 0) >= newest and n not in named]

    def _undecided(self, names: Iterable[str]) -> list[str]:
        """Without files that count, whoever asks: a decided row is never taken away from here."""
        found = []
        for name in names:
            incarnation = stage.incarnation_of(self._scope, name)
            newest, named = (None, set[str]()) if incarnation is None else self._decided(incarnation)
            batch = stage.batch_of(name)
            if batch is not None and (newest is None or batch >= newest) and name not in named:
                found.append(name)
        return found

    def _decided(self, incarnation: str) -> tuple[int | None, set[str]]:
        """The newest decided batch, and the files that it names."""
        table = open_table(self._options)
        records = Records(self._store, self._scope)
        newest = None if table is None else records.newest(table, incarnation)
        if newest is None:
            return None, set()
        participants = records.decided(incarnation, newest).decision.participants
        return newest[0], {str(f["path"]) for p in participants if not p.sink for f in p.handle.get("files", ())}
