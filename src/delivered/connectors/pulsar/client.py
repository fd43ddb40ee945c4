"""Warm clients, one per process and options, and translation of the library's errors."""

from __future__ import annotations

import os
import re
from typing import Any

from delivered.connectors.pulsar.admin import Admin
from delivered.connectors.pulsar.options import Place
from delivered.connectors.pulsar.positions import PREFIX
from delivered.connectors.pulsar.tokens import hidden, not_permitted, secret, supplier, tls_error, trusted_file
from delivered.model.errors import BadRecord, DeliveredError, MissingExtra, Unreachable, UsageError
from delivered.model.limits import CONNECT_TIMEOUT_S

_warm: dict[tuple[int, str], Any] = {}


def pulsar() -> Any:
    """The client library, imported on use. Raises MissingExtra."""
    try:
        import pulsar
    except ImportError:
        raise MissingExtra("pulsar") from None
    return pulsar


def version_schema() -> Any:
    """A reader schema that makes `Message.value` the message's schema version, -1 for none.

    Only schemas get the version from the client; its own `schema_version` decodes bytes as text.
    """

    class Versions(pulsar().schema.BytesSchema):  # type: ignore[misc]
        def decode_message(self, message: Any) -> int:
            return int(message.int_schema_version())

    return Versions()


def registers(kind: str, text: str) -> Any:
    """A producer schema, registered with the topic if missing; values are already encoded."""
    import _pulsar

    class Encoded(pulsar().schema.BytesSchema):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._schema_info = _pulsar.SchemaInfo(getattr(_pulsar.SchemaType, kind), kind, text)

    return Encoded()


def warm_client(options: Place) -> Any:
    """This process's client with these options."""
    name = (os.getpid(), repr((options.url, options.token, options.trusted, options.certificate, options.key)))
    if name not in _warm:
        _warm[name] = _new_client(options)
    return _warm[name]


def _new_client(options: Place) -> Any:
    library = pulsar()
    secret(options)  # fail early if it cannot be read
    if (found := tls_error(options)) is not None:
        raise found
    try:
        return library.Client(
            options.url,
            authentication=_authentication(library, options),
            operation_timeout_seconds=int(CONNECT_TIMEOUT_S),
            connection_timeout_ms=int(CONNECT_TIMEOUT_S * 1000),
            tls_trust_certs_file_path=trusted_file(options),
            tls_validate_hostname=True,
            tls_certificate_file_path=options.certificate,
            tls_private_key_file_path=options.key,
            # By default it prints every connection attempt to the standard output.
            logger=library.ConsoleLogger(library.LoggerLevel.Error),
        )
    except library.PulsarException as error:
        raise explained(error, options, options.url) from None


def _authentication(library: Any, options: Place) -> Any:
    """By the token if there is one; the certificate is then shown by the connection alone."""
    if options.token is not None:
        return library.AuthenticationToken(supplier(options))
    if options.certificate is not None:
        return library.AuthenticationTLS(options.certificate, options.key)
    return None


def explained(error: Exception, options: Place, what: str) -> DeliveredError:
    """Translate an error of the client.

    Args:
        what: the requested topic.
    """
    library = pulsar()
    detail = hidden(options, str(error) or type(error).__name__)
    match error:
        case library.TopicNotFound():
            return UsageError(
                "TOPIC_MISSING",
                f"The topic {what!r} does not exist at {options.url}: {detail}",
                next_step="create the topic, or correct its name",
            )
        case library.AuthenticationError() | library.AuthorizationError() | library.ErrorGettingAuthenticationData():
            return not_permitted(options, f"this client is not authorized to use {what!r} at {options.url}: {detail}")
        case library.IncompatibleSchema():
            return UsageError(
                "SCHEMA_INCOMPATIBLE",
                f"The brokers at {options.url} rejected the producer's schema for {what!r}: it is incompatible with "
                "the registered one, or bytes are not allowed.",
                next_step="check `pulsar-admin schemas get`; write with schema avro or json, or to another topic",
            )
        case library.MessageTooBig():
            return BadRecord(
                "RECORD_TOO_LARGE",
                f"{what} at {options.url} does not accept a message of that size: {detail}",
                next_step="lower the option messageBytesMax, or set chunking to true",
            )
    return (
        tls_error(options)
        or _refusal(options, what)
        or Unreachable(
            "PULSAR_UNREACHABLE",
            f"Pulsar at {options.url} did not answer about {what!r}, or the connection was lost: {detail}",
            next_step="check the option url, and that the brokers are running and reachable from here",
        )
    )


def _refusal(options: Place, what: str) -> UsageError | None:
    """Ask the HTTP service: brokers reject a token by closing the connection, and the client just reconnects."""
    topic = re.sub(r"-partition-\d+$", "", what)
    try:
        Admin(options).partitions(topic if topic.startswith("persistent://") else f"{PREFIX}{topic}")
    except UsageError as error:
        return error
    except DeliveredError:
        pass
    return None
