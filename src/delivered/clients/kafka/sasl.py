"""Logins at a broker: SASL dialogs by mechanism (GSSAPI by MIT's library, OAUTHBEARER with its tokens), and TLS."""

from __future__ import annotations

import base64
import ctypes
import functools
import http.client
import json
import logging
import math
import os
import re
import ssl
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint32, c_void_p
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from delivered.clients.kafka import (
    ENDPOINT,
    OAUTHBEARER,
    PROVIDER,
    VERSIONS,
    CredentialsRefused,
    NoCredentials,
    Rejected,
    check_extensions,
    load_function,
    split_extensions,
)
from delivered.model.answers import JsonAnswer, TimedAnswer, UnexpectedAnswer
from delivered.model.errors import UsageError, extra
from delivered.model.limits import CONNECT_TIMEOUT_S

# Tokens for SASL OAUTHBEARER: from an OpenID Connect server by client credentials, or from the user's function.

_USED = 0.8
"""Of a token's lifetime: after that, the next connection fetches a new one."""
_ANSWER_BYTES_MAX = 1 << 20
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")

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
    key = tuple(sorted((k, v) for k, v in client.items() if k.startswith((OAUTHBEARER, "https.ca."))))
    known = _known.get(key)
    if known is None or time.monotonic() >= known.fresh_until_s:
        started_s = time.monotonic()
        text, lifetime_s, extensions = _from_function(client) if PROVIDER in client else _from_server(client)
        if not _TOKEN.fullmatch(text):
            raise CredentialsRefused("the token has characters that no bearer token has")
        known = _known[key] = Token(text, started_s + max(0.0, lifetime_s) * _USED, extensions)
    return known


def _from_function(client: Mapping[str, str]) -> tuple[str, float, Mapping[str, str]]:
    function = load_function(client[PROVIDER])
    try:
        made = function(client.get(f"{OAUTHBEARER}config", ""))
    except Exception as error:  # the user's code: it may ask a server that is away
        raise NoCredentials(f"{client[PROVIDER]} raised {type(error).__name__}: {error}") from error
    # As confluent-kafka's oauth_cb returns it: token, expiry, principal, extensions.
    parts = (made,) if isinstance(made, str) else made
    if not isinstance(parts, tuple) or not 1 <= len(parts) <= 4 or not isinstance(parts[0], str):
        raise UsageError("KAFKA_TOKEN.RESULT", function=client[PROVIDER], result_type=type(made).__name__)
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
    if scope := client.get(f"{OAUTHBEARER}scope"):
        form["scope"] = scope
    login = f"{client[f'{OAUTHBEARER}client.id']}:{client[f'{OAUTHBEARER}client.secret']}"
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
    return check_extensions(split_extensions(client.get(f"{OAUTHBEARER}extensions", "")))


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


# SASL GSSAPI (Kerberos, RFC 4752) by MIT's library, called through its C interface (RFC 2744).
#
# The package `gssapi` would need a compiler and Kerberos' headers wherever it is installed; the library itself is part
# of every Linux that has Kerberos.

LIBRARY = "libgssapi_krb5.so.2"
_CALL_OR_ROUTINE = 0xFFFF0000
_CONTINUE_NEEDED = 1
_INITIATE = 1
_MUTUAL, _INTEGRITY = 2, 32
_AUTH_ONLY = 1
_AWAY = frozenset(code & 0xFFFFFFFF for code in (-1765328228, -1765328164))
"""No key distribution centre answers (KRB5_KDC_UNREACH), or its name cannot be looked up (KRB5_REALM_CANT_RESOLVE)."""
_KERBEROS = bytes.fromhex("2a864886f712010202")
_HOST_BASED = bytes.fromhex("2a864886f71201020104")
_USER_NAME = bytes.fromhex("2a864886f71201020101")


class _Buffer(ctypes.Structure):
    _fields_ = (("length", c_size_t), ("value", c_void_p))


class _Oid(ctypes.Structure):
    _fields_ = (("length", c_uint32), ("elements", c_char_p))


class _Pair(ctypes.Structure):
    _fields_ = (("key", c_char_p), ("value", c_char_p))


class _Pairs(ctypes.Structure):
    _fields_ = (("count", c_uint32), ("elements", POINTER(_Pair)))


