"""A server that accepts connections and answers nothing (SIGSTOP here; a full disk, a stopped virtual machine) does not
answer. It has refused no login."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
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


@pytest.mark.matrix
def test_a_schema_registry_is_unanswered(registry: Any) -> None:
    with paused(registry), within(1), pytest.raises(DeliveredError) as failed:
        connected({"url": registry.url}).find("t-value", None)
    assert failed.value.code == "DELIVERED_REGISTRY_UNREACHABLE"
