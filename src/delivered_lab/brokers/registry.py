"""A schema registry with Confluent's HTTP interface: Apicurio, with its schemas in a file."""

from __future__ import annotations

import urllib.request
from contextlib import suppress
from pathlib import Path

from delivered_lab.brokers.servers import Say, Server, State, fetch_archive, java_command, split_address

VERSION = "2.6.13.Final"
"""The last line of releases that runs on Java 17."""
ARTIFACT = ("io.apicurio", "apicurio-registry-app", VERSION)
HTTP = "HTTP"


_URL = "http://{}/apis/ccompat/v7"


def fetch(say: Say) -> Path:
    """The server's folder, fetched once."""
    return fetch_archive(f"apicurio/{VERSION}", ARTIFACT, None, "142 MB", say, classifier="all")


def prepare(folder: Path, state: State, say: Say) -> list[str]:
    """Properties are Quarkus's and the registry's own."""
    (runner,) = fetch(say).glob("*-runner.jar")
    host, port = split_address(state.listeners[HTTP])
    config = {
        "quarkus.http.host": host,
        "quarkus.http.port": port,
        "quarkus.datasource.jdbc.url": f"jdbc:h2:file:{folder / 'registry'};WRITE_DELAY=0",
        "quarkus.datasource.jdbc.min-size": "2",
        "quarkus.log.level": "WARN",
        **state.settings["properties"],
    }
    options = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", *(f"-D{name}={value}" for name, value in config.items()))
    return [*java_command(state.settings["heap_mb"], None, *options), "-jar", str(runner)]


def answers(state: State) -> bool:
    """Whether the registry lists its subjects."""
    address = _URL.format(state.listeners[HTTP])
    with suppress(OSError), urllib.request.urlopen(f"{address}/subjects", timeout=2.0) as answer:  # noqa: S310 - our own
        return bool(answer.status == 200)
    return False


SERVER = Server(
    listeners=lambda _: [HTTP],
    prepare=prepare,
    answers=answers,
    fetch=fetch,
    url=_URL,
    version=lambda: VERSION,
    pipeline=(
        "{{format: kafka, kafka.bootstrap.servers: 'localhost:9092', subscribe: orders, value.format: avro, "
        "schema.registry.url: '{url}'}}"
    ),
    first_steps=(("look", "curl {url}/subjects"),),
)