_minor = POINTER(c_uint32)
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "gss_import_name": (_minor, POINTER(_Buffer), POINTER(_Oid), POINTER(c_void_p)),
    "gss_acquire_cred_from": (
        *(_minor, c_void_p, c_uint32, c_void_p, c_int, POINTER(_Pairs)),
        *(POINTER(c_void_p), c_void_p, c_void_p),
    ),
    "gss_init_sec_context": (
        *(_minor, c_void_p, POINTER(c_void_p), c_void_p, POINTER(_Oid), c_uint32, c_uint32, c_void_p),
        *(POINTER(_Buffer), c_void_p, POINTER(_Buffer), c_void_p, c_void_p),
    ),
    "gss_wrap": (_minor, c_void_p, c_int, c_int, POINTER(_Buffer), c_void_p, POINTER(_Buffer)),
    "gss_unwrap": (_minor, c_void_p, POINTER(_Buffer), POINTER(_Buffer), c_void_p, c_void_p),
    "gss_display_status": (_minor, c_uint32, c_int, POINTER(_Oid), POINTER(c_uint32), POINTER(_Buffer)),
    "gss_release_buffer": (_minor, POINTER(_Buffer)),
    "gss_release_name": (_minor, POINTER(c_void_p)),
    "gss_release_cred": (_minor, POINTER(c_void_p)),
    "gss_delete_sec_context": (_minor, POINTER(c_void_p), c_void_p),
}


@functools.cache
def library() -> Any:
    """MIT's library. Raises UsageError: it is not installed here."""
    try:
        found = ctypes.CDLL(LIBRARY)
        for name, arguments in _ARGUMENTS.items():
            function = getattr(found, name)
            function.argtypes, function.restype = arguments, c_uint32
    except (OSError, AttributeError) as error:
        raise UsageError("KERBEROS_MISSING", error=error) from None
    return found


def _buffer(data: bytes) -> _Buffer:
    memory = ctypes.create_string_buffer(data, len(data) + 1)
    found = _Buffer(len(data), ctypes.addressof(memory))
    found.memory = memory  # as long as this lives
    return found


def _oid(data: bytes) -> _Oid:
    return _Oid(len(data), data)


def _texts(code: int, kind: int) -> list[str]:
    found: list[str] = []
    context = c_uint32(0)
    while True:
        minor, text = c_uint32(), _Buffer()
        if library().gss_display_status(byref(minor), code, kind, byref(_oid(_KERBEROS)), byref(context), byref(text)):
            return found
        found.append(_released(text).decode(errors="replace"))
        if not context.value:
            return found


def _released(buffer: _Buffer) -> bytes:
    """The bytes of a buffer of the library's, which is released."""
    data = ctypes.string_at(buffer.value, buffer.length) if buffer.value else b""
    library().gss_release_buffer(byref(c_uint32()), byref(buffer))
    return data


def _call(name: str, *arguments: Any) -> int:
    """Call the library. Raises CredentialsRefused or NoCredentials, with its texts."""
    minor = c_uint32()
    major = getattr(library(), name)(byref(minor), *arguments)
    if major & _CALL_OR_ROUTINE:
        texts = [*_texts(major, 1), *(_texts(minor.value, 2) if minor.value else ())]
        away = minor.value in _AWAY
        raise (NoCredentials if away else CredentialsRefused)(f"Kerberos: {'; '.join(dict.fromkeys(texts))}")
    return int(major)


def _name(text: str, kind: bytes) -> c_void_p:
    found = c_void_p()
    _call("gss_import_name", byref(_buffer(text.encode())), byref(_oid(kind)), byref(found))
    return found


