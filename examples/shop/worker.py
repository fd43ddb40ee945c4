"""python -m examples.shop.worker: begins a saga for each enriched order, and runs sagas."""

from __future__ import annotations

import os
import threading
from typing import Any

import psycopg
from examples.shop.checkout import checkout
from psycopg.rows import dict_row

from delivered.patterns.saga import Log, begin, run

THREADS = 4
_LOOK_S = 0.3
_NEW = """
SELECT id, customer, item, quantity, cents FROM enriched e
WHERE NOT EXISTS (SELECT FROM delivered_saga s WHERE s.saga = 'checkout' AND s.id = e.id)
"""


def begin_new(connection: psycopg.Connection[Any]) -> None:
    """Finds orders by what they lack, not by a number: one that was committed late is not skipped."""
    for order in connection.cursor(row_factory=dict_row).execute(_NEW).fetchall():
        begin(connection, checkout, id=order["id"], data=order)
    connection.commit()


def main() -> None:
    database, stop = os.environ["SHOP_DATABASE"], threading.Event()
    running = threading.Thread(
        target=run, args=(Log(database), checkout), kwargs={"forever": True, "threads": THREADS, "stop": stop}
    )
    try:
        with psycopg.connect(database) as connection:
            running.start()
            while running.is_alive():
                begin_new(connection)
                running.join(_LOOK_S)
        raise RuntimeError("the sagas' thread has ended")
    finally:
        stop.set()


if __name__ == "__main__":
    main()
