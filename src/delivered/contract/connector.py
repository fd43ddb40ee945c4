"""What a connector is: where its entry point leads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from delivered.model.errors import Refused, UsageError
from delivered.model.options import Options, OptionTable

if TYPE_CHECKING:
    from delivered.contract.queue import Queue
    from delivered.contract.sink import Sink
    from delivered.contract.source import Source


@dataclass(frozen=True)
class Made:
    """How sources, sinks or queues of a system are made.

    Attributes:
        options: what they are told.
        by: class or function that takes these options, as "module:name"; imported when it is called.
    """

    options: type[Options]
    by: str

    def __call__(self, given: Mapping[str, str], *more: Any) -> Any:
        module, _, name = self.by.partition(":")
        return getattr(import_module(module), name)(self.options.parse(given), *more)


@dataclass(frozen=True)
class Connector:
    """A system, reached by its entry point in the group `delivered.connectors`.

    Holds names alone: it can be pickled, and listing connectors imports no client library.

    Attributes:
        name: "kafka"; the format is "delivered_kafka".
        extra: of pip, which brings the client library.
        sources: of a system that can be read again.
        sinks: of a system that can be written to.
        queues: of a system that forgets what was acknowledged: its source is a log that receivers fill.
        external_ledger: the system cannot hold a ledger. Its sinks take another one's, of a SQLite file that the
            option `ledger` names.
        instead: what to do instead of what the system cannot be: "read with delivered_log".
    """

    name: str
    extra: str
    sources: Made | None = None
    sinks: Made | None = None
    queues: Made | None = None
    external_ledger: bool = False
    instead: str | None = None

    @property
    def source_options(self) -> OptionTable | None:
        made = self.sources or self.queues
        return None if made is None else made.options.TABLE

    @property
    def sink_options(self) -> OptionTable | None:
        return None if self.sinks is None else self.sinks.options.TABLE

    def source(self, options: Mapping[str, str]) -> Source:
        """
        Args:
            options: keys in any case.

        Raises:
            UsageError: unknown or bad option, with a suggestion; or this is no source.
        """
        if self.sources is not None:
            made: Source = self.sources(options)
            return made
        if self.queues is not None:
            raise Refused(
                "QUEUE_FORGETS",
                f"delivered_{self.name} reads a queue that forgets what was acknowledged; only the log behind its "
                "receivers can be read again.",
                next_step=f"make the source with delivered.endpoint({self.name!r}, ...), which puts the two together",
            )
        raise UsageError("NOT_A_SOURCE", f"delivered_{self.name} cannot be read as a source.", self.instead)

    def queue(self, options: Mapping[str, str]) -> Queue:
        """As `source`, of a queue."""
        made: Queue = self.received()(options)
        return made

    def received(self) -> Made:
        """How its queues are made. Raises UsageError for a system that needs no receiver."""
        if self.queues is None:
            raise UsageError(
                "NOT_A_QUEUE",
                f"delivered_{self.name} needs no receiver: it can be read again by itself.",
                next_step="start the pipeline with `delivered run`",
            )
        return self.queues

    def sink(self, options: Mapping[str, str], ledger_sink: Sink | None = None) -> Sink:
        """As `source`, of a sink.

        Args:
            ledger_sink: sink whose ledger records the batches, for a system that cannot hold one.
        """
        if self.sinks is None:
            raise UsageError("NOT_A_SINK", f"delivered_{self.name} cannot be written to.", self.instead)
        if self.external_ledger and ledger_sink is None:
            raise Refused(
                "LEDGER_ELSEWHERE",
                f"delivered_{self.name} has no place that one driver can own, so batches are recorded in a ledger of "
                "another system.",
                next_step=f"make the sink with delivered.endpoint({self.name!r}, ...), which puts the two together",
            )
        made: Sink = self.sinks(options, ledger_sink) if self.external_ledger else self.sinks(options)
        return made
