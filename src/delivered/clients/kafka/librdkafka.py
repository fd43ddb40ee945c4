"""librdkafka through confluent-kafka: how its clients are created, and which settings it knows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from delivered.clients.kafka.errors import config_error
from delivered.clients.kafka.settings import protocol_of
from delivered.model.errors import MissingExtra, UsageError
from delivered.model.options import REFERENCES

T = TypeVar("T")


class ClientLog:
    """librdkafka's own log, at debug level: it logs every failed connection attempt as an error, many per second."""

    _log = logging.getLogger("delivered.kafka.client")

    def log(self, level: int, message: str, *arguments: object) -> None:
        del level
        self._log.debug(message, *arguments)


def kafka_client() -> Any:
    """The module `confluent_kafka`.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        import confluent_kafka
    except ImportError:
        raise MissingExtra("kafka") from None
    return confluent_kafka


def connect(make: Callable[[dict[str, Any]], T], owner: str, settings: Mapping[str, Any], **callbacks: Any) -> T:
    """Create a client of confluent-kafka.

    Args:
        owner: of the options, for errors.
        settings: librdkafka's names, secrets resolved.

    Raises:
        UsageError: librdkafka rejects a setting or its value.
    """
    try:
        return make({"security.protocol": protocol_of(settings), **settings, "logger": ClientLog(), **callbacks})
    except kafka_client().KafkaException as error:
        raise config_error(error.args[0].str(), owner, next(iter(settings)) if len(settings) == 1 else None) from None


def check_settings(owner: str, client: Mapping[str, str]) -> None:
    """Check the user's settings on the driver, before anything runs. Opens no connection: no server is named.

    Args:
        client: from `client_options`. Secrets and files are left out: they are on other machines.

    Raises:
        UsageError: unknown setting, or invalid value.
    """
    known = {
        name: value
        for name, value in client.items()
        if name not in ("bootstrap.servers", "sasl.jaas.config")
        and not name.endswith((".location", ".password", ".pem"))
        and not value.startswith(REFERENCES)
    }
    with suppress(MissingExtra):  # reported when a client is created
        make = kafka_client().Producer
        try:
            connect(make, owner, {"sasl.username": "-", "sasl.password": "-", **known})
        except UsageError:  # it may name an alias: name what the user wrote
            for name, value in known.items():
                connect(make, owner, {name: value})
            raise
