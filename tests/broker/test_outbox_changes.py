"""A PostgreSQL table as a change stream: what the log says, as rows that a sink can upsert."""

from __future__ import annotations

import datetime as dt
import re
from decimal import Decimal
from typing import Any

import pytest
from tests.broker.outbox_help import Stream, Table, changed

from delivered.connectors.outbox import CONNECTOR
from delivered.model.errors import BadRecord, Refused, UsageError


@pytest.fixture
def orders(postgres_log: Any) -> Table:
    return Table(postgres_log, "id int PRIMARY KEY, name text")


def test_inserts_updates_and_deletes_in_order_of_commits(orders: Table) -> None:
    orders.execute("INSERT INTO {} VALUES (0, 'before the slot')")
    stream = orders.stream()
    first = stream.batch()
    assert first is not None
    assert first.num_rows == 0, "an empty batch fixes where the stream begins"
    orders.execute("INSERT INTO {} VALUES (1, 'a'), (2, 'b')", "UPDATE {} SET name = 'c' WHERE id = 1")
    orders.execute("DELETE FROM {} WHERE id = 2")
    orders.execute("UPDATE {} SET id = 3 WHERE id = 1")
    orders.execute("INSERT INTO {} VALUES (2, NULL)")
    table = stream.batch()
    assert table is not None
    assert changed(table) == [
        (1, "a", "insert", False), (2, "b", "insert", False), (1, "c", "update", False), (2, None, "delete", True),
        (1, None, "delete", True), (3, "c", "update", False), (2, None, "insert", False),
    ]  # fmt: skip
    by_key: dict[int, list[int]] = {}
    for row in table.to_pylist():
        by_key.setdefault(row["id"], []).append(row["_lsn"])
    assert all(list(dict.fromkeys(sorted(v))) == v for v in by_key.values()), "_lsn orders the changes of a key"
    stream.close()


def test_values_of_every_type(postgres_log: Any) -> None:
    table = Table(
        postgres_log,
        "id bigint PRIMARY KEY, yes bool, small int2, real float4, wide float8, money numeric(12,2), huge numeric, "
        "bytes bytea, day date, at timestamptz, local timestamp, doc jsonb, list int[], uid uuid, "
        "twice bigint GENERATED ALWAYS AS (id * 2) STORED",
    )
    stream = table.stream()
    stream.batch()
    table.execute(
        "INSERT INTO {} VALUES (1, true, 2, 1.5, 2.5, 12.30, 1e30, '\\x00ff', '2024-02-29', "
        "'2024-02-29 12:00:00.123456+02', '2024-02-29 12:00:00', '{{\"a\": 1}}', '{{1,2}}', "
        "'00000000-0000-0000-0000-000000000001')",
        "INSERT INTO {} (id) VALUES (2)",
    )
    found = stream.batch()
    assert found is not None
    first, second = (row[:-2] for row in changed(found))
    assert first == (
        1, True, 2, 1.5, 2.5, Decimal("12.30"), "1" + "0" * 30, b"\x00\xff", dt.date(2024, 2, 29),
        dt.datetime(2024, 2, 29, 10, 0, 0, 123456, dt.UTC), dt.datetime(2024, 2, 29, 12),  # noqa: DTZ001
        '{"a": 1}', "{1,2}", "00000000-0000-0000-0000-000000000001",
    )  # fmt: skip
    assert second == (2, *[None] * 13)
    table.execute("INSERT INTO {} (id, day) VALUES (3, 'infinity')")
    with pytest.raises(BadRecord, match=r"OUTBOX_VALUE.*column day"):
        stream.batch()
    stream.close()


def test_values_do_not_depend_on_settings_of_role_or_database(postgres_log: Any) -> None:
    """pgoutput writes values as text in the form that the reading session has."""
    table = Table(
        postgres_log,
        "id int PRIMARY KEY, bytes bytea, wide float8, real float4, day date, at timestamptz, local timestamp, "
        "span interval, price money, spans interval[], pair point",
    )
    hostile = {
        "bytea_output": "escape", "extra_float_digits": "-15", "DateStyle": "German", "IntervalStyle": "sql_standard",
        "TimeZone": "America/New_York", "lc_monetary": "C",
    }  # fmt: skip
    stream = table.stream(settings=" ".join(f"-c {k}={v}" for k, v in hostile.items()))
    stream.batch()
    table.execute(
        "INSERT INTO {} VALUES (1, '\\x6162636465ff', 0.30000000000000004, 0.1::float4, '2024-03-01', "
        "'2024-03-01 12:00:00.000001+00', '2024-03-01 12:00:00', '1 year 2 days -03:04:05', '1234.56', "
        "ARRAY['1 day'::interval], point(0.30000000000000004, 1))"
    )
    found = stream.batch()
    assert found is not None
    (row,) = changed(found)
    assert row[:-2] == (
        1, b"abcde\xff", 0.30000000000000004, pytest.approx(0.1), dt.date(2024, 3, 1),
        dt.datetime(2024, 3, 1, 12, 0, 0, 1, dt.UTC), dt.datetime(2024, 3, 1, 12),  # noqa: DTZ001
        "1 year 2 days -03:04:05", "$1,234.56", '{"1 day"}',
        "(0.30000000000000004,1)",
    )  # fmt: skip
    stream.close()


