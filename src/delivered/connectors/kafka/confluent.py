"""The same producer over confluent-kafka's Python calls: for installations whose librdkafka shows no symbols."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from delivered.connectors.kafka.produce import (
    POLL_MS,
    Failures,
    Headers,
    ProducerError,
    Rows,
    flush_pauses,
    spread,
    timeout_error,
)
from delivered.connectors.kafka.protocol import server_name
from delivered.model.patience import Stall


class ConfluentProducer:
    """See `delivered.connectors.kafka.produce.Producer`."""

    def __init__(self, config: Mapping[str, str]) -> None:
        import confluent_kafka

        self._server = server_name(config["bootstrap.servers"])
        self._errors = confluent_kafka.KafkaException
        self.failures = Failures()
        self._fatal: Any = None
        settings: dict[str, Any] = {k: v == "true" if v in ("true", "false") else v for k, v in config.items()}
        settings |= {
            "on_delivery": self._on_delivery,
            "error_cb": self._on_error,
            "logger": _Silent(),
        }
        try:
            self._producer: Any = confluent_kafka.Producer(settings)
        except self._errors as error:
            raise ProducerError("CONFIG", error.args[0].str(), config=True) from None

    def _on_delivery(self, error: Any, message: Any) -> None:
        if error is not None:
            size = len(message.key() or b"") + len(message.value() or b"")
            self.failures.add(error.code(), error.name(), size)

    def _on_error(self, error: Any) -> None:
        self.failures.note(error.name(), error.str())
        if error.fatal():
            self._fatal = error
            self.failures.fatal = error.name()

    def start(self, timeout_s: float) -> None:
        self._call(self._producer.init_transactions, timeout_s)

    def begin(self) -> None:
        self._call(self._producer.begin_transaction)

    def abort(self, timeout_s: float) -> None:
        self._producer.purge()
        self._producer.poll(0)
        self._call(self._producer.abort_transaction, timeout_s)

    def send(self, rows: Rows) -> None:
        for topic, partition, key, value, headers in spread(rows):
            self.send_one(topic, partition, key, value, headers)

    def send_one(
        self,
        topic: str,
        partition: int | None,
        key: bytes | None,
        value: bytes | None,
        headers: Headers | None = None,
    ) -> None:
        more: dict[str, Any] = {}
        if headers:
            more["headers"] = headers
        if partition is not None:
            more["partition"] = partition
        while True:
            try:
                self._producer.produce(topic, value, key, **more)
                return
            except BufferError:
                self._producer.poll(POLL_MS / 1000)
                self._raise_fatal()
            except self._errors as error:
                said = error.args[0]
                self.failures.add(said.code(), said.name(), len(key or b"") + len(value or b""))
                return

    def flush(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        pauses = flush_pauses()
        with Stall(self._server) as stall:
            while (waiting := self._producer.flush(next(pauses) / 1000)) > 0:
                self._raise_fatal()
                stall.look(waiting)
                if time.monotonic() > deadline:
                    raise timeout_error(f"{waiting} records were not acknowledged in {timeout_s:.0f} s", self.failures)
        self._raise_fatal()

    def partitions(self, topic: str, timeout_s: float) -> int:
        found = self._call(self._producer.list_topics, topic, timeout_s).topics[topic]
        if found.error is not None:
            raise ProducerError(found.error.name(), found.error.str())
        return len(found.partitions)

    def close(self) -> None:
        """Let go of it. confluent-kafka frees it without ending its transaction."""
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.purge()
            producer.poll(0)

    def _call(self, function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except self._errors as error:
            said = error.args[0]
            raise ProducerError(said.name(), said.str() + self.failures.hint()) from None

    def _raise_fatal(self) -> None:
        if self._fatal is not None:
            raise ProducerError(self._fatal.name(), self._fatal.str())


class _Silent:
    """Takes librdkafka's log lines: what matters comes back as errors."""

    def log(self, *_: Any) -> None:
        return