class KerberosDialog:
    """One authentication; see `delivered.clients.kafka.sasl.Dialog`. The library renews tickets from a keytab.

    Args:
        service, host: of the broker: its principal is service/host@REALM.
        principal, keytab: None: the principal of the ticket in the default credentials cache (`kinit`).

    Raises:
        UsageError: the library or the keytab is not here.
        CredentialsRefused: no ticket can be had. NoCredentials: not now.
    """

    def __init__(self, service: str, host: str, principal: str | None, keytab: str | None) -> None:
        self._context, self._credentials, self._target = c_void_p(), c_void_p(), c_void_p()
        self._established = self._finished = self._sent = False
        self._library = library()
        self._target = _name(f"{service}@{host}", _HOST_BASED)
        if keytab is not None:
            self._acquire(principal, keytab)
        self._next = self._step(None)

    def _acquire(self, principal: str | None, keytab: str) -> None:
        if not os.access(keytab, os.R_OK):
            raise UsageError("KERBEROS_KEYTAB", keytab=keytab)
        # A cache of its own for each keytab and principal: another login of this process must not be used.
        cache = f"MEMORY:delivered-{os.getpid()}-{principal}-{keytab}"
        pairs = (_Pair * 2)(_Pair(b"client_keytab", keytab.encode()), _Pair(b"ccache", cache.encode()))
        name = _name(principal, _USER_NAME) if principal is not None else c_void_p()
        try:
            with _acquiring:
                _call(
                    "gss_acquire_cred_from", name, 0, None, _INITIATE, byref(_Pairs(2, pairs)),
                    byref(self._credentials), None, None,
                )  # fmt: skip
        finally:
            if name:
                library().gss_release_name(byref(c_uint32()), byref(name))

    def _step(self, answer: bytes | None) -> bytes:
        output = _Buffer()
        given = None if answer is None else byref(_buffer(answer))
        major = _call(
            "gss_init_sec_context", self._credentials, byref(self._context), self._target, byref(_oid(_KERBEROS)),
            _MUTUAL | _INTEGRITY, 0, None, given, None, byref(output), None, None,
        )  # fmt: skip
        self._established = not major & _CONTINUE_NEEDED
        return _released(output)

    def auth_bytes(self) -> bytes:
        self._sent = self._finished
        return self._next

    def receive(self, answer: bytes) -> None:
        if self._sent:
            return
        if not self._established:
            self._next = self._step(answer)
            return
        offered = self._converted("gss_unwrap", byref(_buffer(answer)))
        if len(offered) != 4 or not offered[0] & _AUTH_ONLY:
            raise Rejected("the broker requires a security layer of Kerberos, which Kafka does not use")
        # No security layer, hence no message of one; authorized as the ticket's principal.
        self._next = self._wrapped(bytes([_AUTH_ONLY, 0, 0, 0]))
        self._finished = True

    def _converted(self, name: str, given: Any) -> bytes:
        output = _Buffer()
        _call(name, self._context, given, byref(output), None, None)
        return _released(output)

    def _wrapped(self, data: bytes) -> bytes:
        output = _Buffer()
        _call("gss_wrap", self._context, 0, 0, byref(_buffer(data)), None, byref(output))
        return _released(output)

    def is_done(self) -> bool:
        return self._sent

    def is_authenticated(self) -> bool:
        return self._sent

    def __del__(self) -> None:
        if getattr(self, "_library", None) is None:
            return
        for release, handle, more in (
            ("gss_delete_sec_context", self._context, (None,)),
            ("gss_release_cred", self._credentials, ()),
            ("gss_release_name", self._target, ()),
        ):
            if handle:
                getattr(self._library, release)(byref(c_uint32()), byref(handle), *more)


_acquiring = threading.Lock()
"""Several connections may be opened at the same time: one fills the cache, the others use it."""


# SASL dialogs with a broker, by mechanism.


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
        return BearerDialog(token_for(client))
    if mechanism == "GSSAPI":
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


# TLS with certificates from files and stores, as librdkafka reads them.

log = logging.getLogger("delivered.kafka")

FILES = ("ssl.ca.location", "ssl.certificate.location", "ssl.key.location", "ssl.crl.location")
STORES = ("ssl.keystore.location", "ssl.truststore.location")
"""PKCS12. Stores in PEM's format have other names by now."""
_BLOCK = re.compile(r"-----BEGIN ([A-Z0-9 ]+)-----(.*?)-----END \1-----", re.DOTALL)
_CRL = "X509 CRL"


class Tls:
    """Contexts of one client. Files are read again after they changed: certificates are renewed, and revocation lists
    replaced, while a query runs.

    Args:
        client: settings by librdkafka's names, secrets resolved.

    Raises:
        UsageError: a file or text cannot be used.
    """

    def __init__(self, client: Mapping[str, str]) -> None:
        self._client = dict(client)
        self._seen = self._stamps()
        self._context = build_context(self._client)

    def context(self) -> ssl.SSLContext:
        """For a new connection. Files that cannot be used may be half written: the former ones stay in use."""
        try:
            now = self._stamps()
            if now != self._seen:
                self._context, self._seen = build_context(self._client), now
        except UsageError as error:
            log.warning("%s The former ones stay in use.", error.message)
        return self._context

    def _stamps(self) -> list[tuple[int, int, int]]:
        found = []
        for name in (*FILES, *STORES):
            if name in self._client:
                try:
                    stat = Path(self._client[name]).stat()
                except OSError as error:
                    raise unusable(f"{self._client[name]!r}: {(error.strerror or str(error)).lower()}") from None
                found.append((stat.st_ino, stat.st_mtime_ns, stat.st_size))
        return found


def build_context(client: Mapping[str, str]) -> ssl.SSLContext:
    """Raises UsageError: a file or text cannot be used."""
    try:
        context = _trusting(client)
        if client.get("ssl.endpoint.identification.algorithm", "https") == "none":
            context.check_hostname = False
        if client.get("enable.ssl.certificate.verification", "true") == "false":
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        _load_own(context, client)
        if "ssl.crl.location" in client:
            with _as_file(_revoked(client["ssl.crl.location"])) as path:
                context.load_verify_locations(cafile=path)
            context.verify_flags |= ssl.VerifyFlags.VERIFY_CRL_CHECK_LEAF
        if "ssl.enabled.protocols" in client:
            allowed = [VERSIONS[name] for name in client["ssl.enabled.protocols"].split(",")]
            context.minimum_version, context.maximum_version = min(allowed), max(allowed)
        if "ssl.cipher.suites" in client:
            context.set_ciphers(client["ssl.cipher.suites"])
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise unusable(str(error)) from None
    return context


