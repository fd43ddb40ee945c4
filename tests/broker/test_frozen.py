"""A server that accepts connections and answers nothing (SIGSTOP here; a full disk, a stopped virtual machine) does not
answer, nor does one that closes them, or says that it is busy, starts or stops. It has refused no login."""

from __future__ import annotations

import re
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.support.servers import paused

import delivered
from delivered.connectors.iceberg.client import open_table
from delivered.connectors.pulsar.client import Admin
from delivered.connectors.rocketmq.client import Session, library
from delivered.contract.source import Source
from delivered.kits.schemas.registry import connected
from delivered.model.capability import Guarantee
from delivered.model.errors import DeliveredError
from delivered.model.patience import within
from delivered.pipeline.endpoint import Endpoint

SASL = {
    "kafka.security.protocol": "SASL_PLAINTEXT", "kafka.sasl.mechanism": "PLAIN", "kafka.sasl.username": "u",
    "kafka.sasl.password": "env:HOME",
}  # fmt: skip
SINKS: dict[str, Callable[[Any, str], Endpoint]] = {
    "kafka": lambda s, _: delivered.kafka(s.bootstrap, topic="t"),
    "kafka, SASL": lambda s, _: delivered.kafka(s.bootstrap, topic="t", **SASL),
    "kafka, TLS": lambda s, _: delivered.kafka(s.bootstrap, topic="t", **{"kafka.security.protocol": "SSL"}),
    "postgres": lambda s, _: delivered.postgres(s.url, "t"),
    "mysql": lambda s, _: delivered.mysql(s.url, "t"),
    "rabbitmq": lambda s, ledger: delivered.endpoint("rabbitmq", url=s.url, routingKey="t", ledger=ledger),
    "activemq": lambda s, ledger: delivered.endpoint("activemq", url=s.url, queue="t", ledger=ledger),
    "pulsar": lambda s, ledger: delivered.endpoint("pulsar", **s.options, topic="t", ledger=ledger),
    "rocketmq": lambda s, ledger: delivered.endpoint("rocketmq", endpoints=s.url, topic="t", ledger=ledger),
}


def checked(end: Any) -> list[tuple[str, bool, str]]:
    """Codes, whether they are waited for, and messages of a preflight of a source or a sink."""
    given = () if isinstance(end, Source) else (Guarantee.AT_LEAST_ONCE,)
    try:
        return [(f.code, f.transient, f.message) for f in end.preflight(*given)]
    except DeliveredError as error:
        return [(error.code.removeprefix("DELIVERED_"), error.may_come_back, error.message)]


def is_unanswered(code: str) -> bool:
    return re.fullmatch(r"(DELIVERED_)?[A-Z]+_(UNREACHABLE|NO_ANSWER)", code) is not None


@pytest.mark.parametrize("name", [n if n == "kafka" else pytest.param(n, marks=pytest.mark.matrix) for n in SINKS])
def test_a_sink_is_unanswered(request: pytest.FixtureRequest, tmp_path: Path, name: str) -> None:
    server = request.getfixturevalue(name.partition(",")[0])
    sink = SINKS[name](server, str(tmp_path / "ledger.db")).sink()
    with paused(server), within(1):
        found = checked(sink)
    assert found, "it was not asked"
    assert all(is_unanswered(code) and transient for code, transient, _ in found), found


@contextmanager
def full() -> Iterator[str]:
    """The address of a server whose queue of connections is full, as of one that has been frozen for a while: the
    system drops who connects, and connecting takes until it is given up."""
    with ExitStack() as held:
        server = held.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(8):
            client = held.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        yield "{}:{}".format(*server.getsockname())


