"""A connection of PyMySQL that verifies the server as asked, and never leaks the password.

Imported where a connection is opened: PyMySQL is an extra.
"""

from __future__ import annotations

import ssl
from functools import lru_cache
from typing import Any

import pymysql

from delivered.kits.mysql import Tls
from delivered.kits.options import distrusted
from delivered.model.errors import UsageError

_IN_CLEAR = (b"mysql_clear_password", b"dialog")
"""Login methods that send the password itself."""


class Connection(pymysql.connections.Connection):  # type: ignore[misc]
    """
    Raises:
        UsageError: the server's certificate was not accepted, or it asks for the password over a connection to a server
            that was not verified.
    """

    def __init__(self, tls: Tls | None, **settings: Any) -> None:
        self._trusted = tls.ca if tls is not None else None
        super().__init__(**settings, **({} if tls is None else {"ssl": tls.context()}))

    def connect(self, sock: Any = None) -> None:
        """Called by the constructor."""
        try:
            super().connect(sock)
        except pymysql.MySQLError as error:
            reason = getattr(error, "original_exception", None)
            if isinstance(reason, ssl.SSLCertVerificationError):
                url = f"mysql://{self.host}:{self.port}"
                raise distrusted(url, reason, "ssl_ca", self._trusted or "the system's") from None
            raise

    def _create_ssl_ctx(self, sslp: Any) -> Any:
        """TLS that the server offers and nobody asked for verifies nothing, so skip loading the system's certificates,
        which takes 20 ms and more per connection."""
        return super()._create_ssl_ctx(sslp) if sslp else _unverified()

    def _process_auth(self, plugin_name: Any, auth_packet: Any, handler: Any = None) -> Any:
        verified = self._secure and self.ssl and self.ctx.verify_mode == ssl.CERT_REQUIRED
        if bytes(plugin_name) in _IN_CLEAR and not verified:
            raise UsageError("PASSWORD_IN_CLEAR", host=self.host, port=self.port, plugin=str(plugin_name, "ascii"))
        return super()._process_auth(plugin_name, auth_packet, handler)


@lru_cache(maxsize=1)
def _unverified() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
