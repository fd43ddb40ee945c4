"""A scan of all messages of a transaction topic, by offset at its brokers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import pyarrow as pa

from delivered.connectors.rocketmq.options import RocketmqSinkOptions
from delivered.connectors.rocketmq.remoting import Cluster, Place
from delivered.connectors.rocketmq.topic import ends, kept
from delivered.contract.source import Offsets, Slice
from delivered.source.columns import id_bytes

_ROWS = 4_096
_SCHEMA = pa.schema(
    [
        *(pa.field(name, pa.binary()) for name in ("value", "key", "message_id")),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
    ]
)


@dataclass(frozen=True)
class RocketmqScan:
    """See `delivered.contract.sink.BoundedScan`."""

    options: RocketmqSinkOptions

    def schema(self) -> pa.Schema:
        return _SCHEMA

    def slices(self, since: Offsets | None = None) -> Sequence[Slice]:
        del since  # skips messages that the topic no longer has
        with closing(Cluster(self.options)) as cluster:
            found = ends(cluster, cluster.places())
        return [
            Slice({"broker": broker, "queue": queue, "end": end}, partition=f"{broker}/{queue}")
            for broker, queues in found.items()
            for queue, end in queues.items()
            if end
        ]

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
                        "key": id_bytes(" ".join(keys)) if keys else None,
                        "message_id": id_bytes(own),
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
