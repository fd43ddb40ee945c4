"""librdkafka through confluent-kafka: how its clients are created, and which settings it knows."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from delivered.clients.kafka import logins, sasl, tls
from delivered.clients.kafka.errors import config_error
from delivered.clients.kafka.sasl import mechanism_of
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
        given = {"security.protocol": protocol_of(settings), **_login(settings)}
        return make({**given, "logger": ClientLog(), **callbacks})
    except kafka_client().KafkaException as error:
        raise config_error(error.args[0].str(), owner, next(iter(settings)) if len(settings) == 1 else None) from None


def lacks_login(client: Mapping[str, str]) -> str | None:
    """What of a login librdkafka, as confluent-kafka brings it, does not have; None: it has all."""
    if protocol_of(client).startswith("SASL") and mechanism_of(client) == "GSSAPI":
        return "the SASL mechanism GSSAPI"
    return "kafka.ssl.enabled.protocols" if "ssl.enabled.protocols" in client else None


def _login(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Login settings as librdkafka takes them: tokens and trust stores come from our client's code."""
    found = dict(settings)
    try:
        if (store := found.pop("ssl.truststore.location", None)) is not None:
            found["ssl.ca.pem"] = tls.trusted_of_store(store, found.pop("ssl.truststore.password", None))
        found |= {n: tls.pem(found[n]) for n in ("ssl.ca.pem", "ssl.certificate.pem", "ssl.key.pem") if n in found}
    except (OSError, ValueError) as error:
        raise tls.unusable(str(error)) from None
    if mechanism_of(found, "") == "OAUTHBEARER":
        found = {n: v for n, v in found.items() if not n.startswith((sasl.PREFIX, "https."))}
        found["oauth_cb"] = partial(_token, settings)
    return found


def _token(settings: Mapping[str, Any], _: str) -> tuple[str, float, str, dict[str, str]]:
    token = sasl.token_for(settings)
    return token.text, time.time() + token.left_s, "", dict(token.extensions)


def check_settings(owner: str, client: Mapping[str, str]) -> None:
    """Check the user's settings on the driver, before anything runs. Opens no connection: no server is named.

    Args:
        client: from `client_options`. Secrets and files are left out: they are on other machines.

    Raises:
        UsageError: unknown setting, or invalid value.
    """
    logins.check_complete(owner, client)
    known = {
        name: value
        for name, value in client.items()
        if name != "bootstrap.servers"
        and name not in logins.SETTINGS  # checked by us
        and not value.startswith(REFERENCES)
    }
    if not known:
        return  # librdkafka need not be loaded
    with suppress(MissingExtra):  # reported when a client is created
        make = kafka_client().Producer
        try:
            connect(make, owner, known)
        except UsageError:  # it may name an alias: name what the user wrote
            for name, value in known.items():
                connect(make, owner, {name: value})
            raise