@contextmanager
def silent() -> Iterator[str]:
    """The address of a server that has been frozen for a moment: the system accepts connections for it."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield "{}:{}".format(*server.getsockname())


@contextmanager
def serving(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """The address of a server that does this to each connection, and then closes it."""

    def serve() -> None:
        with suppress(OSError):
            while True:
                client = server.accept()[0]
                with client, suppress(OSError):
                    answer(client)

    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield "{}:{}".format(*server.getsockname())
        server.shutdown(socket.SHUT_RDWR)
        thread.join(5)


def hanging_up() -> AbstractContextManager[str]:
    """As a load balancer does whose servers start."""
    return serving(lambda client: None)


def resetting() -> AbstractContextManager[str]:
    linger = struct.pack("ii", 1, 0)
    return serving(lambda client: client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger))


@pytest.mark.parametrize("frozen", [full, silent, hanging_up, resetting])
@pytest.mark.parametrize("name", SINKS)
def test_questions_in_a_bound_end_with_it(
    tmp_path: Path, name: str, frozen: Callable[[], AbstractContextManager[str]]
) -> None:
    """A status asks several, and a scrape is given up after 5 s: an alert of the outage needs the answer."""
    with frozen() as place:
        urls = {"postgres": f"postgresql://{place}/x", "mysql": f"mysql://me@{place}/x", "rocketmq": place}
        urls |= {"rabbitmq": f"amqp://{place}/", "activemq": f"stomp://{place}"}
        web = {"url": f"pulsar://{place}", "adminUrl": f"http://{place}"}
        server = SimpleNamespace(bootstrap=place, url=urls.get(name, ""), options=web)
        sink = SINKS[name](server, str(tmp_path / "ledger.db")).sink()
        start = time.monotonic()
        with within(1):
            for _ in range(5):
                with pytest.raises(DeliveredError) as failed:
                    refused = [f for f in sink.preflight(Guarantee.AT_LEAST_ONCE) if f.refuses]
                    raise DeliveredError(refused[0].code, refused[0].message)
                assert is_unanswered(failed.value.code), failed.value
        assert time.monotonic() - start < 4, "each question has a bound of its own"


@pytest.mark.matrix
def test_a_schema_registry_is_unanswered(registry: Any) -> None:
    with paused(registry), within(1), pytest.raises(DeliveredError) as failed:
        connected({"url": registry.url}).find("t-value", None)
    assert failed.value.code == "DELIVERED_REGISTRY_UNREACHABLE"


TLS_ALERT = b"\x15\x03\x01\x00\x02\x02\x46"


def expecting_tls(client: socket.socket) -> None:
    if client.recv(1) == b"\x16":
        client.sendall(TLS_ALERT)
        client.recv(4096)


def test_a_kafka_port_of_another_protocol_is_not_waited_for(kafka: Any) -> None:
    """It closes such connections, too; but it answers those of its own protocol."""
    with serving(expecting_tls) as place:
        options = [(place, {}), (kafka.bootstrap, {"kafka.security.protocol": "SSL"})]
        for bootstrap, security in options:
            [found] = checked(delivered.kafka(bootstrap, topic="t", **security).sink())
            assert found[:2] == ("KAFKA_CREDENTIALS", False), found


def http(status: int) -> AbstractContextManager[str]:
    def answer(client: socket.socket) -> None:
        client.recv(65_536)
        client.sendall(f"HTTP/1.1 {status} x\r\nContent-Length: 4\r\nConnection: close\r\n\r\nbusy".encode())

    return serving(answer)


def ask_iceberg(url: str, folder: Path) -> None:
    del folder
    options = {"catalog.type": "rest", "catalog.uri": url}
    open_table(delivered.endpoint("iceberg", table="a.t", **options).sink().options)


def ask_pulsar(url: str, folder: Path) -> None:
    del folder
    place = delivered.endpoint("pulsar", url="pulsar://127.0.0.1:1", adminUrl=url, topic="t", ledger="l.db")
    Admin(place.sink().options).partitions("persistent://public/default/t")


def ask_registry(url: str, folder: Path) -> None:
    del folder
    connected({"url": url}).find("t-value", None)


@pytest.mark.parametrize("ask", [ask_iceberg, ask_pulsar, ask_registry])
@pytest.mark.parametrize("status", [429, 500, 502, 503, 504, 401, 403])
def test_a_busy_server_is_waited_for(tmp_path: Path, ask: Callable[[str, Path], None], status: int) -> None:
    with http(status) as place, within(0.5), pytest.raises(DeliveredError) as failed:
        ask(f"http://{place}", tmp_path)
    waits = status not in (401, 403)
    assert (failed.value.may_come_back, failed.value.exit_code == 3) == (waits, waits), failed.value


@pytest.mark.parametrize(
    ("number", "text", "code"),
    [
        (320, "CONNECTION_FORCED - broker forced connection closure with reason 'shutdown'", "RABBITMQ_UNREACHABLE"),
        (541, "INTERNAL_ERROR - access to vhost '/' refused for user 'u': vhost '/' is down", "RABBITMQ_UNREACHABLE"),
        (530, "NOT_ALLOWED - connection refused: node connection limit (1) is reached", "RABBITMQ_UNREACHABLE"),
        (530, "NOT_ALLOWED - vhost x not found", "RABBITMQ_PERMISSION"),
        (403, "ACCESS_REFUSED - Login was refused using authentication mechanism PLAIN", "RABBITMQ_CREDENTIALS"),
    ],
)
def test_a_rabbitmq_that_starts_or_is_full_is_waited_for(tmp_path: Path, number: int, text: str, code: str) -> None:
    from pika import exceptions

    from delivered.connectors.rabbitmq.client import explained

    place = delivered.endpoint("rabbitmq", url="amqp://h", routingKey="t", ledger=str(tmp_path / "l")).sink().options
    closed = exceptions.ConnectionClosedByBroker(number, text)
    while_opening = exceptions.ProbableAccessDeniedError
    if number == 403:
        while_opening = exceptions.ProbableAuthenticationError
    assert explained(while_opening(repr(closed)), place).code == f"DELIVERED_{code}"
    if number == 320:
        assert explained(closed, place).code == f"DELIVERED_{code}"


def control(rabbitmq: Any, *words: str) -> None:
    """rabbitmqctl, in the environment of the server."""
    *lines, _, last = (rabbitmq.broker.folder / "start.sh").read_text().splitlines()
    exports = "\n".join(line for line in lines if line.startswith("export "))
    command = last.removeprefix("exec ").strip("'").replace("rabbitmq-server", "rabbitmqctl")
    subprocess.run(["/bin/sh", "-c", f"{exports}\nexec '{command}' \"$@\"", "sh", *words], check=True, timeout=60)


def test_a_full_rabbitmq_is_waited_for(rabbitmq: Any, tmp_path: Path) -> None:
    sink = delivered.endpoint("rabbitmq", url=rabbitmq.url, routingKey="t", ledger=str(tmp_path / "l")).sink()
    control(rabbitmq, "set_vhost_limits", '{"max-connections": 0}')
    try:
        [found] = checked(sink)
    finally:
        control(rabbitmq, "clear_vhost_limits")
    assert found[:2] == ("RABBITMQ_UNREACHABLE", True), found


def test_a_full_database_is_waited_for(postgres: Any, mysql: Any) -> None:
    """For a sink and an outbox alike."""
    postgres.execute("DROP ROLE IF EXISTS crowd")
    postgres.execute("CREATE ROLE crowd LOGIN CONNECTION LIMIT 0")
    mysql.execute("CREATE USER IF NOT EXISTS crowd IDENTIFIED BY '' WITH MAX_USER_CONNECTIONS 1")
    mysql.execute("GRANT ALL ON *.* TO crowd")
    with closing(mysql.connect(user="crowd")):
        for server, system in ((postgres, "POSTGRES"), (mysql, "MYSQL")):
            parts = urlsplit(server.url)
            url = parts._replace(netloc="crowd@" + parts.netloc.rpartition("@")[2]).geturl()
            [found] = checked(delivered.endpoint(system.lower(), url=url, dbtable="t").sink())
            assert found[:2] == (f"{system}_UNREACHABLE", True), found
            with within(1):
                [found] = checked(delivered.endpoint("outbox", url=url).source())
            assert found[:2] == ("OUTBOX_UNREACHABLE", True), found


@pytest.mark.parametrize(
    ("name", "waits"), [("REQUEST_TIMEOUT", True), ("TOO_MANY_REQUESTS", True), ("FORBIDDEN", False)]
)
def test_a_busy_rocketmq_is_waited_for(name: str, waits: bool) -> None:
    session: Any = Session.__new__(Session)
    session.library = library()
    session.options = delivered.endpoint("rocketmq", endpoints="h:1", topic="t", ledger="l.db").sink().options
    status = SimpleNamespace(code=getattr(session.library.code, name), message="busy")
    assert session.error_of(status).may_come_back == waits
