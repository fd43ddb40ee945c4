"""Finds connectors by name: our own, and those of other packages through entry points. Imports no client library."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from delivered.contract.connector import Connector, outdated
from delivered.contract.sink import Sink
from delivered.contract.source import Source
from delivered.kits.schemas import URL, FormatOptions
from delivered.model.errors import UsageError
from delivered.model.options import OptionTable

if TYPE_CHECKING:
    from delivered.receiver import ReceivedSource

log = logging.getLogger("delivered")

ENTRY_POINTS = "delivered.connectors"
PREFIX = "delivered_"
_MODULES = (
    *("activemq", "delta", "files", "iceberg", "kafka", "log", "mysql", "outbox", "postgres", "pulsar", "rabbitmq"),
    *("rabbitmq.stream", "rocketmq", "saga", "sqlite"),
)
_OWN = {
    m.replace(".", "_"): EntryPoint(m.replace(".", "_"), f"delivered.connectors.{m}:CONNECTOR", ENTRY_POINTS)
    for m in _MODULES
}
"""Our own connectors: code without installed metadata (`--py-files`, an older editable install) has them too."""


_SAME = {"mariadb": "mysql", "jdbc": "postgres", "amqp": "rabbitmq", "stomp": "activemq", "artemis": "activemq"}
"""What other tools call it."""
_FILES = ("parquet", "csv", "json")
"""Formats of Spark's, and values of `fileFormat`."""


def _find_others() -> dict[str, EntryPoint]:
    """Connectors of other packages. Reads the metadata of every installed package."""
    return {e.name: e for e in entry_points(group=ENTRY_POINTS) if e.name not in _OWN}


def connectors() -> dict[str, Connector]:
    """Every installed connector by name, but those that were written for another version of delivered."""
    return dict(sorted(({name: _load(entry) for name, entry in _OWN.items()} | _find_usable()).items()))


def names() -> list[str]:
    """Of `connectors`. Imports none of our own."""
    return sorted((*_OWN, *_find_usable()))


def _find_usable() -> dict[str, Connector]:
    found: dict[str, Connector] = {}
    for name, entry in _find_others().items():
        try:
            found[name] = _load(entry)
        except UsageError as error:  # of another's connector, which this pipeline may not use
            log.warning("the connector %r is left aside: %s", name, error)
    return found


def _load(entry: EntryPoint) -> Connector:
    try:
        loaded: Connector = entry.load()
    except ImportError as error:
        if not (error.name or "").startswith("delivered."):
            raise  # a client library
        raise outdated(f"{entry.value}: {error}") from error
    return loaded


def connector(name: str) -> Connector:
    """The connector of a system, by "kafka" or "delivered_kafka".

    Raises:
        UsageError: there is none of that name, or it was written for another version of delivered.
    """
    name = name.removeprefix(PREFIX)
    if name in _OWN:
        return _load(_OWN[name])
    entries = _OWN | _find_others()
    if name not in entries:
        near = [_SAME[name]] if name in _SAME else difflib.get_close_matches(name, entries, n=1)
        if name in _FILES:
            raise UsageError("FORMAT_UNKNOWN.FILES", name=name, known=", ".join(sorted(entries)))
        raise UsageError(
            "FORMAT_UNKNOWN.NEAR" if near else "FORMAT_UNKNOWN.OTHER",
            name=name,
            known=", ".join(sorted(entries)),
            near=near[0] if near else None,
        )
    return _load(entries[name])


def find_source(system: str, options: Mapping[str, str]) -> Source:
    """A source by the name of its system. Raises UsageError: no such connector, not a source, or a bad option."""
    found = connector(system)
    source = find_received(system, options) if found.queues is not None else found.source(options)
    formats = _formats(found.source_options, options)
    if formats is None:
        return source
    from delivered.kits.schemas.formatted import FormattedSource

    return FormattedSource(f"{PREFIX}{found.name} source", source, formats)


def _formats(table: OptionTable | None, options: Mapping[str, str]) -> FormatOptions | None:
    """What the options say of keys and values with a schema; None: both are bytes, or the connector has no such."""
    if table is None or not any(o.name == URL for o in table.options):
        return None
    formats = FormatOptions.read(table.owner, table.restore(options))
    return formats if formats.sides else None


def find_received(system: str, options: Mapping[str, str]) -> ReceivedSource:
    """A queue and the log that its receivers fill, as one source.

    Raises:
        UsageError: no such connector, not a queue, or a bad option.
    """
    from delivered.receiver import ReceivedSource, ReceiveOptions

    found = connector(system)
    queue, table = found.queue(options), found.received().options.TABLE
    receive = ReceiveOptions.read(table.owner, table.restore(options))
    storage = {f"storage.{k}": v for k, v in receive.storage.items()}
    log = find_source("log", {"path": receive.log, **receive.log_options, **storage})
    if queue.without_ids:
        receive = replace(receive, ids_required=False)
    return ReceivedSource(found.name, queue, receive, log)


def find_sink(system: str, options: Mapping[str, str]) -> Sink:
    """A sink by the name of its system. Raises as `find_source`."""
    found = connector(system)
    sink = _sink(found, options)
    formats = _formats(found.sink_options, options)
    if formats is None:
        return sink
    from delivered.kits.schemas.formatted import FormattedSink

    return FormattedSink(f"{PREFIX}{found.name} sink", sink, formats)


def _sink(found: Connector, options: Mapping[str, str]) -> Sink:
    if not found.external_ledger or found.sinks is None:
        return found.sink(options)
    from delivered.connectors.sqlite.store import SqliteLedgers

    parsed: Any = found.sinks.options.parse(options)
    return found.sink(options, None if parsed.ledger is None else SqliteLedgers(parsed.ledger))
