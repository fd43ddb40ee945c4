"""Which client fills which source."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from delivered import brokers
from delivered.verify.clients.activemq_feed import ArtemisFeed
from delivered.verify.clients.base import Feed
from delivered.verify.clients.kafka import Topic
from delivered.verify.clients.log import Log
from delivered.verify.clients.pulsar_feed import PulsarFeed
from delivered.verify.clients.rabbitmq_feed import RabbitQueue, RabbitStreams
from delivered.verify.clients.rocketmq_feed import RocketFeed
from delivered.verify.sinks import ACTIVEMQ, KAFKA, LOG, PULSAR, RABBITMQ, ROCKETMQ
from delivered.verify.sources import RABBITMQ_STREAM


def held_by(server: brokers.Broker, source: str, case: str, log: Path, connector: str | None = None) -> Feed:
    """A source that a server of its own kind holds, Kafka's topics aside.

    Args:
        case: its name.
        log: folder for what receivers keep, if it needs them.
        connector: another one of the same queues, in the pipeline file.
    """
    # A name of every server's own alphabet, however long the case's is.
    name = f"source-{hashlib.blake2b(case.encode(), digest_size=8).hexdigest()}"
    match source:
        case "pulsar":
            return PulsarFeed(server.url, f"http://{server.listeners['HTTP']}", name)
        case "rabbitmq_stream":
            return RabbitStreams(server.url, name)
        case "rabbitmq":
            return RabbitQueue(server.url, name, log, server.folder, connector)
        case "activemq":
            return ArtemisFeed(server.bootstrap, name, log, connector)
        case "rocketmq":
            return RocketFeed(server.url, server.listeners["BROKER"], name, log, connector)
    raise ValueError(f"no client fills the source {source!r}")


_CLASSES: Mapping[str, Callable[..., Feed]] = {
    LOG: Log,
    KAFKA: Topic,
    PULSAR: PulsarFeed,
    RABBITMQ_STREAM: RabbitStreams,
    RABBITMQ: RabbitQueue,
    ACTIVEMQ: ArtemisFeed,
    ROCKETMQ: RocketFeed,
}


def from_address(address: Mapping[str, Any]) -> Feed:
    """The same client again, from `Feed.address`."""
    given = dict(address)
    return _CLASSES[given.pop("system")](**given)
