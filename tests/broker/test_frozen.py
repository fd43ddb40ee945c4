"""A server that accepts connections and answers nothing (SIGSTOP here; a full disk, a stopped virtual machine) does not
answer. It has refused no login."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.servers import paused

import delivered
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


def is_unanswered(code: str) -> bool:
    return re.fullmatch(r"(DELIVERED_)?[A-Z]+_(UNREACHABLE|NO_ANSWER)", code) is not None


@pytest.mark.parametrize("name", [n if n == "kafka" else pytest.param(n, marks=pytest.mark.matrix) for n in SINKS])
def test_a_sink_is_unanswered(request: pytest.FixtureRequest, tmp_path: Path, name: str) -> None:
    server = request.getfixturevalue(name.partition(",")[0])
    sink = SINKS[name](server, str(tmp_path / "ledger.db")).sink()
    with paused(server), within(1):
        try:
            found = [(f.code, f.transient, f.message) for f in sink.preflight(Guarantee.AT_LEAST_ONCE)]
        except DeliveredError as error:
            found = [(error.code, error.may_come_back, error.message)]
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


@pytest.mark.parametrize("frozen", [full, silent])
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
