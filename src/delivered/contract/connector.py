"""A connector: the target of its entry point, and the parts that it builds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from delivered.model.errors import Refused, UsageError, missing_extra
from delivered.model.options import Options, OptionTable

if TYPE_CHECKING:  # the command line lists connectors without loading what they stand on
    from delivered.contract.sink import Sink
    from delivered.contract.source import Queue, Source
    from delivered.ledger import Ledgers

P = TypeVar("P")


def build(base: type[Any], make: Callable[..., P], *args: Any) -> P:
    """What `make(*args)` returns, if it derives from a class of the contract.

    Raises:
        UsageError: the connector was written for another version of the contract.
        MissingExtra: its client library is not installed.
    """
    try:
        part = make(*args)
    except ImportError as error:
        if not (error.name or "").startswith("delivered."):
            raise missing_extra(str(error)) or error from None
        raise outdated(str(error)) from error
    except TypeError as error:
        if "instantiate abstract class" not in str(error):
            raise
        raise outdated(str(error)) from error
    if not isinstance(part, base):
        found = f"{type(part).__module__}.{type(part).__qualname__}"
        raise outdated(f"{found} does not derive from {base.__module__}.{base.__qualname__}")
    return part


def outdated(why: str) -> UsageError:
    return UsageError("CONNECTOR_OUTDATED", reason=why)


@dataclass(frozen=True)
class Factory:
    """Factory of a system's sources, sinks or queues.

    Attributes:
        by: class or function that takes the parsed options, as "module:name"; imported on the first call.
    """

    options: type[Options]
    by: str

    def __call__(self, values: Mapping[str, str], *more: Any) -> Any:
        module, _, name = self.by.partition(":")
        return getattr(import_module(module), name)(self.options.parse(values), *more)


@dataclass(frozen=True)
class Connector:
    """A system, registered as an entry point in the group `delivered.connectors`.

    Picklable. Holds only names, so listing connectors imports no client library.

    Attributes:
        name: "kafka"; the format is "delivered_kafka".
        extra: pip extra that installs the client library.
        sources: set if the system is replayable.
        queues: set if the system deletes acknowledged messages: receivers write them to a log, which is the source.
        external_ledger: the option `ledger` names a SQLite file that holds the ledger, as the system cannot.
        holds_ledger: it can, too: the option is not required.
        transactions: the option with which its sinks can prepare a batch; empty: they always can; None: they cannot.
        key_table: its sinks can store a dedup's keys. Both feed the alternatives that refusals list.
        messaging: the system is a message broker; OpenTelemetry's conventions for messaging apply.
        instead: next step for a role the system does not support: "read with delivered_log".
    """

    name: str
    extra: str
    sources: Factory | None = None
    sinks: Factory | None = None
    queues: Factory | None = None
    external_ledger: bool = False
    holds_ledger: bool = False
    transactions: str | None = None
    key_table: bool = False
    messaging: bool = False
    instead: str | None = None

    @property
    def source_options(self) -> OptionTable | None:
        factory = self.sources or self.queues
        return None if factory is None else factory.options.TABLE

    @property
    def sink_options(self) -> OptionTable | None:
        return None if self.sinks is None else self.sinks.options.TABLE

    def source(self, options: Mapping[str, str]) -> Source:
        """
        Args:
            options: keys in any case.

        Raises:
            UsageError: unknown or invalid option, or the system is not a source.
        """
        if self.sources is not None:
            from delivered.contract.source import Source

            source: Source = build(Source, self.sources, options)
            return source
        if self.queues is not None:
            raise Refused("QUEUE_FORGETS", name=self.name)
        raise UsageError(
            "NOT_A_SOURCE.INSTEAD" if self.instead else "NOT_A_SOURCE.OTHER", name=self.name, instead=self.instead
        )

    def queue(self, options: Mapping[str, str]) -> Queue:
        """As `source`, for a queue."""
        from delivered.contract.source import Queue

        queue: Queue = build(Queue, self.received(), options)
        return queue

    def received(self) -> Factory:
        """The factory of its queues. Raises UsageError if the system needs no receiver."""
        if self.queues is None:
            raise UsageError("NOT_A_QUEUE", name=self.name)
        return self.queues

    def sink(self, options: Mapping[str, str], ledgers: Ledgers | None = None) -> Sink:
        """As `source`, for a sink.

        Args:
            ledgers: hold the sink's, if `external_ledger`.
        """
        if self.sinks is None:
            raise UsageError(
                "NOT_A_SINK.CONNECTOR" if self.instead else "NOT_A_SINK.OTHER", name=self.name, instead=self.instead
            )
        if self.external_ledger and ledgers is None and not self.holds_ledger:
            raise Refused("LEDGER_ELSEWHERE", name=self.name)
        from delivered.contract.sink import Sink

        sink: Sink = build(Sink, self.sinks, options, *([ledgers] if self.external_ledger else []))
        return sink
