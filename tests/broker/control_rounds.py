"""What Kafka alone does when it is killed while transactions end. confluent-kafka writes; no part of our engine runs.

Each round opens transactions with confluent-kafka, one producer each, and ends all of them at once: by librdkafka
(transactions of version 1), or by EndTxn of version 5 (transactions of version 2: the coordinator raises the epoch with
each end). The broker is killed as soon as some ends were answered. After its restart, and once its coordinator reports
every transaction as ended, the partitions are asked what they still hold open, and a read_committed reader counts.

    python -m tests.broker.control_rounds --kills 5 --transactions 50 --end librdkafka|5 --out control.json
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaException, Producer
from tests.broker.restart_rounds import INTERVAL, start, use_version
from tests.kafka_tools import read_committed

from delivered.clients.kafka.protocol import Wire
from delivered.clients.kafka.transactions import (
    OPEN_STATES,
    Transaction,
    describe,
    describe_all,
    initialise,
    open_in,
    partitions_of,
)
from delivered.model.work import Ok
from delivered_lab.brokers import kafka as server

PARTITIONS = 4
"""Of each transaction's topic. Many partitions make a broker's start longer than that of its coordinator."""
RECORDS = 100


def opened(kafka: Any, topic: str, name: str) -> Producer:
    """A transaction with acknowledged records in every partition."""
    producer = Producer(
        {
            "bootstrap.servers": kafka.bootstrap,
            "transactional.id": name,
            "transaction.timeout.ms": 600_000,
            "log_level": 0,
        }
    )
    producer.init_transactions(60)
    producer.begin_transaction()
    for i in range(RECORDS):
        producer.produce(topic, f"{name}/{i}".encode(), partition=i % PARTITIONS)
    assert producer.flush(60) == 0
    return producer


def end_by_librdkafka(producers: list[Producer], answers: int) -> None:
    """Commit all from a thread each; returns once some have returned."""
    answered = threading.Semaphore(0)

    def commit(producer: Producer) -> None:
        with suppress(KafkaException):
            producer.commit_transaction(60)
            answered.release()

    for producer in producers:
        threading.Thread(target=commit, args=(producer,), daemon=True).start()
    for _ in range(answers):
        answered.acquire(timeout=30)


def end_by_request(wire: Wire, held: list[Transaction], answers: int) -> None:
    """EndTxn(commit) of version 5 for all, one after the other without waiting."""
    from kafka.protocol.producer.transaction import EndTxnRequest

    wire.find_coordinators([h.transactional_id for h in held])
    sent = []
    for h in held:
        request = EndTxnRequest(
            transactional_id=h.transactional_id,
            producer_id=h.producer_id,
            producer_epoch=h.epoch,
            committed=True,
            min_version=5,
            max_version=5,
        )
        sent.append(wire.post(request, wire.coordinator(h.transactional_id)))
    for pending in sent[:answers]:
        assert pending.answer(30).error_code == 0


def one(cluster: Any, number: int, count: int, end: str, rng: random.Random) -> dict[str, Any]:
    kafka = cluster.kafka
    spread = [[1 + (i + j) % 3 for j in range(3)] for i in range(PARTITIONS)]
    topics = [kafka.topic(PARTITIONS) if len(cluster.brokers) == 1 else kafka.topic(*spread) for _ in range(count)]
    names = [f"control-{number}-{i}" for i in range(count)]
    with ThreadPoolExecutor(8) as pool:
        producers = list(pool.map(lambda topic, name: opened(kafka, topic, name), topics, names))
    wire = Wire({"bootstrap.servers": kafka.bootstrap})
    held = [t.participant for name in names if (t := describe(wire, name)) is not None]
    answers = rng.randrange(count)
    if end == "librdkafka":
        end_by_librdkafka(producers, answers)
    else:
        end_by_request(wire, held, answers)
    cluster.kill()
    cluster.restart()
    wire.close()
    wire = Wire({"bootstrap.servers": kafka.bootstrap})
    # librdkafka's clients go on by themselves, and end what is still open. What nobody ends would hide records, too.
    unfinished = OPEN_STATES if end == "librdkafka" else OPEN_STATES[1:]
    deadline = time.monotonic() + 120
    now = describe_all(wire, names)
    while any(t is not None and t.state in unfinished for t in now.values()) and time.monotonic() < deadline:
        time.sleep(0.05)
        now = describe_all(wire, names)
    for t in now.values():
        if t is not None and t.state == "Ongoing":
            assert isinstance(initialise(wire, t.transactional_id, 600_000, deadline), Ok)
    states = Counter("unknown" if t is None else t.state for t in now.values())
    committed = {name for name, t in now.items() if t is not None and t.state == "CompleteCommit"}
    raised = sum(1 for h in held if (t := now[h.transactional_id]) is not None and t.participant.epoch > h.epoch)
    ids = {h.producer_id for h in held if h.transactional_id in committed}
    hanging, _ = open_in(wire, partitions_of(wire, topics), ids, time.monotonic() + 60)
    visible = {name: len(read_committed(kafka.bootstrap, topic)) for name, topic in zip(names, topics, strict=True)}
    wire.close()
    return {
        "transactions": count,
        "answered_before_the_kill": answers,
        "states": dict(states),
        "epochs_raised": raised,
        "committed_records": RECORDS * len(committed),
        "visible_records": sum(visible[name] for name in committed),
        "partitions_held_open": len({(h.topic, h.partition) for h in hanging}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--transactions", type=int, default=50)
    parser.add_argument("--end", default="librdkafka", choices=("librdkafka", "5"))
    parser.add_argument("--abort-interval", type=int, default=10_000, help="of the coordinator, milliseconds")
    parser.add_argument("--brokers", type=int, default=1, choices=(1, 3))
    parser.add_argument("--kafka", default=server.VERSION, help="its version")
    parser.add_argument("--out", type=Path, default=None, help="a JSON file; results are added to its list")
    given = parser.parse_args()
    use_version(given.kafka)
    rng = random.Random(given.seed)
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="delivered-control-") as folder:
        cluster = start(Path(folder), given.brokers, {INTERVAL: str(given.abort_interval)})
        try:
            for number in range(given.kills):
                rounds.append(one(cluster, number, given.transactions, given.end, rng))
                print(json.dumps(rounds[-1]), flush=True)
        finally:
            cluster.stop()
    found = {
        "kafka": given.kafka,
        "brokers": given.brokers,
        "end": f"EndTxn {given.end}" if given.end != "librdkafka" else given.end,
        "seed": given.seed,
        "abort_interval_ms": given.abort_interval,
        "kills": len(rounds),
        "kills_with_hidden_records": sum(1 for r in rounds if r["visible_records"] < r["committed_records"]),
        **{
            k: sum(r[k] for r in rounds)
            for k in ("transactions", "epochs_raised", "committed_records", "visible_records")
        },
    }
    print(json.dumps(found, indent=1))
    if given.out is not None:
        known = json.loads(given.out.read_text()) if given.out.exists() else []
        given.out.write_text(json.dumps([*known, found], indent=1) + "\n")


if __name__ == "__main__":
    main()
