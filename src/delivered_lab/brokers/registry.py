"""A schema registry with Confluent's HTTP interface: Apicurio, with its schemas in a file."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from delivered.machine import java_home
from delivered_lab.brokers.fetch import Say, fetch_archive
from delivered_lab.brokers.servers import Server

VERSION = "2.6.13.Final"
"""The last line of releases that runs on Java 17."""
ARTIFACT = ("io.apicurio", "apicurio-registry-app", VERSION)
HTTP = "HTTP"


def url(address: str) -> str:
    return f"http://{address}/apis/ccompat/v7"


def fetch(java: Path, say: Say) -> Path:
    """The server's folder, fetched once."""
    return fetch_archive(f"apicurio/{VERSION}", ARTIFACT, None, "142 MB", java, say, classifier="all")


def prepare(
    folder: Path, listeners: Mapping[str, str], properties: Mapping[str, str], heap_mb: int, say: Say
) -> list[str]:
    """Fetch the server if missing; return the command to run.

    Args:
        properties: Quarkus's and the registry's own.

    Raises:
        DeliveredError: no Java, or the download failed.
    """
    java = java_home() / "bin" / "java"
    (runner,) = fetch(java, say).glob("*-runner.jar")
    host, _, port = listeners[HTTP].rpartition(":")
    config = {
        "java.net.preferIPv4Stack": "true",
        "quarkus.http.host": host,
        "quarkus.http.port": port,
        "quarkus.datasource.jdbc.url": f"jdbc:h2:file:{folder / 'registry'};WRITE_DELAY=0",
        "quarkus.datasource.jdbc.min-size": "2",
        "quarkus.log.level": "WARN",
        **properties,
    }
    return [
        str(java),
        f"-Xmx{heap_mb}m",
        "-XX:+UseSerialGC",
        "-XX:TieredStopAtLevel=1",
        *(f"-D{name}={value}" for name, value in config.items()),
        *("-jar", str(runner)),
    ]


def answers(address: str, timeout_s: float = 2.0) -> bool:
    """Whether the registry at `address` lists its subjects."""
    try:
        with urllib.request.urlopen(f"{url(address)}/subjects", timeout=timeout_s) as answer:  # noqa: S310 - our own
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


SERVER = Server(
    listeners=lambda _: [HTTP],
    main=HTTP,
    fetch=lambda say: fetch(java_home() / "bin" / "java", say),
    prepare=lambda folder, state, say: prepare(
        folder, state.listeners, state.settings["properties"], state.settings["heap_mb"], say
    ),
    answers=lambda state: answers(state.listeners[HTTP]),
    url=url,
    pipeline=(
        "{{format: kafka, kafka.bootstrap.servers: 'localhost:9092', subscribe: orders, value.format: avro, "
        "schema.registry.url: '{url}'}}"
    ),
    first_steps=(("look", "curl {url}/subjects"),),
)
