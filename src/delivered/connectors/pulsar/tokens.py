"""The token and TLS of connections to the brokers: resolved on use, checked, described in errors. Never shown."""

from __future__ import annotations

import base64
import json
import re
import socket
import ssl
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

from delivered.connectors.pulsar.options import Place
from delivered.model.errors import DeliveredError, UsageError
from delivered.model.limits import CONNECT_TIMEOUT_S
from delivered.model.options import is_reference, resolve_secret
from delivered.model.secrets import REDACTED

# The token: resolved on use, checked for its form, described in errors. Never shown.

_FORM = re.compile(r"[\x21-\x7e]+")
_SHORT = 8


def secret(options: Place) -> str | None:
    """The token; do not keep it, as it may change.

    Raises:
        UsageError: the variable or file of the reference is missing, or does not contain a token.
    """
    if options.token is None:
        return None
    found = resolve_secret("token", options.token).strip()
    if not _FORM.fullmatch(found):
        what = f"{len(found)} characters, some of which are invalid in a token" if found else "nothing"
        raise UsageError(
            "OPTION_VALUE",
            f"The option 'token' ({_reference(options)}) holds {what}.",
            next_step="write only the token there, on one line: letters, digits, '-', '_' and '.'",
        )
    return found


def supplier(options: Place) -> Callable[[], str]:
    """For a long-lived client: the next connection uses a replaced token.

    It is called in the client's threads, which must not raise: an unreadable token is empty, so it is rejected.
    """

    def supply() -> str:
        try:
            return secret(options) or ""
        except UsageError:
            return ""

    return supply


def hidden(options: Place, detail: str) -> str:
    """A message without the token."""
    try:
        token = secret(options)
    except UsageError:
        return detail
    # A short one is a mistake, and its letters occur elsewhere in the text.
    return detail if token is None or len(token) < _SHORT else detail.replace(token, REDACTED)


def not_permitted(options: Place, what: str) -> UsageError:
    """
    Args:
        what: what was rejected, and by whom; a sentence without its full stop.
    """
    description, step = _described(options)
    return UsageError("NOT_PERMITTED", f"{hidden(options, what)}. {description}.", next_step=step)


def _described(options: Place) -> tuple[str, str]:
    """The token's own claims (unverified), and the next step."""
    if options.token is None:
        return "No token was given", "set the option token to env:NAME or file:PATH"
    try:
        token = secret(options)
    except UsageError as error:
        return error.message.rstrip("."), "store the token there again"
    claims = _claims(token or "")
    name = f"The token ({_reference(options)})"
    if claims is None:
        return f"{name} is not a JSON Web Token", "store a Pulsar token there: pulsar tokens create --subject ROLE"
    role = claims.get("sub")
    known = f"{name} has the role {role!r}" if role is not None else f"{name} names no role"
    expires = claims.get("exp")
    if isinstance(expires, int | float) and 0 < expires <= time.time():
        at = datetime.fromtimestamp(expires, UTC)
        return f"{known}, and expired at {at:%Y-%m-%d %H:%M:%S} UTC", "store a new token there, and start again"
    return known, (
        "check that it was signed with the brokers' key, and its role's permissions: pulsar-admin namespaces "
        f"permissions TENANT/NAMESPACE; reading needs consume, writing produce (grant-permission --role "
        f"{role or 'ROLE'} --actions ...)"
    )


def _claims(token: str) -> dict[str, Any] | None:
    parts = token.split(".")
    if len(parts) != 3:
        return None
    try:
        found = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _reference(options: Place) -> str:
    token = options.token or ""
    return token if is_reference(token) else "given literally, not as env:NAME or file:PATH"


# TLS to the brokers: trusted certificates, and why a handshake failed.

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
