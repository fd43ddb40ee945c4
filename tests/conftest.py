"""Fixtures shared by several test folders. Expensive ones start once, and only if a test requests them."""

from __future__ import annotations

import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import settings
from tests.support import kafka_classes
from tests.support.collecting import quick_collection
from tests.support.grouped import GROUP, end_after, end_with_group
from tests.support.servers import (
    Activemq,
    Kafka,
    Mysql,
    Postgres,
    PostgresPair,
    Pulsar,
    Rabbitmq,
    Registry,
    Rocketmq,
    Server,
)
from tests.support.zygote import Zygote

from delivered.model import patience

# Servers and Spark live for a minute here: what the second compiler of Java gives comes too late, and takes two fifths
# of the processor (a pipeline through Spark: 98 s without this, 55 s with it).
# The first one alone gets 48 MB for its code, which 150 tests in one session fill: then the JVM throws code away.
QUICK = ("-XX:TieredStopAtLevel=1", "-XX:ReservedCodeCacheSize=256m", *kafka_classes.java_options())
os.environ.setdefault(kafka_classes.OPTIONS, " ".join(QUICK))
# Of Spark alone: servers name their collector themselves. A tenth of the processor time of 22 audits in one session.
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:+UseSerialGC")
# No deadlines for examples: the machine may be busy.
settings.register_profile("busy", deadline=None)
settings.load_profile("busy")
# Tests kill servers, which this client logs many times a second: it would drown a failed test's output.
logging.getLogger("kafka").setLevel(logging.CRITICAL)
logging.getLogger("pika").setLevel(logging.CRITICAL)
logging.getLogger("stomp.py").setLevel(logging.CRITICAL)
logging.getLogger("rocketmq-python-client").setLevel(logging.CRITICAL)


SERVERS = ("rocketmq", "pulsar", "kafka", "mysql", "postgres", "rabbitmq", "activemq")
FIRST = ("spark", "unit", "kafka", "mortal", "pulsar", "postgres", "mysql", "rabbitmq", "activemq", "s3", "rocketmq")
"""What `make test` starts first, by group or folder: the slowest tests, and those without servers while these are
fetched."""


def _group(item: pytest.Item) -> str:
    """Tests of one group run in one process, so that their shared session or server starts once.

    Spark's session takes precedence over servers; of several servers, the slowest to start.
    """
    used = set(getattr(item, "fixturenames", ()))
    callspec = getattr(item, "callspec", None)
    if callspec is not None:  # fixtures requested by name in parameters
        used |= set(re.split(r"[^a-z0-9]+", callspec.id))
    if "spark" in used:
        # Two sessions, as a single one would be the last to end; Kafka starts beside one of them alone.
        return f"spark/{'kafka' if 'kafka' in used else 'alone'}"
    if "mortal_kafka" in used:
        return "mortal"
    shared = [s for s in (*SERVERS, "s3") if s in used]
    if shared and item.path.parent.name not in ("unit", "property", "crash", "verify", "install"):
        return shared[0]
    folder = item.path.parent.name
    return folder if folder == "install" else f"{folder}/{item.path.stem}"


