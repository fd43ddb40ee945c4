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
from delivered_lab.brokers.servers import (
    Say,
    Server,
    State,
    as_lines,
    fetch_archive,
    free_ports,
    java_command,
    log_level,
    make_certificate,
    open_packages,
    split_address,
    write_private,
)

VERSION = "4.0.4"
ARTIFACT = ("org.apache.pulsar", "pulsar-server-distribution", VERSION)
PULSAR, HTTP, PULSAR_SSL, HTTPS = "PULSAR", "HTTP", "PULSAR_SSL", "HTTPS"
FOLDER = "DELIVERED_PULSAR"
"""Environment variable: folder of another version, with `lib` and `conf`."""
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


def fetch(say: Say) -> Path:
    """The server's folder, fetched once, or the one that DELIVERED_PULSAR names."""
    if own := os.environ.get(FOLDER):
        return Path(own)
    return fetch_archive(f"pulsar/{VERSION}", ARTIFACT, ("lib", "conf"), "239 MB", say)


def version() -> str:
    if (own := os.environ.get(FOLDER)) is None:
        return VERSION
    [jar] = Path(own, "lib").glob("org.apache.pulsar-pulsar-broker-[0-9]*.jar")
    return jar.stem.rpartition("-")[2]


def prepare(folder: Path, state: State, say: Say) -> list[str]:
    root, listeners, data = fetch(say), state.listeners, folder / "data"
    tls = _tls_properties(folder, listeners) if HTTPS in listeners else {}
    distributed = _distributed(root / "conf" / "standalone.conf")
    file, logging = folder / "standalone.conf", folder / "log4j2.properties"
    write_private(file, as_lines({**distributed, **_properties(listeners), **tls, **state.settings["properties"]}))
    logging.write_text(_LOGGING.replace("{level}", log_level()), encoding="utf-8")
    return [
        *java_command(
            state.settings["heap_mb"],
            root / "lib",
            "-XX:+UseG1GC",
            f"-XX:MaxDirectMemorySize={DIRECT_MB}m",
            "-Dio.netty.tryReflectionSetAccessible=true",
            "-Dpulsar.allocator.exit_on_oom=true",
            "-Dlog4j2.is.webapp=false",
            "-Dlog4j.shutdownHookEnabled=false",
            f"-Dlog4j.configurationFile={logging}",
            f"-Dbookkeeper.metadata.bookie.drivers={_METADATA}BookieDriver",
            f"-Dbookkeeper.metadata.client.drivers={_METADATA}ClientDriver",
            *open_packages(*_OPENS),
        ),
        *("org.apache.pulsar.PulsarStandaloneStarter", "--config", str(file)),
        *("--no-functions-worker", "--no-stream-storage", "--advertised-address", "127.0.0.1"),
        *_metadata(data),
        *("--bookkeeper-dir", str(data / "bookkeeper")),
    ]


def _metadata(data: Path) -> list[str]:
    """Before 2.11 in a ZooKeeper of its own, at a port of its own."""
    if tuple(map(int, version().split(".")[:2])) >= (2, 11):
        return ["--metadata-dir", str(data / "metadata")]
    return [
        "--zookeeper-dir",
        str(data / "metadata"),
        "--zookeeper-port",
        str(free_ports(1)[0]),
        "--bookkeeper-port",
        str(free_ports(1)[0]),
    ]


def answers(state: State) -> bool:
    """Whether the broker's health check, which writes and reads a message, succeeds."""
    own = state.settings["properties"].get(_OWN_LOGIN, "")  # if tokens are required
    headers = {"Authorization": f"Bearer {own.removeprefix('token:')}"} if own.startswith("token:") else {}
    url = f"http://{state.listeners[HTTP]}/admin/v2/brokers/health"
    with suppress(OSError, HTTPException):
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(urllib.request.Request(url, headers=headers), timeout=10.0) as reply:
            return bool(reply.read().strip() == b"ok")
    return False


def _distributed(file: Path) -> dict[str, str]:
    """The server's own standalone configuration: unset settings would have the defaults for clusters."""
    lines = [x.strip() for x in file.read_text(encoding="utf-8").splitlines()]
    pairs = [x.partition("=") for x in lines if x and not x.startswith("#")]
    return {name.strip(): value.strip() for name, _, value in pairs}


def _tls_properties(folder: Path, listeners: Mapping[str, str]) -> dict[str, str]:
    store, password = make_certificate(java_home(), folder)
    return {
        "brokerServicePortTls": split_address(listeners[PULSAR_SSL])[1],
        "webServicePortTls": split_address(listeners[HTTPS])[1],
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


def _base64(part: bytes) -> bytes:
    return base64.urlsafe_b64encode(part).rstrip(b"=")


def _properties(listeners: Mapping[str, str]) -> dict[str, str]:
    return {
        "brokerServicePort": split_address(listeners[PULSAR])[1],
        "webServicePort": split_address(listeners[HTTP])[1],
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


SERVER = Server(
    listeners=lambda settings: [PULSAR, HTTP, *((PULSAR_SSL, HTTPS) if settings["tls"] else ())],
    prepare=prepare,
    answers=answers,
    fetch=fetch,
    url="pulsar://{}",
    takes=frozenset({"tls"}),
    version=version,
    pipeline='{{format: pulsar, url: "{url}", adminUrl: "http://{HTTP}", topics: orders}}',
)
