"""The bridges by name."""

from __future__ import annotations

from collections.abc import Mapping

from examples.bridges.bridge import Bridge
from examples.bridges.pulsar_delta import PulsarDelta
from examples.bridges.rabbitmq_postgres import RabbitmqPostgres
from examples.bridges.rocketmq_kafka import RocketmqKafka

BRIDGES: Mapping[str, type[Bridge]] = {made.name: made for made in (PulsarDelta, RabbitmqPostgres, RocketmqKafka)}
