"""What became of the orders, read from the servers and files by their own clients: no code of delivered, none of the
shop's programs.
"""

from __future__ import annotations

import json
import sqlite3
import uuid
from collections import Counter
from collections.abc import Hashable, Iterable
from contextlib import closing
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
from confluent_kafka import Consumer, TopicPartition
from deltalake import DeltaTable

CENTS = {"book": 1290, "lamp": 4995, "chair": 12900, "pen": 149}
ORDERS, MAILS = "outbox.event.order", "outbox.event.mail"


@dataclass(frozen=True)
class Verdict:
    """
    Attributes:
        lost: orders that a place should have and has not, over all places.
        doubled: what a place has more often than it should, or should not have at all.
        balance: charged, less refunded, less what paid orders cost.
        places: name -> (lost, doubled) there.
    """

    orders: int
    paid: int
    compensated: int
    stuck: int
    mails: int
    lost: int
    doubled: int
    balance: Decimal
    places: dict[str, tuple[int, int]]

    @property
    def under_way(self) -> dict[str, int]:
        """What a place has not yet. Money that was lost never comes; it moved when sagas are at rest."""
        return {name: lost for name, (lost, _) in self.places.items() if lost and name != "payments"}

    @property
    def clean(self) -> bool:
        return not (self.lost or self.doubled or self.balance)


def judge(requests: Path, database: str, kafka: str, lake: Path, payments: Path, mails: Path) -> Verdict:
    wanted = [json.loads(line) for line in requests.read_text(encoding="utf-8").splitlines()]
    placed = [(r["id"], r["customer"], r["item"], r["quantity"]) for r in wanted]
    cents = {r["id"]: r["quantity"] * CENTS[r["item"]] for r in wanted}
    enriched = [(*order, cents[order[0]]) for order in placed]
    with psycopg.connect(database) as connection:

        def rows(query: str) -> list[Any]:
            return connection.execute(query).fetchall()

        orders = rows("SELECT id, customer, item, quantity FROM orders")
        table = rows("SELECT id, customer, item, quantity, cents FROM enriched")
        sagas = dict(rows("SELECT id, status FROM delivered_saga"))
        reserved = [id_ for (id_,) in rows("SELECT order_id FROM reservations")]
        shipped = [id_ for (id_,) in rows("SELECT order_id FROM shipments")]
    paid = [id_ for id_, status in sagas.items() if status == "complete"]
    moves = Counter(_moves(payments))
    mailed = [line.split()[0] for line in mails.read_text(encoding="utf-8").splitlines()] if mails.exists() else []
    resting = [id_ for id_, status in sagas.items() if status in ("complete", "compensated", "stuck")]
    places = {
        "orders": _differ(placed, orders),
        "topic of orders": _differ(list(cents), _keys(kafka, ORDERS)),
        "PostgreSQL": _differ(enriched, table),
        "Delta": _differ(enriched, _rows_of_delta(lake)),
        "sagas at rest": _differ(list(cents), resting),
        "reservations": _differ(paid, reserved),
        "payments": _differ(_expected_moves(paid, cents, moves).elements(), moves.elements()),
        "shipments": _differ(paid, shipped),
        "topic of mails": _differ(paid, _keys(kafka, MAILS)),
        "mails": _differ(paid, mailed),
    }
    taken = sum((1 if kind == "charge" else -1) * amount * n for (_, kind, amount), n in moves.items())
    return Verdict(
        orders=len(orders),
        paid=len(paid),
        compensated=sum(status == "compensated" for status in sagas.values()),
        stuck=sum(status == "stuck" for status in sagas.values()),
        mails=len(mailed),
        lost=sum(lost for lost, _ in places.values()),
        doubled=sum(doubled for _, doubled in places.values()),
        balance=Decimal(taken - sum(cents.get(id_, 0) for id_ in paid)) / 100,
        places=places,
    )


def _differ(expected: Iterable[Hashable], found: Iterable[Hashable]) -> tuple[int, int]:
    """What is missing, and what is there too often."""
    must, is_there = Counter(expected), Counter(found)
    return (must - is_there).total(), (is_there - must).total()


def _expected_moves(paid: list[str], cents: dict[str, int], moves: Counter[Any]) -> Counter[Any]:
    """A paid order is charged once. Any other one is not, or it is charged and refunded once."""
    expected = Counter({(id_, "charge", cents.get(id_, 0)): 1 for id_ in paid})
    for id_, kind, amount in moves:
        if kind == "charge" and id_ not in paid:
            expected |= Counter({(id_, "charge", amount): 1, (id_, "refund", amount): 1})
    return expected


def _moves(payments: Path) -> list[tuple[str, str, int]]:
    """Each time that money moved: order, charge or refund, cents."""
    with closing(sqlite3.connect(payments)) as books:
        if not books.execute("SELECT 1 FROM sqlite_master WHERE name = 'moves'").fetchall():
            return []
        return books.execute("SELECT order_id, kind, cents FROM moves").fetchall()


def _keys(bootstrap: str, topic: str) -> list[str]:
    """Of every record that a read_committed reader finds."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap, "group.id": uuid.uuid4().hex, "isolation.level": "read_committed",
            "enable.partition.eof": True, "enable.auto.commit": False,
        }
    )  # fmt: skip
    try:
        partitions = consumer.list_topics(topic, 30).topics[topic].partitions
        consumer.assign([TopicPartition(topic, p, 0) for p in partitions])
        found: list[str] = []
        ended: set[int] = set()
        while len(ended) < len(partitions):
            for message in consumer.consume(10_000, 0.2):
                if message.error():
                    ended.add(message.partition())
                else:
                    found.append(message.key().decode())
        return found
    finally:
        consumer.close()


def _rows_of_delta(lake: Path) -> list[tuple[Any, ...]]:
    if not DeltaTable.is_deltatable(str(lake)):
        return []
    table = DeltaTable(str(lake)).to_pyarrow_table(columns=["id", "customer", "item", "quantity", "cents"])
    return list(zip(*(column.to_pylist() for column in table.columns), strict=True))
