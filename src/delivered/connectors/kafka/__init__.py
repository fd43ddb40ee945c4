"""Apache Kafka, without a JAR: over librdkafka, Arrow in and out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from delivered.connectors.kafka.options import SOURCE_OPTIONS, parse
from delivered.connectors.kafka.sink_options import SINK_OPTIONS, SinkOptions
from delivered.model.options import OptionTable

if TYPE_CHECKING:
    from delivered.contract.sink import Sink
    from delivered.contract.source import Source


@dataclass(frozen=True)
class KafkaConnector:
    """Holds nothing but names: safe to import, to pickle, to list."""

    name: str = "kafka"
    extra: str = "kafka"
    source_options: OptionTable | None = SOURCE_OPTIONS
    sink_options: OptionTable | None = SINK_OPTIONS

    def source(self, options: Mapping[str, str]) -> Source:
        from delivered.connectors.kafka.source import KafkaSource

        return KafkaSource(parse(options))

    def sink(self, options: Mapping[str, str]) -> Sink:
        from delivered.connectors.kafka.sink import KafkaSink

        return KafkaSink(SinkOptions.parse(options))


CONNECTOR = KafkaConnector()
