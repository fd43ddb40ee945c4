"""python -m examples.shop.application REQUESTS: takes the orders of a file of requests, each when it is due.

A customer who got no answer sends the request again, with the same ids.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import psycopg

from delivered.patterns import outbox

REPEATED = 5
"""Requests that customers send again after the application was away."""


def take(connection: psycopg.Connection[Any], request: dict[str, Any]) -> None:
    """The order and its message, or neither."""
    order = {name: request[name] for name in ("id", "customer", "item", "quantity")}
    entry = outbox.put(
        connection, id=request["message"], aggregate_type="order", aggregate_id=request["id"], type="placed",
        payload=order, on_duplicate="ignore",
    )  # fmt: skip
    if entry.stored:
        connection.execute(
            "INSERT INTO orders (id, n, customer, item, quantity) VALUES (%s, %s, %s, %s, %s)",
            [request["id"], request["n"], *list(order.values())[1:]],
        )
    connection.commit()


def main() -> None:
    requests = [json.loads(line) for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()]
    with psycopg.connect(os.environ["SHOP_DATABASE"]) as connection:
        ((last,),) = connection.execute("SELECT coalesce(max(n), -1) FROM orders").fetchall()
        connection.commit()
        for request in requests[max(0, last + 1 - REPEATED) :]:
            time.sleep(max(0.0, request["due"] - time.time()))
            take(connection, request)


if __name__ == "__main__":
    main()
