"""Apache Pulsar standalone: broker, BookKeeper and metadata in one process, everything on 127.0.0.1.

Without functions workers and stream storage. By default acknowledged messages are retained without bounds, inactive
topics are kept, and the broker deduplicates producers' resends (brokerDeduplicationEnabled).

With tokens, every client needs one, even without TLS:

    secret = secrets.token_bytes(32)
    broker = brokers.start("pulsar", folder, tls=True, properties=pulsar.with_tokens(secret))
    pulsar.make_token(secret, pulsar.ADMIN)      # superuser
    pulsar.make_token(secret, "reader")          # only the role's grants, none at first
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path

from delivered.machine import java_home
from delivered_lab.brokers.fetch import Say, fetch_archive
from delivered_lab.brokers.servers import Server, State, make_certificate

VERSION = "4.0.4"
ARTIFACT = ("org.apache.pulsar", "pulsar-server-distribution", VERSION)
PULSAR, HTTP, PULSAR_SSL, HTTPS = "PULSAR", "HTTP", "PULSAR_SSL", "HTTPS"
ADMIN = "admin"
"""Superuser role, if tokens are required."""
_OWN_LOGIN = "brokerClientAuthenticationParameters"
DIRECT_MB = 256
_OPENS = (
    *("java.base/java.io", "java.base/java.nio", "java.base/java.util.zip", "java.base/jdk.internal.misc"),
    *("java.base/jdk.internal.platform", "java.base/sun.net", "java.management/sun.management"),
)
_METADATA = "org.apache.pulsar.metadata.bookkeeper.PulsarMetadata"
_LOGGING = """\
status = error
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{ISO8601} %-5p %c{1} %m%n
rootLogger.level = {level}
rootLogger.appenderRef.console.ref = console
"""


def url(address: str) -> str:
    return f"pulsar://{address}"


def listeners_wanted(tls: bool) -> list[str]:
    return [PULSAR, HTTP, PULSAR_SSL, HTTPS] if tls else [PULSAR, HTTP]


def make_token(secret: bytes, role: str, expires: float | None = None) -> str:
    """A JSON Web Token for a role.

    Args:
        secret: the server's, 32 bytes or more.
        expires: seconds since 1970; None: never.
    """
    claims = {"sub": role} if expires is None else {"sub": role, "exp": int(expires)}
    signed = b".".join(_base64(json.dumps(part).encode()) for part in ({"alg": "HS256"}, claims))
    return (signed + b"." + _base64(hmac.digest(secret, signed, hashlib.sha256))).decode()


def with_tokens(secret: bytes) -> dict[str, str]:
    """Configuration of a server that requires a token from every client and checks its role's permissions."""
    return {
        "authenticationEnabled": "true",
        "authorizationEnabled": "true",
        "authenticationProviders": "org.apache.pulsar.broker.authentication.AuthenticationProviderToken",
        "tokenSecretKey": "data:;base64," + base64.b64encode(secret).decode(),
        "superUserRoles": ADMIN,
        "brokerClientAuthenticationPlugin": "org.apache.pulsar.client.impl.auth.AuthenticationToken",
        _OWN_LOGIN: f"token:{make_token(secret, ADMIN)}",
    }


def fetch(java: Path, say: Say) -> Path:
    """The server's folder, fetched once."""
    return fetch_archive(f"pulsar/{VERSION}", ARTIFACT, ("lib", "conf"), "239 MB", java, say)


def prepare(
    home: Path, folder: Path, listeners: Mapping[str, str], heap_mb: int, properties: Mapping[str, str], say: Say
) -> list[str]:
    """Fetch the server if missing, write its configuration; return the command to run.

    Args:
        home: of the Java runtime.
    """
    java = home / "bin" / "java"
    root = fetch(java, say)
    tls = _tls_properties(home, folder, listeners) if HTTPS in listeners else {}
    config = {**_distributed(root / "conf" / "standalone.conf"), **_properties(listeners), **tls, **properties}
    file = folder / "standalone.conf"
    file.touch(mode=0o600)
    file.write_text("".join(f"{k}={v}\n" for k, v in config.items()), encoding="utf-8")
    logging = folder / "log4j2.properties"
    level = os.environ.get("DELIVERED_BROKER_LOG", "warn")
    logging.write_text(_LOGGING.replace("{level}", level), encoding="utf-8")
    return [
        str(java),
        f"-Xmx{heap_mb}m",
        "-XX:+UseG1GC",
        f"-XX:MaxDirectMemorySize={DIRECT_MB}m",
        "-Djava.net.preferIPv4Stack=true",
        "-Dio.netty.tryReflectionSetAccessible=true",
        "-Dpulsar.allocator.exit_on_oom=true",
        "-Dlog4j2.is.webapp=false",
        "-Dlog4j.shutdownHookEnabled=false",
        f"-Dlog4j.configurationFile={logging}",
        f"-Dbookkeeper.metadata.bookie.drivers={_METADATA}BookieDriver",
        f"-Dbookkeeper.metadata.client.drivers={_METADATA}ClientDriver",
        *(f"--add-opens={package}=ALL-UNNAMED" for package in _OPENS),
        "-cp",
        str(root / "lib" / "*"),
        "org.apache.pulsar.PulsarStandaloneStarter",
        "--config",
        str(file),
        "--no-functions-worker",
        "--no-stream-storage",
        "--advertised-address",
        "127.0.0.1",
        "--metadata-dir",
        str(folder / "data" / "metadata"),
        "--bookkeeper-dir",
        str(folder / "data" / "bookkeeper"),
    ]


