"""A toy sink: a folder of JSON lines. exactly_once by two-phase commit; docs/new-connector.md goes through it."""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from delivered.contract.connector import Connector, Factory
from delivered.contract.sink import BoundedScan, Committer, Sink, Writer
from delivered.contract.source import Finding, Offsets, Slice
from delivered.kits.options import PATH, external_ledger, sink_name
from delivered.kits.table.store import make_folder, put_first, sync
from delivered.model.capability import Commit, Guarantee, SinkCapability
from delivered.model.errors import PromiseBroken, UsageError
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Scope, Target, Work
from delivered.model.options import Options, OptionType, option
from delivered.model.rows import fitted
from delivered.model.work import Failed, Handle, Ok, Outcome, Prepared, Promise, Unknown

if TYPE_CHECKING:  # executors do without
    from delivered.ledger import Ledgers

ROWS = pa.schema([("key", pa.string()), ("value", pa.string())])
FOLDER = OptionType(lambda text: Path(PATH.read(text)))


class ToyOptions(Options, owner="delivered_toy sink"):
    path: Path = option("path", "Folder for the files; created if missing.", FOLDER, example="/data/orders")
    ledger: str = external_ledger()


CONNECTOR = Connector("toy", "", sinks=Factory(ToyOptions, "examples.toy_sink:ToySink"), external_ledger=True)


def prefix(scope: Scope) -> str:
    return f"rows@{scope.pipeline}@{scope.sink}@"  # names hold no @, so no prefix is the beginning of another


def stem(work: Work) -> str:
    return f"{prefix(work.scope)}{work.scope.incarnation}@{work.batch}@{work.shard}@"


def show(hidden: Path) -> bool:
    """Rename a staged file into view, durably; whether it is visible now. May be called again, by any process."""
    visible = hidden.with_name(hidden.name.removeprefix("."))
    with contextlib.suppress(FileNotFoundError):  # an earlier call renamed it, or it is gone
        hidden.rename(visible)
    if there := visible.exists():
        sync([visible.parent])  # also if another process renamed it: that one may have died before its fsync
    return there


@dataclass(frozen=True)
class StagedFile(Handle):
    file: str


class ToyWriter(Writer):
    def __init__(self, folder: Path, work: Work, guarantee: Guarantee) -> None:
        self._exact = guarantee is Guarantee.EXACTLY_ONCE
        self._hidden = folder / f".{stem(work)}{uuid.uuid4().hex[:16]}.jsonl"  # two writers may share one Work
        self._file = self._hidden.open("x", encoding="utf-8")

    def stage(self, batch: pa.RecordBatch) -> None:
        self._file.writelines(json.dumps(row) + "\n" for row in fitted(batch, ROWS).to_pylist())

    def prepare(self, fingerprint: Fingerprint) -> Promise:
        self._file.close()
        if not fingerprint.count:
            self.abort()
            return Promise()
        with contextlib.suppress(FileNotFoundError):  # removed, see below
            sync([self._hidden, self._hidden.parent])
        if not (self._hidden.exists() if self._exact else show(self._hidden)):
            raise PromiseBroken("STAGED_FILE_GONE", f"A later start removed {self._hidden}.", "nothing, if it runs")
        return Promise(StagedFile(self._hidden.name) if self._exact else None)

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        self._hidden.unlink(missing_ok=True)


@dataclass(frozen=True)
class ToyCommitter(Committer):
    folder: Path
    scope: Scope

    def commit(self, work: Work, prepared: Prepared) -> Outcome[None]:  # noqa: ARG002 - the handle names the file
        try:
            return Ok(None) if show(self.folder / StagedFile.of(prepared).file) else Failed("its staged file is gone")
        except OSError as error:
            return Unknown(str(error))

    def was_committed(self, work: Work, prepared: Prepared) -> bool:  # noqa: ARG002 - one file for each writer
        return any(self.folder.glob(f"{stem(work)}*"))

    def abort(self, prepared: Prepared) -> Outcome[None]:
        outcome = self._remove([self.folder / StagedFile.of(prepared).file])
        return Ok(None) if isinstance(outcome, Ok) else outcome

    def abort_orphans(self, keep: Sequence[Prepared]) -> Outcome[int]:
        kept = {StagedFile.of(p).file for p in keep if p.handle}
        return self._remove([p for p in self.folder.glob(f".{prefix(self.scope)}*") if p.name not in kept])

    def _remove(self, staged: Sequence[Path]) -> Outcome[int]:
        try:
            for path in staged:
                path.unlink(missing_ok=True)
        except OSError as error:
            return Unknown(str(error))
        return Ok(len(staged))

    def targets(self) -> dict[str, Target]:
        identity = self.folder / ".identity"
        return {self.scope.sink: Target(f"folder {self.folder}", identity.read_text())} if identity.exists() else {}


@dataclass(frozen=True)
class ToyScan(BoundedScan):
    folder: Path

    def schema(self) -> pa.Schema:
        return ROWS

    def slices(self, since: Offsets | None = None, until: Offsets | None = None) -> Sequence[Slice]:
        del since, until  # files have no order
        return [Slice(str(path)) for path in sorted(self.folder.glob("rows@*"))]

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        with Path(piece.data).open(encoding="utf-8") as file:
            while lines := file.readlines(1_000_000):  # about as many bytes
                yield pa.RecordBatch.from_pylist([json.loads(line) for line in lines], ROWS)


@dataclass(frozen=True)
class ToySink(Sink):
    options: ToyOptions
    ledgers: Ledgers

    @property
    def name(self) -> str:
        return sink_name(self.options.path.name)

    def capability(self) -> SinkCapability:
        return SinkCapability(
            system="toy",
            commit=Commit.TWO_PHASE,
            mechanism="two-phase commit",
            stage="a hidden file for each shard",
            prepare="the file is closed and fsynced",
            decide="one row in the ledger, by the one driver that owns it",
            apply="each file is renamed into view",
            send="a file for each shard, renamed into view by its task",
            batch_atomic=False,
            local=True,
            assumes=("the ledger is kept as long as the checkpoint, and files of the newest batch stay in the folder",),
        )

    def preflight(self, guarantee: Guarantee) -> Sequence[Finding]:  # noqa: ARG002 - the same for each
        there = next(path for path in (self.options.path, *self.options.path.parents) if path.exists())
        denied = Finding("FOLDER_DENIED", f"This user may not write to {there}.", True, "grant write access to it")
        return [] if os.access(there, os.W_OK | os.X_OK) else [denied]

    def check_schema(self, schema: pa.Schema) -> None:
        if sorted(schema.names) != ROWS.names:
            raise UsageError("COLUMNS", f"The toy writes key and value, not {schema.names}.", "select key and value")

    def ready_target(self, schema: pa.Schema) -> None:  # noqa: ARG002 - checked above
        put_first(make_folder(self.options.path) / ".identity", uuid.uuid4().hex.encode())

    def records(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return fitted(batch, ROWS)

    def writer(self, work: Work, guarantee: Guarantee, schema: pa.Schema) -> ToyWriter:  # noqa: ARG002
        return ToyWriter(self.options.path, work, guarantee)

    def scan(self) -> ToyScan:
        return ToyScan(self.options.path)

    def committer(self, scope: Scope) -> ToyCommitter:
        return ToyCommitter(self.options.path, scope)
