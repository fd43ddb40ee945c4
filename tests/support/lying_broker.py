"""A broker whose frames are well formed and whose answers are not: for clients of Kafka's protocol."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

from kafka.protocol.admin.transactions import (
    DescribeProducersResponse,
    DescribeTransactionsResponse,
    ListTransactionsResponse,
)
from kafka.protocol.consumer import FetchResponse, ListOffsetsResponse
from kafka.protocol.metadata import ApiVersionsResponse, FindCoordinatorResponse, MetadataResponse
from kafka.protocol.producer import InitProducerIdResponse

NEWEST = {0: 9, 1: 12, 2: 5, 3: 9, 10: 4, 18: 3, 22: 4, 24: 3, 26: 4, 61: 0, 65: 0, 66: 0}
"""API -> newest version spoken."""
_METADATA, _API_VERSIONS, _FETCH = 3, 18, 1


def metadata(port: int) -> Any:
    part = MetadataResponse.MetadataResponseTopic.MetadataResponsePartition(
        error_code=0, partition_index=0, leader_id=1, leader_epoch=0, replica_nodes=[1], isr_nodes=[1],
        offline_replicas=[],
    )  # fmt: skip
    topic = MetadataResponse.MetadataResponseTopic(error_code=0, name="t", is_internal=False, partitions=[part])
    broker = MetadataResponse.MetadataResponseBroker(node_id=1, host="127.0.0.1", port=port)
    return MetadataResponse(
        version=9, throttle_time_ms=0, brokers=[broker], cluster_id="c", controller_id=1, topics=[topic]
    )


def _answers(port: int) -> dict[int, Callable[[int], bytes]]:
    Topic = ListOffsetsResponse.ListOffsetsTopicResponse  # noqa: N806
    end = Topic.ListOffsetsPartitionResponse(partition_index=0, error_code=0, timestamp=-1, offset=5, leader_epoch=0)
    Held = DescribeProducersResponse.TopicResponse  # noqa: N806
    producer = Held.PartitionResponse.ProducerState(
        producer_id=1, producer_epoch=0, last_sequence=0, last_timestamp=0, coordinator_epoch=0,
        current_txn_start_offset=3,
    )  # fmt: skip
    open_at = Held.PartitionResponse(partition_index=0, error_code=0, error_message=None, active_producers=[producer])
    state = ListTransactionsResponse.TransactionState(transactional_id="x", producer_id=1, transaction_state="Ongoing")
    described = DescribeTransactionsResponse.TransactionState(
        error_code=105, transactional_id="x", transaction_state="", transaction_timeout_ms=0,
        transaction_start_time_ms=0, producer_id=-1, producer_epoch=-1, topics=[],
    )  # fmt: skip
    return {
        65: lambda v: _body(DescribeTransactionsResponse(throttle_time_ms=0, transaction_states=[described]), v),
        _METADATA: lambda v: _body(metadata(port), v),
        2: lambda v: _body(ListOffsetsResponse(throttle_time_ms=0, topics=[Topic(name="t", partitions=[end])]), v),
        10: lambda v: _body(
            FindCoordinatorResponse(
                throttle_time_ms=0, error_code=0, error_message=None, node_id=1, host="127.0.0.1", port=port
            ),
            v,
        ),
        22: lambda v: _body(
            InitProducerIdResponse(throttle_time_ms=0, error_code=0, producer_id=1, producer_epoch=0), v
        ),
        61: lambda v: _body(
            DescribeProducersResponse(throttle_time_ms=0, topics=[Held(name="t", partitions=[open_at])]), v
        ),
        66: lambda v: _body(
            ListTransactionsResponse(
                throttle_time_ms=0, error_code=0, unknown_state_filters=[], transaction_states=[state]
            ),
            v,
        ),
        _FETCH: lambda v: fetched(b""),
    }


def fetched(records: bytes) -> bytes:
    Topic = FetchResponse.FetchableTopicResponse  # noqa: N806
    aborted = Topic.PartitionData.AbortedTransaction(producer_id=9, first_offset=0)
    part = Topic.PartitionData(
        partition_index=0, error_code=0, high_watermark=5, last_stable_offset=5, log_start_offset=0,
        aborted_transactions=[aborted], preferred_read_replica=-1, records=records,
    )  # fmt: skip
    made = FetchResponse(
        throttle_time_ms=0, error_code=0, session_id=0, responses=[Topic(topic="t", partitions=[part])]
    )
    return _body(made, 12)


def _body(message: Any, version: int) -> bytes:
    """Without a header."""
    message._version = version
    return bytes(message.encode(version=version))


class LyingBroker:
    """Tells the truth, but for answers that `lie` changes.

    Attributes:
        lie: API and true body -> body.
    """

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.lie: Callable[[int, bytes], bytes] = lambda api, body: body
        self._answers = _answers(self.port)
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self._open.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection.makefile("rb") as stream:
                while len(head := stream.read(4)) == 4:
                    request = stream.read(struct.unpack(">i", head)[0])
                    api, version, correlation = struct.unpack_from(">hhi", request, 0)
                    connection.sendall(self._frame(api, version, correlation))
        except OSError:
            pass

    def _frame(self, api: int, version: int, correlation: int) -> bytes:
        if api == _API_VERSIONS:
            keys = [ApiVersionsResponse.ApiVersion(api_key=k, min_version=0, max_version=v) for k, v in NEWEST.items()]
            body = _body(ApiVersionsResponse(error_code=0, api_keys=keys, throttle_time_ms=0), version)
            flexible = False
        else:
            body = self.lie(api, self._answers[api](version))
            flexible = version >= {_FETCH: 12, _METADATA: 9, 2: 6, 10: 3, 22: 2, 61: 0, 65: 0, 66: 0}[api]
        frame = struct.pack(">i", correlation) + (b"\0" if flexible else b"") + body
        return struct.pack(">i", len(frame)) + frame

    def close(self) -> None:
        self._socket.close()
        for one in self._open:
            one.close()
