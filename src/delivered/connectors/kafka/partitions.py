"""Which partitions a sink's transactions may have written."""

from __future__ import annotations

from delivered.clients.kafka.partition_state import partitions_of
from delivered.clients.kafka.protocol import Wire
from delivered.clients.kafka.rows import Partition
from delivered.connectors.kafka.markers import marker_partition
from delivered.connectors.kafka.sink_options import SinkOptions
from delivered.connectors.kafka.topics import ledger_topic
from delivered.model.identity import Scope


def written_partitions(wire: Wire, options: SinkOptions, scope: Scope) -> list[Partition]:
    """Every partition that a transaction of this sink may have written: its topic's and the markers'.

    If rows name their topics: those of all topics, except internal ones.
    """
    topics = [options.topic] if options.topic is not None else [t for t in wire.topics() if not t.startswith("__")]
    marker = ledger_topic(scope, options.ledger_topic), marker_partition(scope)
    return [*partitions_of(wire, topics), marker]
