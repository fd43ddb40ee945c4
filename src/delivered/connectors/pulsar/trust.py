"""TLS to the brokers: trusted certificates, and why a handshake failed."""

from __future__ import annotations

import socket
import ssl
from urllib.parse import urlsplit

from delivered.connectors.pulsar.options import Place
from delivered.model.errors import DeliveredError, UsageError
from delivered.model.limits import CONNECT_TIMEOUT_S

_PORT = 6651


def trusted_file(options: Place) -> str | None:
    """For the client library, which takes one file; None: it uses certifi's."""
    return options.trusted or ssl.get_default_verify_paths().cafile


def untrusted(options: Place, where: str, error: ssl.SSLCertVerificationError) -> UsageError:
    """The error for a rejected certificate at `where`, a URL."""
    return options.untrusted(where, error, "url and adminUrl")


def tls_error(options: Place) -> DeliveredError | None:
    """The certificate error at `url`, which the client library does not report; None: no error, or no answer."""
    parts = urlsplit(options.url)
    if parts.scheme != "pulsar+ssl":
        return None
    try:
        checks = options.tls_context()
    except UsageError as error:
        return error
    for address in parts.netloc.split(","):
        host, port = _split(address)
        try:
            with (
                socket.create_connection((host, port), CONNECT_TIMEOUT_S) as peer,
                checks.wrap_socket(peer, server_hostname=host),
            ):
                pass
        except ssl.SSLCertVerificationError as error:
            return untrusted(options, f"pulsar+ssl://{address}", error)
        except OSError:
            continue
    return None


def _split(address: str) -> tuple[str, int]:
    parts = urlsplit(f"//{address}")
    return parts.hostname or "", parts.port or _PORT