def unusable(why: str) -> UsageError:
    """The error for files or texts that no context can be built of."""
    return UsageError("TLS_FILES.KAFKA", reason=why)


def _trusting(client: Mapping[str, str]) -> ssl.SSLContext:
    location, text = client.get("ssl.ca.location"), pem(client.get("ssl.ca.pem", ""))
    if store := client.get("ssl.truststore.location"):
        text += trusted_of_store(store, client.get("ssl.truststore.password"))
    folder = location if location is not None and Path(location).is_dir() else None
    return ssl.create_default_context(cafile=None if folder else location, capath=folder, cadata=text or None)


def _load_own(context: ssl.SSLContext, client: Mapping[str, str]) -> None:
    password = client.get("ssl.key.password", "")
    if store := client.get("ssl.keystore.location"):
        text, password = own_of_store(store, client.get("ssl.keystore.password", password)), ""
    elif "ssl.certificate.pem" in client:
        text = pem(client["ssl.certificate.pem"]) + pem(client.get("ssl.key.pem", ""))
    elif "ssl.certificate.location" in client:
        # Without a function, OpenSSL would ask the terminal for a missing password, and wait.
        context.load_cert_chain(client["ssl.certificate.location"], client.get("ssl.key.location"), lambda: password)
        return
    else:
        return
    with _as_file(text) as path:
        context.load_cert_chain(path, password=lambda: password)


def pem(text: str) -> str:
    """PEM text as OpenSSL reads it: Kafka's Java client also takes it on one line."""
    if "\n" in text.strip():
        return text if text.endswith("\n") else text + "\n"
    blocks = []
    for label, body in _BLOCK.findall(text.replace("\\n", "\n")):
        data = "".join(body.split())
        lines = "\n".join(data[i : i + 64] for i in range(0, len(data), 64))
        blocks.append(f"-----BEGIN {label}-----\n{lines}\n-----END {label}-----\n")
    if text.strip() and not blocks:
        raise ValueError("the text in PEM's format has no -----BEGIN ...----- and -----END ...-----")
    return "".join(blocks)


def _revoked(location: str) -> str:
    """The lists in a file, without certificates, which would be trusted."""
    text = Path(location).read_text(encoding="ascii", errors="replace")
    lists = "\n".join(found[0] for found in _BLOCK.finditer(text) if found[1] == _CRL)
    if not lists:
        raise ValueError(f"{location!r} has no revocation list in PEM's format (-----BEGIN {_CRL}-----)")
    return lists + "\n"


def own_of_store(location: str, password: str | None) -> str:
    """Certificates and key of a PKCS12 store, as PEM text. Raises OSError, ValueError."""
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    store = _store(location, password)
    if store.key is None or store.cert is None:
        raise ValueError(f"{location!r} has no key with its certificate")
    key = store.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    chain = [store.cert, *store.additional_certs]
    return b"".join([*(c.certificate.public_bytes(Encoding.PEM) for c in chain), key]).decode("ascii")


def trusted_of_store(location: str, password: str | None) -> str:
    """Certificates of a PKCS12 store, as PEM text. Raises OSError, ValueError."""
    from cryptography.hazmat.primitives.serialization import Encoding

    store = _store(location, password)
    found = [*([store.cert] if store.cert else []), *store.additional_certs]
    if not found:
        raise ValueError(f"{location!r} has no certificate")
    return b"".join(c.certificate.public_bytes(Encoding.PEM) for c in found).decode("ascii")


def _store(location: str, password: str | None) -> Any:
    with extra("kafka"):
        from cryptography.hazmat.primitives.serialization.pkcs12 import load_pkcs12
    data = Path(location).read_bytes()
    try:
        return load_pkcs12(data, password.encode() if password else None)
    except ValueError as error:
        raise ValueError(f"{location!r}: {str(error).rstrip('.')}") from None


@contextmanager
def _as_file(text: str) -> Iterator[str]:
    """A path for OpenSSL, which reads certificates and keys from files only. In memory where the system can."""
    data = text.encode("ascii")
    if not hasattr(os, "memfd_create"):
        with tempfile.NamedTemporaryFile() as file:
            file.write(data)
            file.flush()
            yield file.name
        return
    with os.fdopen(os.memfd_create("delivered-tls", os.MFD_CLOEXEC), "wb") as file:
        file.write(data)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"
