"""Decoding of pgoutput's messages, and options of the outbox source. Bytes as PostgreSQL 16 sent them."""

from __future__ import annotations

import struct

import pytest

from delivered.connectors.outbox import CONNECTOR
from delivered.connectors.outbox.pgoutput import UNCHANGED, Begin, Change, Decoder, Op
from delivered.connectors.outbox.source import lock_key
from delivered.model.errors import InvariantBroken, UsageError

RELATION = (
    b"R" + struct.pack(">I", 16391) + b"public\0orders\0d" + struct.pack(">H", 2)
    + b"\x01id\0" + struct.pack(">Ii", 23, -1) + b"\0name\0" + struct.pack(">Ii", 25, -1)
)  # fmt: skip


def row(*values: bytes | object | None) -> bytes:
    found = struct.pack(">H", len(values))
    for value in values:
        if isinstance(value, bytes):
            found += b"t" + struct.pack(">I", len(value)) + value
        else:
            found += b"n" if value is None else b"u"
    return found


OID = struct.pack(">I", 16391)


def test_changes() -> None:
    decoder = Decoder()
    (begin,) = decoder.decode(b"B" + struct.pack(">QqI", 25829624, 841_000_000, 735))
    assert begin == Begin(25829624, 946_684_800_000_000 + 841_000_000)
    assert decoder.decode(RELATION) == []
    (insert,) = decoder.decode(b"I" + OID + b"N" + row(b"1", None))
    assert isinstance(insert, Change)
    assert (insert.op, insert.new, insert.relation.columns) == (Op.INSERT, (b"1", None), ("id", "name"))
    assert insert.relation.keys == (True, False)
    (update,) = decoder.decode(b"U" + OID + b"K" + row(b"1", None) + b"N" + row(b"2", UNCHANGED))
    assert isinstance(update, Change)
    assert (update.op, update.old, update.new) == (Op.UPDATE, (b"1", None), (b"2", UNCHANGED))
    (delete,) = decoder.decode(b"D" + OID + b"O" + row(b"2", b"x"))
    assert isinstance(delete, Change)
    assert (delete.op, delete.old, delete.new) == (Op.DELETE, (b"2", b"x"), None)
    assert [c.op for c in decoder.decode(b"T" + struct.pack(">IB", 1, 0) + OID)] == [Op.TRUNCATE]  # type: ignore[union-attr]
    assert decoder.decode(b"C" + b"\0" * 25) == []


@pytest.mark.parametrize(
    "data",
    [
        b"", b"S\0", b"I\0\0\0\x01N\0\0", b"I" + OID + b"K" + row(b"1", None), b"I" + OID + b"N\0\x01t\0\0\0\x09ab",
        b"U" + OID + b"N\0\x01z", RELATION[:-6],
    ],
)  # fmt: skip
def test_what_protocol_1_does_not_have_stops(data: bytes) -> None:
    decoder = Decoder()
    decoder.decode(RELATION)
    with pytest.raises(InvariantBroken, match="PGOUTPUT"):
        decoder.decode(data)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"url": "oracle://h/db"}, "is not of the form postgresql://host/db"),
        ({"url": "postgresql://u:p@h/db"}, "contains a password"),
        ({"columns": "body"}, "must be like payload=body"),
        ({"columns": "body=payload"}, "must be like payload=body"),
        ({"slot": "Outbox"}, "lower-case letters"),
        ({"dbtable": 'a"b'}, "unquoted"),
        ({"startingOffsets": "{}"}, "offsets as Spark logs them"),
        ({"method": "log", "url": "sqlite:///a.db"}, "only PostgreSQL"),
    ],
)
def test_options_that_are_refused(options: dict[str, str], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        CONNECTOR.source({"url": "postgresql://h/db", **options})
    assert text in str(caught.value)


def test_defaults_follow_the_table_and_the_database() -> None:
    made = CONNECTOR.source({"url": "postgresql://u@h:5433/shop", "dbtable": "sales.Outbox", "columns": "payload=body"})
    options = made.options  # type: ignore[attr-defined]
    assert (options.slot, options.publication) == ("delivered_sales_outbox", "delivered_sales_outbox")
    assert (options.positions, options.by_log) == ("sales.Outbox_positions", True)
    assert options.columns == ("id", "aggregatetype", "aggregateid", "type", "body")
    lite = CONNECTOR.source({"url": "sqlite:///data/my%20shop.db"}).options  # type: ignore[attr-defined]
    assert (lite.file, lite.by_log, lite.system) == ("/data/my shop.db", False, "SQLite /data/my shop.db")
    assert -(2**63) <= lock_key("delivered_outbox") < 2**63
