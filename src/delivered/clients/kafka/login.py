"""How a connection to a Kafka broker starts: TCP, TLS, SASL, from librdkafka's settings."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from delivered.clients.kafka.answers import CredentialsRefused, NoAnswer, NoCredentials, NotSent, Rejected
from delivered.clients.kafka.sasl import mechanism_of, start_dialog
from delivered.clients.kafka.settings import PORT, protocol_of
from delivered.clients.kafka.tls import Tls
from delivered.model.addresses import parse_addresses
from delivered.model.errors import InvariantBroken, Unreachable
from delivered.model.limits import CONNECT_TIMEOUT_S

__all__ = ["NoAnswer", "NotSent", "Rejected", "Security", "authenticate", "connected", "security", "unreachable"]

CLIENT_ID = "delivered"
_LIFETIME = 0.85
"""Of the lifetime that a broker grants to a SASL session: then it is renewed before the next request (KIP-368)."""


class _Protocol(NamedTuple):
    tls: bool
    sasl: bool


_PROTOCOLS = {
    "PLAINTEXT": _Protocol(tls=False, sasl=False),
    "SSL": _Protocol(tls=True, sasl=False),
    "SASL_PLAINTEXT": _Protocol(tls=False, sasl=True),
    "SASL_SSL": _Protocol(tls=True, sasl=True),
}
"""Looked up, never matched by a prefix: an unknown name must not mean a connection without TLS."""


@dataclass(frozen=True)
class Security:
    """How to connect: TLS if there are its settings, SASL if there is a mechanism.

    Attributes:
        client: settings by librdkafka's names, secrets resolved.
    """

    trust: Tls | None = None
    mechanism: str | None = None
    client: Mapping[str, str] = field(default_factory=dict, repr=False)
    client_id: str = CLIENT_ID

    @property
    def tls(self) -> ssl.SSLContext | None:
        return None if self.trust is None else self.trust.context()


def security(client: Mapping[str, str]) -> Security:
    """How to connect, from librdkafka's settings. Raises UsageError: files or texts of TLS cannot be used."""
    protocol = protocol_of(client)
    if protocol not in _PROTOCOLS:
        raise InvariantBroken(
            "KAFKA_PROTOCOL",
            f"kafka.security.protocol is {protocol!r}; it must be one of {', '.join(_PROTOCOLS)}.",
            next_step='write .option("kafka.security.protocol", "SASL_SSL")',
        )
    trust = Tls(client) if _PROTOCOLS[protocol].tls else None
    mechanism = mechanism_of(client) if _PROTOCOLS[protocol].sasl else None
    return Security(trust, mechanism, client, client.get("client.id", CLIENT_ID))


def connected(host: str, port: int, security: Security, timeout_s: float) -> socket.socket:
    """A connected socket that does not block, TLS negotiated. Raises OSError, ssl.SSLError."""
    sock = socket.create_connection((host, port), max(0.1, timeout_s))
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if (context := security.tls) is not None:
            sock = context.wrap_socket(sock, server_hostname=host.rstrip("."))
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def authenticate(ask: Callable[[Any], Any], name: str, host: str, security: Security) -> float:
    """Authenticate a connection by SASL: a new one, or one whose session is to be renewed.

    Args:
        ask: sends a request of kafka-python's and returns its answer.
        name: of the broker, in errors.

    Returns:
        Seconds for which the session may be used.

    Raises:
        Rejected: the broker rejected the mechanism or the credentials.
        NoCredentials: none can be had now.
    """
    from kafka.errors import KafkaError
    from kafka.protocol.sasl import SaslAuthenticateRequest, SaslHandshakeRequest

    mechanism = str(security.mechanism)
    answer = ask(SaslHandshakeRequest(mechanism=mechanism, version=1))
    if answer.error_code:
        raise Rejected(
            f"{name}: the broker rejected the SASL mechanism {mechanism!r} (error {answer.error_code}; it "
            f"supports {', '.join(answer.mechanisms or ()) or 'none here'})",
        )
    try:
        dialog = start_dialog(mechanism, host, security.client)
        while not dialog.is_done():
            answer = ask(SaslAuthenticateRequest(auth_bytes=dialog.auth_bytes(), max_version=2))
            if answer.error_code:
                raise Rejected(f"{name}: {answer.error_message or answer.error_code}")
            dialog.receive(answer.auth_bytes)
    except (KafkaError, KeyError, ValueError) as error:
        raise Rejected(f"{name}: SASL {mechanism}: {error}") from None
    if not dialog.is_authenticated():
        raise Rejected(f"{name}: SASL {mechanism}: not authenticated")
    lifetime_ms = getattr(answer, "session_lifetime_ms", 0) or 0
    return lifetime_ms / 1000 * _LIFETIME if lifetime_ms > 0 else float("inf")


def unreachable(servers: str, error: NoAnswer) -> Unreachable:
    if isinstance(error, (NoCredentials, CredentialsRefused)):
        return Unreachable(
            "KAFKA_NO_CREDENTIALS",
            f"There are no credentials for the brokers at {servers}: {error}.",
            next_step="check kafka.sasl.oauthbearer.* or kafka.sasl.kerberos.*, and that their server answers here",
        )
    if isinstance(error, Rejected) and not error.tls:
        return Unreachable(
            "KAFKA_CREDENTIALS",
            f"The brokers at {servers} rejected the credentials: {error}.",
            next_step="check kafka.sasl.* and kafka.ssl.*",
        )
    if _listens(servers):
        return Unreachable(
            "KAFKA_CREDENTIALS",
            f"A server at {servers} closed the connection before its first answer: it expects other credentials or "
            f"another security protocol, its certificate is not trusted here, or it is not a Kafka broker ({error}).",
            next_step="check kafka.security.protocol, kafka.sasl.* and kafka.ssl.*",
        )
    return Unreachable(
        "KAFKA_UNREACHABLE",
        f"No broker at {servers} answered within {CONNECT_TIMEOUT_S:.0f} s: {error}.",
        next_step="check kafka.bootstrap.servers and kafka.security.protocol, and that the brokers are running",
    )


def _listens(servers: str) -> bool:
    for address in parse_addresses(servers, port=PORT):
        try:
            socket.create_connection(address, 1).close()
        except OSError:
            continue
        return True
    return False