def answers(address: str, properties: Mapping[str, str], timeout_s: float = 10.0) -> bool:
    """Whether the health check of the broker at `address` (HTTP), which writes and reads a message, succeeds.

    Args:
        properties: that it was started with; they include its own token, if required.
    """
    own = properties.get(_OWN_LOGIN, "")
    headers = {"Authorization": f"Bearer {own.removeprefix('token:')}"} if own.startswith("token:") else {}
    request = urllib.request.Request(f"http://{address}/admin/v2/brokers/health", headers=headers)
    with suppress(OSError, HTTPException):
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=timeout_s) as reply:
            return bool(reply.read().strip() == b"ok")
    return False


def _distributed(file: Path) -> dict[str, str]:
    """The server's own standalone configuration: unset settings would have the defaults for clusters."""
    lines = [x.strip() for x in file.read_text(encoding="utf-8").splitlines()]
    pairs = [x.partition("=") for x in lines if x and not x.startswith("#")]
    return {name.strip(): value.strip() for name, _, value in pairs}


def _tls_properties(home: Path, folder: Path, listeners: Mapping[str, str]) -> dict[str, str]:
    store, password = make_certificate(home, folder)
    return {
        "brokerServicePortTls": _port(listeners[PULSAR_SSL]),
        "webServicePortTls": _port(listeners[HTTPS]),
        "tlsEnabledWithKeyStore": "true",
        "tlsKeyStoreType": "PKCS12",
        "tlsKeyStore": str(store),
        "tlsKeyStorePassword": password,
        # For client certificates: required even though none are requested.
        "tlsTrustStoreType": "PKCS12",
        "tlsTrustStore": str(store),
        "tlsTrustStorePassword": password,
        # The default needs a native library.
        "tlsProvider": "SunJSSE",
        "webServiceTlsProvider": "SunJSSE",
    }


def _port(address: str) -> str:
    return address.rpartition(":")[2]


def _base64(part: bytes) -> bytes:
    return base64.urlsafe_b64encode(part).rstrip(b"=")


def _properties(listeners: Mapping[str, str]) -> dict[str, str]:
    return {
        "brokerServicePort": _port(listeners[PULSAR]),
        "webServicePort": _port(listeners[HTTP]),
        "bindAddress": "127.0.0.1",
        "advertisedAddress": "127.0.0.1",
        # Otherwise BookKeeper listens on a public address.
        "listeningInterface": "lo",
        "allowLoopback": "true",
        "webSocketServiceEnabled": "false",
        "numIOThreads": "2",
        "numHttpServerThreads": "8",
        "brokerDeduplicationEnabled": "true",
        "brokerDeleteInactiveTopicsEnabled": "false",
        "defaultRetentionTimeInMinutes": "-1",
        "defaultRetentionSizeInMB": "-1",
        # Disks of development machines are often full; by default BookKeeper becomes read-only at 95 %.
        "diskUsageThreshold": "0.999",
        "diskUsageWarnThreshold": "0.998",
        "dbStorage_writeCacheMaxSizeMb": "32",
        "dbStorage_readAheadCacheMaxSizeMb": "16",
        "managedLedgerCacheSizeMB": "64",
    }


def _prepared(folder: Path, state: State, say: Say) -> list[str]:
    settings = state.settings
    return prepare(java_home(), folder, state.listeners, settings["heap_mb"], settings["properties"], say)


SERVER = Server(
    listeners=lambda settings: listeners_wanted(settings["tls"]),
    main=PULSAR,
    fetch=lambda say: fetch(java_home() / "bin" / "java", say),
    prepare=_prepared,
    answers=lambda state: answers(state.listeners[HTTP], state.settings["properties"]),
    url=url,
    takes=frozenset({"tls"}),
    pipeline='{{format: pulsar, url: "{url}", adminUrl: "http://{HTTP}", topics: orders}}',
)
