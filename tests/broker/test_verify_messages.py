"""The judge's message readers, with real servers: they consume nothing, lose nothing when the server dies, and
detect the end."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.broker.send_help import writer

from delivered.model.capability import Guarantee
from delivered.model.fingerprint import Fingerprint
from delivered.pipeline.registry import find_sink
from delivered_lab import brokers
from delivered_lab.verify.proxy import ANSWERED, ASKED, Fired, NetworkFault, Rule, StreamProxy
from delivered_lab.verify.systems import SINK_KINDS
from delivered_lab.verify.systems.activemq import ArtemisQueue
from delivered_lab.verify.systems.base import Poll, SinkPlace
from delivered_lab.verify.systems.messages import Messages
from delivered_lab.verify.systems.pulsar import PulsarTopic
from delivered_lab.verify.systems.rabbitmq import RabbitExchange
from delivered_lab.verify.systems.rocketmq import RocketTopic
from delivered_lab.verify.workloads import WORKLOADS

READERS: dict[str, type[Messages]] = {
    "rabbitmq": RabbitExchange,
    "activemq": ArtemisQueue,
    "pulsar": PulsarTopic,
    "rocketmq": RocketTopic,
}


def made(system: str, broker: brokers.Broker, folder: Path, name: str) -> Messages:
    drain = READERS[system](SINK_KINDS[system], SinkPlace(name, broker, folder, None, WORKLOADS["keyed"]))
    drain.create()
    return drain


def send(drain: Messages, *values: str, batch: int = 0) -> None:
    options = drain.options()
    keys = pa.array([b"k"] * len(values))
    columns = {"key": keys, "value": pa.array([v.encode() for v in values])}
    sink = find_sink(options.pop("format"), options)
    task: Any = writer(sink, Guarantee.AT_LEAST_ONCE, batch)
    task.stage(pa.RecordBatch.from_pydict(columns))
    task.prepare(Fingerprint())


def values(drain: Messages) -> list[str]:
    return [r.value for r in drain.read()]


def as_sent(system: str, found: list[str]) -> list[str]:
    """RocketMQ accepts requests of a hundred messages in any order."""
    return found if SINK_KINDS[system].ordered else sorted(found, key=lambda v: [int(n) for n in v.split()[1:]])


@pytest.mark.parametrize("system", READERS)
def test_everything_is_read_in_order_and_again(system: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    drain = made(system, request.getfixturevalue(system).broker, tmp_path, f"{request.node.name}-{tmp_path}")
    assert values(drain) == []
    sent = [f"row {n}" for n in range(300)]
    send(drain, *sent)
    looks: list[Poll] = []
    stop = threading.Event()
    reader = threading.Thread(target=drain.follow, args=(looks.append, stop))
    reader.start()
    assert as_sent(system, values(drain)) == sent
    send(drain, "row 300", batch=1)
    assert as_sent(system, values(drain)) == [*sent, "row 300"]
    stop.set()
    reader.join(60)
    assert [r.value for look in looks for r in look.rows] == values(drain)
    positions = [r.position for look in looks for r in look.rows]
    assert positions == sorted(set(positions))
    drain.remove()


@pytest.mark.matrix
@pytest.mark.parametrize("system", READERS)
def test_a_reader_lives_through_a_kill_of_the_server(
    system: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    own = request.getfixturevalue(f"new_{system}")()
    drain = made(system, own.broker, tmp_path, "killed")
    looks: list[Poll] = []
    stop = threading.Event()
    reader = threading.Thread(target=drain.follow, args=(looks.append, stop))
    reader.start()
    sent: list[str] = []
    for batch in range(3):
        new = [f"row {batch} {n}" for n in range(200)]
        send(drain, *new, batch=batch)
        sent += new
        own.broker.kill()
        own.broker.restart()
    assert as_sent(system, values(drain)) == sent
    stop.set()
    reader.join(60)
    assert as_sent(system, [r.value for look in looks for r in look.rows]) == sent


def test_a_connection_breaks_when_so_many_pieces_went_one_way(rabbitmq: Any) -> None:
    import pika

    fired: list[Fired] = []
    proxy = StreamProxy(rabbitmq.broker.bootstrap, fired.append)
    url = rabbitmq.url.replace(rabbitmq.broker.bootstrap, proxy.bootstrap)
    for way, fault in ((ANSWERED, NetworkFault.LOSE_REPLY), (ASKED, NetworkFault.LOSE_REQUEST)):
        proxy.add(Rule(way, fault, skip=2))
        with pytest.raises(pika.exceptions.AMQPError):
            pika.BlockingConnection(pika.URLParameters(url)).channel()
    pika.BlockingConnection(pika.URLParameters(url)).close()
    assert [f.rule for f in fired] == ["lose_reply:answered", "lose_request:asked"]
    proxy.close()
