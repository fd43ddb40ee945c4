"""Tokens for SASL OAUTHBEARER: from an OpenID Connect server by client credentials, or from the user's function."""

from __future__ import annotations

import base64
import http.client
import importlib
import json
import math
import re
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from delivered.clients.kafka.outcomes import CredentialsRefused, NoCredentials
from delivered.model.answers import JsonAnswer, TimedAnswer, UnexpectedAnswer
from delivered.model.errors import UsageError
from delivered.model.limits import CONNECT_TIMEOUT_S

PREFIX = "sasl.oauthbearer."
PROVIDER, ENDPOINT = f"{PREFIX}token.provider", f"{PREFIX}token.endpoint.url"
_USED = 0.8
"""Of a token's lifetime: after that, the next connection fetches a new one."""
_ANSWER_BYTES_MAX = 1 << 20
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")
_EXTENSION_NAME = re.compile(r"[A-Za-z]+")
_EXTENSION_VALUE = re.compile(r"[\x21-\x7e \t\r\n]+")

_known: dict[tuple[tuple[str, str], ...], Token] = {}
"""One token for all connections of a process with the same settings."""


@dataclass(frozen=True)
class Token:
    """
    Attributes:
        fresh_until_s: by time.monotonic(): until then it is used again.
    """

    text: str = field(repr=False)
    fresh_until_s: float
    extensions: Mapping[str, str] = field(default_factory=dict)

    @property
    def left_s(self) -> float:
        """Seconds for which it is still valid, at least."""
        return max(1.0, (self.fresh_until_s - time.monotonic()) / _USED)


def token_for(client: Mapping[str, str]) -> Token:
    """The token for a new connection, or for a session to be renewed.

    Args:
        client: settings by librdkafka's names, secrets resolved.

    Raises:
        NoCredentials: none can be had now. CredentialsRefused: nor later, with these settings.
        UsageError: the function cannot be loaded here, or returned something else.
    """
    key = tuple(sorted((k, v) for k, v in client.items() if k.startswith((PREFIX, "https.ca."))))
    known = _known.get(key)
    if known is None or time.monotonic() >= known.fresh_until_s:
        started_s = time.monotonic()
        text, lifetime_s, extensions = _from_function(client) if PROVIDER in client else _from_server(client)
        if not _TOKEN.fullmatch(text):
            raise CredentialsRefused("the token has characters that no bearer token has")
        known = _known[key] = Token(text, started_s + max(0.0, lifetime_s) * _USED, extensions)
    return known


def load_function(text: str) -> Any:
    """A function by its dotted path: shop.tokens.kafka_token, or shop.tokens:kafka_token. Raises UsageError."""
    module, _, name = text.replace(":", ".").rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        why = str(error) or "no module is named"
    else:
        if callable(found):
            return found
        why = "it is no function"
    raise UsageError(
        "KAFKA_TOKEN",
        f"Option 'kafka.{PROVIDER}' is {text!r}, which cannot be used here: {why}.",
        next_step="write package.module:function, importable on the driver and on every executor",
    )


def _from_function(client: Mapping[str, str]) -> tuple[str, float, Mapping[str, str]]:
    function = load_function(client[PROVIDER])
    try:
        made = function(client.get(f"{PREFIX}config", ""))
    except Exception as error:  # the user's code: it may ask a server that is away
        raise NoCredentials(f"{client[PROVIDER]} raised {type(error).__name__}: {error}") from error
    # As confluent-kafka's oauth_cb returns it: token, expiry, principal, extensions.
    parts = (made,) if isinstance(made, str) else made
    if not isinstance(parts, tuple) or not 1 <= len(parts) <= 4 or not isinstance(parts[0], str):
        raise UsageError(
            "KAFKA_TOKEN",
            f"{client[PROVIDER]} returned {type(made).__name__}; it must return a token, or a token and when it "
            "expires, in seconds since 1970.",
            next_step="return (token, expires_s)",
        )
    expires_s = parts[1] if len(parts) > 1 else _expiry(parts[0])
    extensions = check_extensions(parts[3]) if len(parts) > 3 and parts[3] else _extensions(client)
    lifetime_s = 0.0 if expires_s is None else float(expires_s) - time.time()
    if expires_s is not None and lifetime_s <= 0:
        raise NoCredentials(f"{client[PROVIDER]} returned a token that expired {-lifetime_s:.0f} s ago")
    return parts[0], lifetime_s, extensions


def _timed(kind: Any) -> Any:
    def connection(*args: Any, **more: Any) -> Any:
        made = kind(*args, **more)
        made.response_class = TimedAnswer
        return made

    return connection


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, trusted: ssl.SSLContext) -> None:
        super().__init__(context=trusted)
        self._trusted = trusted

    def https_open(self, request: Any) -> Any:
        return self.do_open(_timed(http.client.HTTPSConnection), request, context=self._trusted)


