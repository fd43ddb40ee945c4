"""gRPC channels to the proxies, one for each, made and closed in the client's own thread.

Those of the client library take the certificates that gRPC trusts, and no others.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from delivered.connectors.rocketmq.options import Place
from delivered.kits.options import trust
from delivered.model.errors import UsageError

_OPTIONS = [
    ("grpc.enable_retries", 0),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
]
_DISTRUST = ("CERTIFICATE_VERIFY_FAILED", "not in peer certificate", "Hostname Verification Check failed")


class Channels:
    """Of one session."""

    def __init__(self, library: SimpleNamespace, options: Place) -> None:
        """Raises UsageError: the file of trusted certificates cannot be used."""
        self._library = library
        self._tls = options.tls
        self._trusted = None if options.trusted is None else _certificates(options.trusted)
        self._made: dict[Any, tuple[Any, Any]] = {}

    def stub(self, proxy: Any) -> Any:
        if proxy not in self._made:
            grpc = self._library.grpc
            if self._tls:
                # Certificate and host name are checked; gRPC has no way to leave that out.
                credentials = grpc.ssl_channel_credentials(self._trusted)
                channel = grpc.aio.secure_channel(proxy.facade, credentials, _OPTIONS)
            else:
                channel = grpc.aio.insecure_channel(proxy.facade, _OPTIONS)
            self._made[proxy] = channel, self._library.Stub(channel)
        return self._made[proxy][1]

    async def close(self) -> None:
        made, self._made = self._made, {}
        for channel, _ in made.values():
            await channel.close()


def untrusted(options: Place, said: str) -> UsageError | None:
    """What gRPC said, if it is about a certificate."""
    if not options.tls or not any(word in said for word in _DISTRUST):
        return None
    trusted = f"those in {options.trusted}" if options.trusted is not None else "those that gRPC brings along"
    return UsageError(
        "CERTIFICATE_REFUSED",
        f"The certificate of a proxy at {options.endpoints} was not accepted: {said[-300:]}. Trusted are {trusted}. "
        "Nothing was sent.",
        next_step="set tlsTrustCertsFile to the certificate of who signed it, after making sure whose it is (openssl "
        f"s_client -showcerts -connect {options.endpoints.split(';')[0]}), and name the proxies as it does",
    )


def _certificates(path: str) -> bytes:
    """gRPC says nothing of a file that holds none: every connection fails."""
    trust("tlsTrustCertsFile", path)
    return Path(path).read_bytes()
