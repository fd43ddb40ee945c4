"""SASL GSSAPI (Kerberos, RFC 4752) by MIT's library, called through its C interface (RFC 2744).

The package `gssapi` would need a compiler and Kerberos' headers wherever it is installed; the library itself is part of
every Linux that has Kerberos.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint32, c_void_p
from typing import Any

from delivered.clients.kafka.outcomes import CredentialsRefused, NoCredentials, Rejected
from delivered.model.errors import UsageError

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
        raise UsageError(
            "KERBEROS_MISSING",
            f"The SASL mechanism GSSAPI needs MIT Kerberos' library, which cannot be loaded here: {error}.",
            next_step="apt-get install libgssapi-krb5-2 (or dnf install krb5-libs) on the driver and on every executor",
        ) from None
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
        found.append(_taken(text).decode(errors="replace"))
        if not context.value:
            return found


def _taken(buffer: _Buffer) -> bytes:
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
        principal, keytab: None: whoever the default credentials cache has a ticket for (`kinit`).

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
            raise UsageError(
                "KERBEROS_KEYTAB",
                f"Option 'kafka.sasl.kerberos.keytab' is {keytab!r}, which cannot be read here.",
                next_step="put the file on the driver and on every executor, readable for the job's user",
            )
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
        return _taken(output)

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
        return _taken(output)

    def _wrapped(self, data: bytes) -> bytes:
        output = _Buffer()
        _call("gss_wrap", self._context, 0, 0, byref(_buffer(data)), None, byref(output))
        return _taken(output)

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
