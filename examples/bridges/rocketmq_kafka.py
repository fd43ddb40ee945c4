"""RocketMQ -> receivers -> Spark -> Kafka."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, KafkaError, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from examples.bridges.bridge import SENT_AGAIN, order, order_id

from delivered_lab.brokers import Broker, rocketmq

TOPIC = "orders"
GROUP = "orders-to-kafka"
PARTITIONS = 3
IN_FLIGHT = 200


class RocketmqKafka:
    name = "rocketmq-kafka"
    servers = ("rocketmq", "kafka")
    received = True

    def open(self, servers: Mapping[str, Broker], folder: Path) -> dict[str, Any]:
        from delivered.connectors.rocketmq.client import library

        source, self._bootstrap = servers["rocketmq"], servers["kafka"].bootstrap
        rocketmq.make_topic(source.listeners["BROKER"], TOPIC)
        rocketmq.make_group(source.listeners["BROKER"], GROUP)
        admin = AdminClient({"bootstrap.servers": self._bootstrap})
        admin.create_topics([NewTopic(TOPIC, PARTITIONS, 1)])[TOPIC].result(30)
        made = library()  # keeps the client's log files away from the user's home
        from rocketmq import Producer

        self._producer = Producer(made.ClientConfiguration(source.url, made.Credentials()), [TOPIC])
        self._producer.startup()
        return {
            "source.endpoints": source.url,
            "source.log": str(folder / "log"),
            "source.receiveMessagesMax": 100,
            "sink.kafka.bootstrap.servers": self._bootstrap,
        }

    def send(self, numbers: range) -> None:
        from rocketmq import Message

        flying: list[Any] = []
        for n in numbers:
            for _ in range(2 if n % SENT_AGAIN == 0 else 1):
                message = Message()
                message.topic, message.keys, message.body = TOPIC, order_id(n), order(n)
                flying.append(self._producer.send_async(message))
            if len(flying) >= IN_FLIGHT or n == numbers[-1]:
                for one in flying:
                    one.result(30)  # raises what went wrong
                flying.clear()

    def found(self) -> Counter[str]:
        consumer = Consumer(
            {
                "bootstrap.servers": self._bootstrap,
                "group.id": "count",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
            }
        )
        ids, open_partitions = Counter[str](), set(range(PARTITIONS))
        consumer.assign([TopicPartition(TOPIC, p, 0) for p in open_partitions])
        while open_partitions:
            for message in consumer.consume(1_000, 0.2):
                error = message.error()
                if error is None:
                    ids[json.loads(message.value())["id"]] += 1
                elif error.code() == KafkaError._PARTITION_EOF:
                    open_partitions.discard(message.partition())
                else:
                    raise RuntimeError(f"Kafka: {error}")
        consumer.close()
        return ids

    def close(self) -> None:
        self._producer.shutdown()
