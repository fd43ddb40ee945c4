"""Finds connectors by name, through their entry points. Imports no client library."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib.metadata import entry_points

from delivered.contract import Connector, Sink, Source
from delivered.model.errors import UsageError

ENTRY_POINTS = "delivered.connectors"
PREFIX = "delivered_"


def connectors() -> dict[str, Connector]:
    """Every installed connector by name."""
    found = {e.name: e.load() for e in entry_points(group=ENTRY_POINTS)}
    return dict(sorted(found.items()))


def connector(name: str) -> Connector:
    """The connector of a system, by "kafka" or "delivered_kafka".

    Raises:
        UsageError: there is none of that name.
    """
    name = name.removeprefix(PREFIX)
    found = {e.name: e for e in entry_points(group=ENTRY_POINTS)}
    if name not in found:
        near = difflib.get_close_matches(name, found, n=1)
        raise UsageError(
            "FORMAT_UNKNOWN",
            f"There is no connector {name!r}. Known: {', '.join(sorted(found))}.",
            next_step=f"write {near[0]!r}" if near else "write one of these",
        )
    loaded: Connector = found[name].load()
    return loaded


def find_source(system: str, options: Mapping[str, str]) -> Source:
    """A source by the name of its system.

    Raises:
        UsageError: no such connector, not a source, or a bad option.
    """
    found = connector(system)
    if found.source_options is None:
        raise UsageError("NOT_A_SOURCE", f"delivered_{system} cannot be read as a source.")
    return found.source(options)


def find_sink(system: str, options: Mapping[str, str]) -> Sink:
    """A sink by the name of its system. Raises as `find_source`."""
    found = connector(system)
    if found.sink_options is None:
        raise UsageError("NOT_A_SINK", f"delivered_{system} cannot be written to.")
    return found.sink(options)
