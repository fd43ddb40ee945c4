"""How a connection to a Kafka broker begins: TCP, TLS, SASL, from librdkafka's settings.

kafka-python speaks the SASL mechanisms.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from delivered.clients.kafka.settings import protocol_of
from delivered.model.addresses import parse_addresses
from delivered.model.errors import InvariantBroken, Unreachable, UsageError
from delivered.model.limits import CONNECT_TIMEOUT_S

CLIENT_ID = "delivered"
_LIFETIME = 0.85
"""Of the lifetime that a broker grants to a SASL session: after that, requests go over a new connection."""
_SASL = {
    "sasl.mechanism": "sasl_mechanism",
    "sasl.mechanisms": "sasl_mechanism",
    "sasl.username": "sasl_plain_username",
    "sasl.password": "sasl_plain_password",
    "sasl.kerberos.service.name": "sasl_kerberos_service_name",
}
_SASL_DEFAULTS = {
    "sasl_kerberos_name": None,
    "sasl_kerberos_service_name": "kafka",
    "sasl_kerberos_domain_name": None,
    "sasl_oauth_token_provider": None,
}


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


class NoAnswer(Exception):
    """No response to a request; it is unknown whether it took effect."""


class NotSent(NoAnswer):
    """The request was not sent in full, so it had no effect."""


class Rejected(NotSent):
    """TLS or authentication failed, which no retry fixes.

    Attributes:
        tls: the certificate or the protocol of the server, not the credentials.
    """

    def __init__(self, text: str, tls: bool) -> None:
        super().__init__(text)
        self.tls = tls


@dataclass(frozen=True)
class Security:
    """How to connect: TLS if there is a context, SASL if there is a mechanism.

    Attributes:
        sasl: settings of kafka-python's mechanisms; they hold secrets.
    """

    tls: ssl.SSLContext | None = None
    mechanism: str | None = None
    sasl: Mapping[str, Any] = field(default_factory=dict, repr=False)
    client_id: str = CLIENT_ID


def security(client: Mapping[str, str]) -> Security:
    """How to connect, from librdkafka's settings; those without a counterpart are left out."""
    protocol = protocol_of(client)
    if protocol not in _PROTOCOLS:
        raise InvariantBroken(
            "KAFKA_PROTOCOL",
            f"kafka.security.protocol is {protocol!r}; it must be one of {', '.join(_PROTOCOLS)}.",
            next_step='write .option("kafka.security.protocol", "SASL_SSL")',
        )
    tls = _tls(client) if _PROTOCOLS[protocol].tls else None
    sasl: dict[str, Any] = {"security_protocol": protocol, **_SASL_DEFAULTS}
    for theirs, ours in _SASL.items():
        if theirs in client:
            sasl[ours] = client[theirs]
    mechanism = sasl.get("sasl_mechanism", "GSSAPI") if _PROTOCOLS[protocol].sasl else None
    return Security(tls, mechanism, sasl, client.get("client.id", CLIENT_ID))


def _tls(client: Mapping[str, str]) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(
            cafile=client.get("ssl.ca.location"), cadata=client.get("ssl.ca.pem") or None
        )
        if client.get("ssl.endpoint.identification.algorithm", "https") == "none":
            context.check_hostname = False
        if client.get("enable.ssl.certificate.verification", "true") == "false":
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if "ssl.certificate.location" in client:
            context.load_cert_chain(
                client["ssl.certificate.location"], client.get("ssl.key.location"), client.get("ssl.key.password")
            )
    except (OSError, ssl.SSLError) as error:
        raise UsageError(
            "TLS_FILES",
            f"The TLS files of kafka.ssl.* cannot be used: {error}.",
            next_step="check the paths, the file formats and the password of the key",
        ) from None
    return context


def connected(host: str, port: int, security: Security, timeout_s: float) -> socket.socket:
    """A connected socket that does not block, TLS negotiated. Raises OSError, ssl.SSLError."""
    sock = socket.create_connection((host, port), max(0.1, timeout_s))
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if security.tls is not None:
            sock = security.tls.wrap_socket(sock, server_hostname=host.rstrip("."))
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def authenticate(ask: Callable[[Any], Any], name: str, host: str, security: Security) -> float:
    """Authenticate a new connection by SASL.

    Args:
        ask: sends a request of kafka-python's and returns its answer.
        name: of the broker, in errors.

    Returns:
        Seconds for which the session may be used.

    Raises:
        Rejected: the broker rejected the mechanism or the credentials.
    """
    from kafka.errors import KafkaError
    from kafka.net.sasl import get_sasl_mechanism
    from kafka.protocol.sasl import SaslAuthenticateRequest, SaslHandshakeRequest

    mechanism = security.mechanism
    answer = ask(SaslHandshakeRequest(mechanism=mechanism, version=1))
    if answer.error_code:
        raise Rejected(
            f"{name}: the broker rejected the SASL mechanism {mechanism!r} (error {answer.error_code}; it "
            f"supports {', '.join(answer.mechanisms or ()) or 'none here'})",
            tls=False,
        )
    try:
        dialog = get_sasl_mechanism(mechanism)(host=host, **security.sasl)
        while not dialog.is_done():
            answer = ask(SaslAuthenticateRequest(auth_bytes=dialog.auth_bytes(), max_version=2))
            if answer.error_code:
                raise Rejected(f"{name}: {answer.error_message or answer.error_code}", tls=False)
            dialog.receive(answer.auth_bytes)
    except (KafkaError, KeyError, ValueError) as error:
        raise Rejected(f"{name}: SASL {mechanism}: {error}", tls=False) from None
    if not dialog.is_authenticated():
        raise Rejected(f"{name}: SASL {mechanism}: not authenticated", tls=False)
    lifetime_ms = getattr(answer, "session_lifetime_ms", 0) or 0
    return lifetime_ms / 1000 * _LIFETIME if lifetime_ms > 0 else float("inf")


def unreachable(servers: str, error: NoAnswer) -> Unreachable:
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
        f"No broker at {servers} answered within {CONNECT_TIMEOUT_S:.0f} s.",
        next_step="check kafka.bootstrap.servers and kafka.security.protocol, and that the brokers are running",
    )


def _listens(servers: str) -> bool:
    for address in parse_addresses(servers):
        try:
            socket.create_connection(address, 1).close()
        except OSError:
            continue
        return True
    return False
