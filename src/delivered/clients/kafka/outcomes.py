"""What a request to a broker may come to, besides its answer."""

from __future__ import annotations


class NoAnswer(Exception):
    """No response to a request; it is unknown whether it took effect."""


class NotSent(NoAnswer):
    """The request was not sent in full, so it had no effect."""


class NoCredentials(NotSent):
    """No token or ticket can be had now: its server does not answer."""


class Rejected(NotSent):
    """TLS or authentication failed, which no retry fixes.

    Attributes:
        tls: the certificate or the protocol of the server, not the credentials.
    """

    def __init__(self, text: str, tls: bool = False) -> None:
        super().__init__(text)
        self.tls = tls


class CredentialsRefused(Rejected):
    """No token or ticket can be had with these settings."""