def test_a_large_value_that_an_update_left_alone_is_never_null(orders: Table) -> None:
    orders.execute("ALTER TABLE {} ALTER name SET STORAGE EXTERNAL, ADD n int")
    stream = orders.stream()
    stream.batch()
    orders.execute("INSERT INTO {} VALUES (1, repeat('x', 10000), 1)", "UPDATE {} SET n = 2")
    with pytest.raises(BadRecord, match=r"OUTBOX_UNCHANGED.*column name.*REPLICA IDENTITY FULL"):
        stream.batch()
    stream.close()
    orders.execute("ALTER TABLE {} REPLICA IDENTITY FULL")
    slot = f"delivered_{orders.name}"
    orders.server.execute("SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())", slot)
    ((at,),) = orders.server.execute(
        "SELECT (confirmed_flush_lsn - '0/0')::bigint FROM pg_replication_slots WHERE slot_name = %s", slot
    )
    full = orders.stream({**stream.at, "lsn": at})
    orders.execute("UPDATE {} SET n = 3")
    found = full.batch()
    assert found is not None
    assert [(len(row[1]), row[2]) for row in changed(found)] == [(10_000, 3)]
    full.close()


def test_what_is_not_a_row_stops_the_query(orders: Table) -> None:
    stream = orders.stream()
    stream.batch()
    orders.execute("INSERT INTO {} VALUES (1, 'a')")
    orders.execute("ALTER TABLE {} ADD more int", "INSERT INTO {} VALUES (2, 'b', 3)")
    with pytest.raises(BadRecord, match=r"OUTBOX_COLUMNS.*got the column more"):
        stream.batch()
    stream.close()
    again = orders.stream(stream.at)  # planned anew, with the column
    found = again.batch()
    assert found is not None
    assert changed(found) == [(1, "a", None, "insert", False), (2, "b", 3, "insert", False)]
    again.close()


@pytest.mark.parametrize(
    ("columns", "then", "lacks"),
    [
        ("id int, name text", [], "no primary key"),
        ("id int UNIQUE NOT NULL, name text", ["ALTER TABLE {0} REPLICA IDENTITY USING INDEX {0}_id_key"], "no prim"),
        ("id int, name text", ["ALTER TABLE {} REPLICA IDENTITY FULL"], "no primary key"),
        ("id int PRIMARY KEY DEFERRABLE, name text", [], "deferrable primary key"),
        # UPDATE ... SET id = id + 1 deletes a key after another row got it.
        ("id int PRIMARY KEY DEFERRABLE, name text", ["ALTER TABLE {} REPLICA IDENTITY FULL"], "deferrable primary"),
        ("id int PRIMARY KEY, name text", ["ALTER TABLE {} REPLICA IDENTITY NOTHING"], "IDENTITY NOTHING"),
        (
            "id int PRIMARY KEY, name text UNIQUE NOT NULL",
            [
                "ALTER TABLE {0} REPLICA IDENTITY USING INDEX {0}_name_key",
                "ALTER TABLE {0} DROP CONSTRAINT {0}_name_key",
            ],
            "USING INDEX",
        ),
        (
            "id int, name text) PARTITION BY RANGE (id",
            ["CREATE TABLE {0}_p PARTITION OF {0} (PRIMARY KEY (id)) FOR VALUES FROM (0) TO (9)",
             "CREATE TABLE {0}_q PARTITION OF {0} FOR VALUES FROM (10) TO (99)"],
            "_q .of changes.* no primary key",
        ),
    ],
)  # fmt: skip
def test_a_table_that_the_log_cannot_identify_is_refused_before_its_application_fails(
    postgres_log: Any, columns: str, then: list[str], lacks: str
) -> None:
    table = Table(postgres_log, columns)
    table.execute(*then)
    source = CONNECTOR.source({"url": postgres_log.url, "table": table.name})
    (finding,) = [f for f in source.planned().preflight() if f.refuses]
    assert finding.code == "OUTBOX_IDENTITY"
    assert re.search(lacks, finding.message), finding.message
    stream = Stream(source.planned(), None)
    with pytest.raises(Refused, match="OUTBOX_IDENTITY"):
        stream.batch()
    stream.close()
    assert postgres_log.execute("SELECT 1 FROM pg_publication WHERE pubname LIKE %s", f"%{table.name}%") == []
    table.execute("INSERT INTO {} (id, name) VALUES (1, 'a')", "UPDATE {} SET name = 'b'", "DELETE FROM {}")


def test_only_postgresql_has_change_streams() -> None:
    with pytest.raises(UsageError, match=r"OPTION_CONFLICT.*only PostgreSQL"):
        CONNECTOR.source({"url": "mysql://h/db", "table": "orders"})
    with pytest.raises(UsageError, match="needs method log"):
        CONNECTOR.source({"url": "postgresql://h/db", "table": "orders", "method": "poll"})
