"""SASL dialogs with a broker, by mechanism."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from delivered.clients.kafka.outcomes import Rejected

MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER", "GSSAPI")


class Dialog(Protocol):
    """As kafka-python's mechanisms."""

    def auth_bytes(self) -> bytes:
        """What to send next."""

    def receive(self, auth_bytes: bytes) -> object:
        """What the broker answered. Raises ValueError, KeyError: something else than it must."""

    def is_done(self) -> bool:
        """Whether there is nothing more to send."""

    def is_authenticated(self) -> bool:
        """Once done: whether broker and client accepted each other."""


def mechanism_of(client: Mapping[str, str], default: str = "GSSAPI") -> str:
    """The mechanism of a client's settings; Kafka's default is GSSAPI."""
    return client.get("sasl.mechanism", client.get("sasl.mechanisms", default)).upper()


def start_dialog(mechanism: str, host: str, client: Mapping[str, str]) -> Dialog:
    """A dialog for one authentication with the broker at `host`.

    Args:
        client: settings by librdkafka's names, secrets resolved.

    Raises:
        CredentialsRefused, NoCredentials: a ticket or token cannot be had.
        Rejected: a setting is missing.
        UsageError: a library or file is not here.
    """
    if mechanism == "OAUTHBEARER":
        from delivered.clients.kafka.tokens import BearerDialog, token_for

        return BearerDialog(token_for(client))
    if mechanism == "GSSAPI":
        from delivered.clients.kafka.gssapi import KerberosDialog

        service = client.get("sasl.kerberos.service.name", "kafka")
        return KerberosDialog(service, host, client.get("sasl.kerberos.principal"), client.get("sasl.kerberos.keytab"))
    from kafka.net.sasl import get_sasl_mechanism

    if missing := [name for name in ("sasl.username", "sasl.password") if name not in client]:
        raise Rejected(f"it needs kafka.{missing[0]}")
    user = client["sasl.username"]
    if mechanism.startswith("SCRAM"):
        user = user.replace("=", "=3D").replace(",", "=2C")  # RFC 5802; kafka-python does not
    made: Dialog = get_sasl_mechanism(mechanism)(
        sasl_mechanism=mechanism, sasl_plain_username=user, sasl_plain_password=client["sasl.password"]
    )
    return made
