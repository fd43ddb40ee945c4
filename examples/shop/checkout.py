"""The checkout of an order, as a saga. Its first, third and last steps are rows in PostgreSQL, the second is a call."""

from __future__ import annotations

import os
import uuid
from dataclasses import replace
from typing import Any

import psycopg

from delivered.patterns import outbox
from delivered.patterns.saga import NO_UNDO, Call, Http, Rejected, Saga, Step

LARGEST_PARCEL = 8
_MESSAGES = uuid.UUID("5f0b1c52-58c4-4e0c-9d6f-0a55c3f0c3b1")


def _in_database(statement: str, *values: Any) -> None:
    with psycopg.connect(os.environ["SHOP_DATABASE"]) as connection:
        connection.execute(statement, values)


def reserve(call: Call) -> None:
    _in_database(
        "INSERT INTO reservations VALUES (%s, %s, %s) ON CONFLICT DO NOTHING",
        call.id, call.data["item"], call.data["quantity"],
    )  # fmt: skip


def release(call: Call) -> None:
    _in_database("DELETE FROM reservations WHERE order_id = %s", call.id)


def ship(call: Call) -> None:
    if call.data["quantity"] > LARGEST_PARCEL:
        raise Rejected(f"{call.data['quantity']} pieces do not fit into a parcel")
    _in_database("INSERT INTO shipments VALUES (%s, %s) ON CONFLICT DO NOTHING", call.id, call.data["customer"])


def call_back(call: Call) -> None:
    _in_database("DELETE FROM shipments WHERE order_id = %s", call.id)


def confirm(call: Call) -> None:
    """The message's id is made of the step's key, so a second call stores no second one."""
    with psycopg.connect(os.environ["SHOP_DATABASE"]) as connection:
        outbox.put(
            connection, id=uuid.uuid5(_MESSAGES, call.key), aggregate_type="mail", aggregate_id=call.id, type="paid",
            payload={"id": call.id, "customer": call.data["customer"], "cents": call.data["cents"]},
            on_duplicate="ignore",
        )  # fmt: skip


def _payment(path: str) -> Any:
    send = Http(f"{os.environ.get('SHOP_PAYMENTS', 'http://127.0.0.1:8088')}/{path}/{{id}}", timeout_s=5)
    if os.environ.get("SHOP_WITHOUT") != "keys":
        return send
    # Wrong, on purpose: an id that is made at each try protects nothing.
    return lambda call: send(replace(call, key=uuid.uuid4().hex))


_TRIES: dict[str, Any] = {"backoff_s": 0.2, "attempts_max": 10, "timeout_s": 15.0}

checkout = Saga(
    "checkout",
    [
        Step("reserve", reserve, undo=release, takes_key=True, **_TRIES),
        Step("pay", _payment("charge"), undo=_payment("refund"), takes_key=True, **_TRIES),
        Step("ship", ship, undo=call_back, takes_key=True, **_TRIES),
        Step("confirm", confirm, undo=NO_UNDO, takes_key=True, **_TRIES),
    ],
)
