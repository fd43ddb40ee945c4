"""Base of sinks whose own transaction carries the decision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from delivered.contract.sink import Sink
from delivered.model.capability import Guarantee
from delivered.model.identity import Scope, Work

if TYPE_CHECKING:
    from delivered.contract.sink import BoundedScan, Committer, Writer
    from delivered.contract.source import Finding
    from delivered.ledger import Store


class Parts:
    """The parts of a connector, each as "module:name" in its folder.

    Imported on first use, so that tasks load no driver code, and a missing client library is reported by the part that
    needs it.

    Args:
        needs: raises MissingExtra if writer or store cannot be imported.
    """

    def __init__(self, folder: str, needs: Callable[[], None] = lambda: None, **names: str) -> None:
        self.folder = folder
        self._needs = needs
        self._names = names

    def __getitem__(self, what: str) -> Any:
        if what in ("writer", "store"):
            self._needs()
        module, _, name = self._names[what].partition(":")
        return getattr(import_module(f"{self.folder}.{module}"), name)


class StoreSink(Sink):
    """Base of a dataclass with the field `options`. Holds no connection; secrets are pickled as references.

    Attributes:
        parts: each called with the options and the arguments of the contract.
    """

    options: Any
    parts: ClassVar[Parts]

    @property
    def name(self) -> str:
        return str(self.options.sink_name)

    def preflight(self, guarantee: Guarantee) -> Sequence[Finding]:
        findings: Sequence[Finding] = self.parts["preflight"](self.options, guarantee)
        return findings

    def writer(self, work: Work, guarantee: Guarantee, schema: pa.Schema) -> Writer:
        writer: Writer = self.parts["writer"](self.options, work, guarantee, schema)
        return writer

    def scan(self) -> BoundedScan:
        scan: BoundedScan = self.parts["scan"](self.options)
        return scan

    def store(self, scope: Scope) -> Store:
        store: Store = self.parts["store"](self.options, scope)
        return store

    def committer(self, scope: Scope) -> Committer:
        committer: Committer = self.parts["committer"](self.options, scope)
        return committer
