"""A connected socket with TLS.

The client's own TLS mode polls the socket, so it misses frames that TLS has already decrypted, and never notices a
closed peer. A plain `ssl.SSLSocket` is for one thread at a time; here one reads while another writes.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time

_READ_BYTES = 65_536


class TlsSocket:
    """What the client uses of a socket, blocking. One thread reads, any thread writes."""

    def __init__(self, raw: socket.socket, context: ssl.SSLContext, host: str, timeout_s: float) -> None:
        """Handshake. Does not close `raw` if it fails.

        Raises:
            ssl.SSLCertVerificationError: the certificate is not trusted, or of another host.
            OSError: the handshake failed, or took longer than `timeout_s`.
        """
        self._raw = raw
        context.options |= ssl.OP_NO_RENEGOTIATION  # during one, a write would have to wait for a read
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._to_send, server_hostname=host)
        self._state = threading.Lock()
        self._order = threading.Lock()
        """Held while sending, so that records arrive in the order of their encryption; never by the reader, which would
        otherwise wait for a peer that waits for it."""
        self._clear = b""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush(deadline)
                self._raw.settimeout(_left(deadline))
                self._feed()
            except ssl.SSLError:
                with contextlib.suppress(OSError):
                    self._flush(deadline)  # the alert that explains it to the server
                raise
            else:
                break
        self._flush(deadline)
        raw.settimeout(None)

    def recv(self, size: int, flags: int = 0) -> bytes:
        """As socket.recv, with MSG_PEEK or no flag. Raises OSError, also if the peer did not announce the end."""
        while not self._clear:
            with self._state:
                try:
                    self._clear = self._tls.read(_READ_BYTES)
                    if not self._clear:
                        return b""
                    break
                except ssl.SSLWantReadError:
                    pass
                except ssl.SSLZeroReturnError:
                    return b""
            self._feed()
        found = self._clear[:size]
        if not flags & socket.MSG_PEEK:
            self._clear = self._clear[size:]
        return found

    def sendall(self, data: bytes) -> None:
        with self._order:
            with self._state:
                if data:
                    self._tls.write(data)
                encrypted = self._to_send.read()
            self._raw.sendall(encrypted)

    def getsockname(self) -> tuple[str, int]:
        found: tuple[str, int] = self._raw.getsockname()
        return found

    def shutdown(self, how: int) -> None:
        self._raw.shutdown(how)

    def close(self) -> None:
        self._raw.close()

    def _feed(self) -> None:
        data = self._raw.recv(_READ_BYTES)
        with self._state:
            if data:
                self._received.write(data)
            else:
                self._received.write_eof()

    def _flush(self, deadline: float) -> None:
        if self._to_send.pending:
            self._raw.settimeout(_left(deadline))
            self._raw.sendall(self._to_send.read())


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the TLS handshake took too long")
    return left
