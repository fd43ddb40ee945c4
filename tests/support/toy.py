"""The sink of examples/toy_sink.py, and copies of it that are broken on purpose."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
from examples.toy_sink import CONNECTOR, ToyCommitter, ToySink, ToyWriter

from delivered.connectors.sqlite.store import SqliteLedgers
from delivered.model.capability import Guarantee
from delivered.model.identity import Scope, Work
from delivered.model.work import Ok, Outcome, Prepared


def toy(folder: Path) -> ToySink:
    """Files in `orders`, the ledger in `ledger.db`."""
    options = {"path": str(folder / "orders"), "ledger": str(folder / "ledger.db")}
    made: ToySink = CONNECTOR.sink(options, SqliteLedgers(options["ledger"]))
    return made


class CommitsAgain(ToyCommitter):
    def commit(self, work: Work, prepared: Prepared) -> Outcome[None]:
        hidden = self.folder / prepared.handle["file"]
        shutil.copy(hidden, hidden.with_name(f"{hidden.name[1:]}{uuid.uuid4().hex}"))
        return Ok(None)


class NotIdempotent(ToySink):
    """Each commit repeats the rows: the staged file is copied and kept."""

    def committer(self, scope: Scope) -> ToyCommitter:
        return CommitsAgain(self.options.path, scope)


class ShowsAtOnce(ToySink):
    """Rows are visible once prepared, even without a decision."""

    def writer(self, work: Work, guarantee: Guarantee, schema: pa.Schema) -> ToyWriter:
        return super().writer(work, Guarantee.AT_LEAST_ONCE, schema)


def _as(kind: type[ToySink]) -> Callable[[Path], ToySink]:
    return lambda folder: kind(toy(folder).options, toy(folder).ledgers)


TOYS: dict[str, Callable[[Path], ToySink]] = {
    "toy": toy,
    "commit is not idempotent": _as(NotIdempotent),
    "rows are shown before the decision": _as(ShowsAtOnce),
}
