"""Apache Kafka, with Arrow in and out; no JAR."""

from __future__ import annotations

from delivered.connectors.kafka.options import SinkOptions, SourceOptions
from delivered.contract.connector import Connector, Factory

CONNECTOR = Connector(
    "kafka",
    "kafka",
    sources=Factory(SourceOptions, "delivered.connectors.kafka.source:KafkaSource"),
    sinks=Factory(SinkOptions, "delivered.connectors.kafka.sink:KafkaSink"),
    transactions="",
    messaging=True,
)