@pytest.fixture(autouse=True)
def _outside_of_a_query(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that serves a query in this process must not make later ones wait for servers like a query."""
    monkeypatch.setattr(patience, "_in_query", False)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    with quick_collection(session.config):
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("damages_session") is not None)
    if not getattr(config.option, "loadgroup", False):  # in a process of `pytest -n 2 --dist loadgroup`
        return
    places = {name: at for at, name in enumerate(FIRST)}
    groups = {item: _group(item) for item in items}
    for item, group in groups.items():
        item.add_marker(getattr(pytest.mark, GROUP)(group))
    items.sort(key=lambda item: places.get(groups[item].partition("/")[0], len(places)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    yield
    end_after(item, nextitem)


def _shared(kind: type[Server], name: str = "") -> Any:
    """One server for the whole session. Do not stop it: it is shared."""

    def start(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Server]:
        if kind in (Kafka, Pulsar, Rocketmq):
            end_with_group(request)
        folder = tmp_path_factory.mktemp(kind.system)
        server = kind.start(folder)
        yield server
        server.end()
        shutil.rmtree(folder, ignore_errors=True)

    return pytest.fixture(start, scope="session", name=name or kind.system)


_reported: set[str] = set()


@pytest.fixture(autouse=True)
def _leaves_no_transaction(request: pytest.FixtureRequest) -> Iterator[None]:
    """Torn down last: a test that leaves a transaction open or prepared on a shared database fails, not a later one."""
    yield
    for system in ("postgres", "postgres_log"):
        if system in request.fixturenames:
            server = request.getfixturevalue(system)
            deadline = time.monotonic() + 60  # a server needs a moment to see that a client was killed
            while left := set(server.unfinished()) - _reported:
                if time.monotonic() > deadline:
                    _reported.update(left)
                    pytest.fail(f"transactions are left in {system}: {sorted(left)}")
                time.sleep(0.02)


def _own(kind: type[Server], name: str = "") -> Any:
    """`new_mysql(local_infile="0", ...)`: a private server with these settings, which the test may kill."""

    def starter(tmp_path: Path) -> Iterator[Callable[..., Server]]:
        started: list[Server] = []

        def start(**settings: Any) -> Server:
            # Kafka: all arguments of `brokers.start`; others: settings only.
            options = settings if kind is Kafka else {"properties": settings}
            server = kind.start(tmp_path / f"{kind.system}{len(started)}", **options)
            started.append(server)
            if isinstance(server, Rabbitmq):
                server.mortal = True
            return server

        yield start
        for server in started:
            server.end()

    return pytest.fixture(starter, name=f"new_{name or kind.system}")


kafka, new_kafka = _shared(Kafka), _own(Kafka)
postgres, new_postgres = _shared(Postgres), _own(Postgres)
postgres_log = _shared(Postgres, "postgres_log")
"""For tests of logical decoding: a new slot waits for every open or prepared transaction of the whole server."""
mysql, new_mysql = _shared(Mysql, "mysql"), _own(Mysql, "mysql")


@pytest.fixture
def new_postgres_pair(tmp_path: Path) -> Iterator[Callable[..., PostgresPair]]:
    """`new_postgres_pair(synchronous=True)`: a primary and its standby, which the test may kill."""
    started: list[PostgresPair] = []

    def start(*, synchronous: bool) -> PostgresPair:
        started.append(PostgresPair(tmp_path / f"pair{len(started)}", synchronous=synchronous))
        return started[-1]

    yield start
    for pair in started:
        pair.end()


registry = _shared(Registry)
rabbitmq, new_rabbitmq = _shared(Rabbitmq), _own(Rabbitmq)
pulsar, new_pulsar = _shared(Pulsar), _own(Pulsar)
activemq, new_activemq = _shared(Activemq), _own(Activemq)
rocketmq, new_rocketmq = _shared(Rocketmq), _own(Rocketmq)


@pytest.fixture(scope="session")
def _mortal(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Kafka]:
    end_with_group(request)
    server = Kafka.start(tmp_path_factory.mktemp("mortal"))
    yield server
    server.end()


@pytest.fixture
def mortal_kafka(_mortal: Kafka) -> Iterator[Kafka]:
    """A broker that the test may kill, one for all of them. It runs again afterwards."""
    yield _mortal
    if not psutil.pid_exists(_mortal.broker.pid):
        _mortal.broker.restart()


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Starts pipelines to be killed. Call `load` with their imports before the first one."""
    started = Zygote()
    yield started
    started.stop()


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A server with S3's protocol, including conditional writes, and the bucket `lake`: options to reach it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    output = (tmp_path_factory.mktemp("s3") / "output").open("wb")
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=output, stderr=output)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(urllib.request.Request(f"{url}/lake", method="PUT"), timeout=5).close()
            break
        except OSError:
            assert server.poll() is None and time.monotonic() < deadline, (tmp_path_factory.getbasetemp(), "no S3")
            time.sleep(0.1)
    yield {
        "storage.aws_endpoint_url": url,
        "storage.aws_allow_http": "true",
        "storage.aws_region": "us-east-1",
        "storage.aws_access_key_id": "someone",
        "storage.aws_secret_access_key": "something",
    }
    server.kill()
    server.wait()
    output.close()


@pytest.fixture
def rest_catalog(tmp_path: Path) -> Iterator[Any]:
    """An Iceberg REST catalog: `rest_catalog.url`, `.catalog`, `.lose_answers`."""
    from tests.rest_catalog import RestCatalogServer

    server = RestCatalogServer(tmp_path / "served")
    yield server
    server.stop()
