"""The topic as a source of all that it keeps, by offset at its brokers, for the audit. Of a topic of transactions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from delivered.connectors.rocketmq.options import RocketmqSinkOptions
from delivered.connectors.rocketmq.remoting import Cluster, Place
from delivered.connectors.rocketmq.topic import ends, kept
from delivered.contract.finding import Finding
from delivered.contract.source import Offsets, Slice
from delivered.model.capability import SourceCapability
from delivered.source.bounded_scan import BoundedScanDriver

_ROWS = 4_096
_SCHEMA = pa.schema(
    [
        *(pa.field(name, pa.binary()) for name in ("value", "key", "message_id")),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
    ]
)


@dataclass(frozen=True)
class RocketmqTopic:
    options: RocketmqSinkOptions

    @property
    def rows_per_batch_max(self) -> int | None:
        return None

    def capability(self) -> SourceCapability:
        return SourceCapability("rocketmq", replayable=False, why_not="the topic is read as a whole, for an audit")

    def preflight(self) -> Sequence[Finding]:
        return ()

    def schema(self) -> pa.Schema:
        return _SCHEMA

    def driver(self) -> RocketmqTopicDriver:
        return RocketmqTopicDriver(self.options)

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        cluster = Cluster(self.options)
        place = Place(piece.data["broker"], piece.data["queue"])
        rows: list[dict[str, object]] = []
        try:
            for message in kept(cluster, place, piece.data["end"]):
                own = message.properties.get("UNIQ_KEY", "")
                keys = [k for k in message.properties.get("KEYS", "").split(" ") if k and k != own]
                rows.append(
                    {
                        "value": message.body,
                        "key": " ".join(keys).encode() if keys else None,
                        "message_id": own.encode(),
                        "partition": place.queue,
                        "offset": message.offset,
                    }
                )
                if len(rows) == _ROWS:
                    yield pa.RecordBatch.from_pylist(rows, schema=_SCHEMA)
                    rows = []
        finally:
            cluster.close()
        if rows:
            yield pa.RecordBatch.from_pylist(rows, schema=_SCHEMA)


class RocketmqTopicDriver(BoundedScanDriver):
    """Offsets are `{"<broker>/<queue>": n}`."""

    def __init__(self, options: RocketmqSinkOptions) -> None:
        super().__init__(f"topic {options.topic!r}")
        self._options = options

    def slices(self, start: Offsets, end: Offsets) -> Sequence[Slice]:
        del start  # what a topic does not keep any more is not read
        found = []
        for partition, until in end.items():
            broker, _, queue = partition.rpartition("/")
            if until:
                found.append(Slice({"broker": broker, "queue": int(queue), "end": int(until)}, partition=partition))
        return found

    def batch(self) -> tuple[Offsets, Offsets]:
        cluster = Cluster(self._options)
        try:
            found = ends(cluster, cluster.places())
        finally:
            cluster.close()
        until = {f"{broker}/{queue}": n for broker, queues in found.items() for queue, n in queues.items()}
        return dict.fromkeys(until, 0), until
