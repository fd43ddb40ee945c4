"""A receiver, `delivered run` and a task started while their server is unreachable: they wait, or give up."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from tests.broker.send_help import rows, writer
from tests.support.pulsar import read_all, sink, source
from tests.support.servers import Pulsar, Rabbitmq
from tests.support.sinks import Rig, offsets

import delivered
from delivered.connectors.log.produce import append
from delivered.engine.decide import commit_batch
from delivered.model.errors import Unreachable
from delivered.model.fingerprint import Fingerprint
from delivered.model.patience import patiently, serving_query
from delivered.pipeline.registry import find_sink
from delivered.planner import Plan, Refusal

RUN = [sys.executable, "-m", "delivered.cli.main", "run"]


@pytest.fixture
def once_told() -> Iterator[Callable[[Callable[[], None]], list[str]]]:
    """`once_told(act)`: log lines of an outage; `act` is called with the first one."""
    log, handlers = logging.getLogger("delivered.outage"), list[logging.Handler]()

    def install(act: Callable[[], None]) -> list[str]:
        said: list[str] = []

        class Act(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                said.append(record.getMessage())
                if len(said) == 1:
                    act()

        handlers.append(Act())
        log.addHandler(handlers[-1])
        return said

    yield install
    for handler in handlers:
        log.removeHandler(handler)


@pytest.mark.matrix  # test_database_outage.py waits for a server, unit/test_patience.py tells it
def test_run_waits_for_its_server(new_postgres: Callable[..., Any], once_told: Any, tmp_path: Path) -> None:
    server = new_postgres()
    server.execute("CREATE TABLE orders (key bytea, value bytea)")
    server.broker.stop()
    append(str(tmp_path / "in"), pa.table({"key": [b"k"], "value": [b"v"]}))
    given = {
        "pipeline": "orders",
        "guarantee": "exactly_once",
        "checkpoint": "checkpoint",
        "source": {"format": "log", "path": "in"},
        "transform": {"select": ["key", "value"]},
        "sinks": [{"format": "postgres", "url": server.url, "dbtable": "orders"}],
    }
    file = tmp_path / "orders.yaml"
    file.write_text(yaml.safe_dump(given))

    gave_up = subprocess.run([*RUN, str(file), "--no-wait"], capture_output=True, text=True, timeout=120)
    assert gave_up.returncode == 3
    assert "DELIVERED_POSTGRES_UNREACHABLE" in gave_up.stderr
    assert "waiting up to" not in gave_up.stderr

    waiting = subprocess.Popen([*RUN, str(file)], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert waiting.stderr is not None
    try:
        said = next(line for line in waiting.stderr if "does not answer, retrying (" in line)
        assert said[:2] == "20", "with a time stamp"
        os.kill(waiting.pid, signal.SIGTERM)
        assert waiting.wait(60) == 0, "told to stop, it stops"
    finally:
        waiting.kill()

    def away(answer: Plan | Refusal) -> Any:
        return answer.error if isinstance(answer, Refusal) and answer.transient else None

    pipeline = delivered.Pipeline.from_file(file)
    said_all = once_told(server.broker.restart)
    assert isinstance(patiently("PostgreSQL", pipeline.plan, away=away), Plan)
    assert "waiting up to 120 s" in said_all[0]


@pytest.mark.matrix  # the run above waits in the same way
def test_a_receiver_waits_for_its_server(new_rabbitmq: Callable[[], Any], once_told: Any, tmp_path: Path) -> None:
    server = new_rabbitmq()
    queue = server.queue()
    server.send(queue, [("1", b"value")])
    server.broker.stop()
    source = delivered.endpoint("rabbitmq", url=server.url, queue=queue, log=str(tmp_path / "log"))
    with pytest.raises(Unreachable, match="RABBITMQ_UNREACHABLE"):
        delivered.receive(source, patience_s=0)

    said = once_told(server.broker.restart)
    taken: list[int] = []
    delivered.receive(source, idle_s=3, report=lambda _, counts: taken.append(counts.entered))
    assert "waiting up to 120 s" in said[0]
    assert taken[-1] == 1


@pytest.mark.matrix
def test_a_task_waits_for_pulsar(new_pulsar: Callable[..., Pulsar], once_told: Any, tmp_path: Path) -> None:
    """Under exactly_once, then at_least_once."""
    pulsar = new_pulsar()
    topic = pulsar.topic(2)
    rig = Rig(sink(tmp_path, pulsar, topic))
    context = rig.context()
    commit_batch(context, 0, offsets(0), rig.write(rig.plan(context, 0)))
    plan = rig.plan(context, 1, first=False)
    pulsar.broker.stop()
    with pytest.raises(Unreachable, match="PULSAR_UNREACHABLE"):
        rig.write(plan)  # outside of a query
    said = once_told(pulsar.broker.restart)
    with serving_query():
        commit_batch(context, 1, offsets(1), rig.write(plan))
    assert "waiting up to 120 s" in said[0]
    assert read_all(source(pulsar, topic)).num_rows == 200

    pulsar.broker.stop()
    said = once_told(pulsar.broker.restart)
    with serving_query():
        task = writer(rig.sink)
        task.stage(rows(100))
        task.prepare(Fingerprint())
    assert "waiting up to 120 s" in said[0]
    assert read_all(source(pulsar, topic)).num_rows == 300


@pytest.mark.matrix
def test_a_task_waits_for_rabbitmq(new_rabbitmq: Callable[[], Rabbitmq], once_told: Any, tmp_path: Path) -> None:
    rabbitmq = new_rabbitmq()
    queue = rabbitmq.queue()
    made = find_sink("rabbitmq", {"url": rabbitmq.url, "routingKey": queue, "ledger": str(tmp_path / "ledger.db")})
    rabbitmq.broker.stop()
    with pytest.raises(Unreachable, match="RABBITMQ_UNREACHABLE"):
        writer(made).stage(rows(100))  # outside of a query
    said = once_told(rabbitmq.broker.restart)
    with serving_query():
        task = writer(made)
        task.stage(rows(100))
        task.prepare(Fingerprint())
    assert "waiting up to 120 s" in said[0]
    connection = rabbitmq.connect()
    try:
        assert connection.channel().queue_declare(queue, passive=True).method.message_count == 100
    finally:
        connection.close()