class _Http(urllib.request.HTTPHandler):
    def http_open(self, request: Any) -> Any:
        return self.do_open(_timed(http.client.HTTPConnection), request)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The client's secret goes to the server that the user named, and to no other."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _from_server(client: Mapping[str, str]) -> tuple[str, float, Mapping[str, str]]:
    """By the grant client_credentials (RFC 6749, 4.4)."""
    url = client[ENDPOINT]
    form = {"grant_type": "client_credentials"}
    if scope := client.get(f"{PREFIX}scope"):
        form["scope"] = scope
    login = f"{client[f'{PREFIX}client.id']}:{client[f'{PREFIX}client.secret']}"
    headers = {
        "Authorization": f"Basic {base64.b64encode(login.encode()).decode()}",
        "Content-Type": "application/x-www-form-urlencoded",
        "Accept": "application/json",
    }
    request = urllib.request.Request(url, urllib.parse.urlencode(form).encode(), headers)  # noqa: S310 - checked
    try:
        trusted = ssl.create_default_context(
            cafile=client.get("https.ca.location"), cadata=client.get("https.ca.pem") or None
        )
        opener = urllib.request.build_opener(_Https(trusted), _Http, _NoRedirect)
        with opener.open(request, timeout=CONNECT_TIMEOUT_S) as answer:
            found = JsonAnswer.read(answer.read(_ANSWER_BYTES_MAX))
        text = found.take("access_token", str)
        lifetime_s = found.seconds("expires_in")
    except urllib.error.HTTPError as error:
        body = b""
        with error, suppress(OSError, http.client.HTTPException):
            body = error.read(_ANSWER_BYTES_MAX)
        why = f"the token server {url} answered {error.code}: {_reason(body)}"
        # Too many requests, and errors of the server, pass.
        raise (NoCredentials if error.code >= 500 or error.code in (408, 429) else CredentialsRefused)(why) from None
    except UnexpectedAnswer as why:
        # How the answer starts is not shown: it may be a token.
        raise CredentialsRefused(
            f"the token server {url} answered without an access_token in JSON, or with an expires_in that is no number"
        ) from why
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        kind = CredentialsRefused if isinstance(reason, ssl.SSLCertVerificationError) else NoCredentials
        raise kind(f"no answer from the token server {url}: {reason}") from None
    if lifetime_s is None:
        expires_s = _expiry(text)
        lifetime_s = 0.0 if expires_s is None else expires_s - time.time()
    return text, lifetime_s, _extensions(client)


def _reason(body: bytes) -> str:
    try:
        found = JsonAnswer.read(body)
        said = [found.take(k, str, "") for k in ("error", "error_description")]
    except UnexpectedAnswer:
        said = []
    return "; ".join(filter(None, said))[:300] or "no reason"


def _expiry(token: str) -> float | None:
    """When a JSON Web Token expires, in seconds since 1970; None: it does not say."""
    parts = token.split(".")
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
        expires_s = float(claims["exp"])
    except (IndexError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return expires_s if math.isfinite(expires_s) else None


def _extensions(client: Mapping[str, str]) -> Mapping[str, str]:
    return check_extensions(split_extensions(client.get(f"{PREFIX}extensions", "")))


def split_extensions(text: str) -> dict[str, str]:
    """name=value,name=value"""
    pairs = (part.partition("=") for part in text.split(",") if part.strip())
    return {name.strip(): value.strip() for name, _, value in pairs}


def check_extensions(given: Mapping[str, str]) -> Mapping[str, str]:
    """Raises UsageError: a name or value that RFC 7628 does not allow."""
    for name, value in given.items():
        if not _EXTENSION_NAME.fullmatch(name) or name.lower() == "auth" or not _EXTENSION_VALUE.fullmatch(value):
            raise UsageError(
                "OPTION_VALUE",
                f"Option 'kafka.{PREFIX}extensions' has {name!r}; it must be name=value,name=value, with "
                "names of letters.",
                next_step='write .option("kafka.sasl.oauthbearer.extensions", "logicalCluster=lkc-1")',
            )
    return given


class BearerDialog:
    """One authentication by a token (RFC 7628); see `delivered.clients.kafka.sasl.Dialog`."""

    def __init__(self, token: Token) -> None:
        self._token = token
        self._answered = self._refused = False

    def auth_bytes(self) -> bytes:
        if self._refused:
            return b"\x01"  # then the server closes the dialog with its error
        extensions = "".join(f"\x01{name}={value}" for name, value in self._token.extensions.items())
        return f"n,,\x01auth=Bearer {self._token.text}{extensions}\x01\x01".encode()

    def receive(self, answer: bytes) -> None:
        self._answered, self._refused = not answer, bool(answer)

    def is_done(self) -> bool:
        return self._answered

    def is_authenticated(self) -> bool:
        return self._answered
