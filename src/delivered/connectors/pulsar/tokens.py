"""The token: followed where it is used, checked for its form, and what may be told of it. Never shown itself."""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from delivered.connectors.pulsar.options import Place
from delivered.model.errors import UsageError
from delivered.model.options import REDACTED, resolve_secret

_FORM = re.compile(r"[\x21-\x7e]+")
_SHORT = 8


def secret(options: Place) -> str | None:
    """The token; use at once, do not keep: it may be another the next time.

    Raises:
        UsageError: the variable or file of the reference is missing, or does not contain a token.
    """
    if options.token is None:
        return None
    found = resolve_secret("token", options.token).strip()
    if not _FORM.fullmatch(found):
        what = f"{len(found)} characters, some of which no token has" if found else "nothing"
        raise UsageError(
            "OPTION_VALUE",
            f"The option 'token' ({_reference(options)}) holds {what}.",
            next_step="write only the token there, on one line: letters, digits, '-', '_' and '.'",
        )
    return found


def supplier(options: Place) -> Callable[[], str]:
    """For a client that lives long: a token that was replaced where it is kept is taken for the next connection.

    It is called in the client's threads, where nothing may be raised: what cannot be read is a token that is refused.
    """

    def supply() -> str:
        try:
            return secret(options) or ""
        except UsageError:
            return ""

    return supply


def hidden(options: Place, said: str) -> str:
    """A message without the token."""
    try:
        token = secret(options)
    except UsageError:
        return said
    # A short one is a mistake, and every letter of it is elsewhere in the text too.
    return said if token is None or len(token) < _SHORT else said.replace(token, REDACTED)


def not_permitted(options: Place, what: str) -> UsageError:
    """
    Args:
        what: was refused, by whom and how; a sentence without its full stop.
    """
    told, step = _told(options)
    return UsageError("NOT_PERMITTED", f"{hidden(options, what)}. {told}.", next_step=step)


def _told(options: Place) -> tuple[str, str]:
    """What the token's own claims say (unverified), and the next step."""
    if options.token is None:
        return "No token was given", "set the option token to env:NAME or file:PATH"
    try:
        token = secret(options)
    except UsageError as error:
        return error.message.rstrip("."), "put the token there again"
    claims = _claims(token or "")
    name = f"The token ({_reference(options)})"
    if claims is None:
        return f"{name} is no JSON Web Token", "put a token of Pulsar's there: pulsar tokens create --subject ROLE"
    role = claims.get("sub")
    known = f"{name} is of the role {role!r}" if role is not None else f"{name} names no role"
    expires = claims.get("exp")
    if isinstance(expires, int | float) and 0 < expires <= time.time():
        at = datetime.fromtimestamp(expires, UTC)
        return f"{known}, and expired at {at:%Y-%m-%d %H:%M:%S} UTC", "put a new token there, and start again"
    return known, (
        "check that it was signed with the brokers' key, and what its role may do: pulsar-admin namespaces "
        f"permissions TENANT/NAMESPACE; to read takes consume, to write produce (grant-permission --role "
        f"{role or 'ROLE'} --actions ...)"
    )


def _claims(token: str) -> dict[str, Any] | None:
    parts = token.split(".")
    if len(parts) != 3:
        return None
    try:
        found = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _reference(options: Place) -> str:
    token = options.token or ""
    return token if token.startswith(("env:", "file:")) else "given itself, not as env:NAME or file:PATH"
