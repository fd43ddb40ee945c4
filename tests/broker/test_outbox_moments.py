"""Values of PostgreSQL that Python has not, as a change stream gives them: exact, or named."""

from __future__ import annotations

import re
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from tests.broker.outbox_help import Stream

from delivered.connectors.outbox import CONNECTOR
from delivered.model.errors import BadRecord

DAY_US = 86_400_000_000


def test_times_beyond_python_and_before_christ_are_exact(postgres_log: Any) -> None:
    """Infinity has no counterpart in Spark; other times of PostgreSQL have, to the year 294247."""
    with psycopg.connect(postgres_log.url, autocommit=True) as connection:
        connection.execute(
            "CREATE TABLE moments (id int PRIMARY KEY, day date, at timestamp, zoned timestamptz, n float8)"
        )
        options = {"url": postgres_log.url, "table": "moments"}
        stream = Stream(CONNECTOR.source(options).planned())
        stream.batch()
        values = {
            "0001-01-01 BC": (-719_528, 0.0), "20000-01-01": (6_585_322, float("inf")), "2024-02-29": (19_782, -0.0),
            "4714-11-24 BC": (-2_440_588, float("-inf")), "294247-01-10": (106_751_991, float("nan")),
        }  # fmt: skip
        for n, (text, (_, number)) in enumerate(values.items()):
            moment = text.replace(" BC", " 00:00:00.000001 BC") if "BC" in text else f"{text} 00:00:00.000001"
            zoned = moment.replace(" BC", "+01 BC") if "BC" in moment else f"{moment}+01"
            zoned = f"{moment}+00" if text.startswith("4714") else zoned
            row = (n, text, moment, zoned.replace("BC+00", "+00 BC"), number)
            connection.execute("INSERT INTO moments VALUES (%s, %s::date, %s::timestamp, %s::timestamptz, %s)", row)
        table = stream.batch()
        assert table is not None
        days = [day for day, _ in values.values()]
        assert table["day"].combine_chunks().cast(pa.int32()).to_pylist() == days
        assert table["at"].combine_chunks().cast(pa.int64()).to_pylist() == [d * DAY_US + 1 for d in days]
        hour = 3_600_000_000
        zones = [d * DAY_US + 1 - (hour if d != -2_440_588 else 0) for d in days]
        assert table["zoned"].combine_chunks().cast(pa.int64()).to_pylist() == zones
        assert repr(table["n"].to_pylist()) == repr([n for _, n in values.values()])
        connection.execute("INSERT INTO moments (id, at) VALUES (8, '2024-01-01')")
        connection.execute("INSERT INTO moments (id, at) VALUES (9, '294276-12-31')")
        connection.execute("UPDATE moments SET at = '2024-01-01' WHERE id = 9")
        with pytest.raises(BadRecord, match=r"OUTBOX_VALUE.*column at") as caught:
            stream.batch()
        start = stream.at
        stream.close()
        [position] = re.findall(r'"schemaChange", "([0-9A-F/]+)"', str(caught.value))
        stream = Stream(CONNECTOR.source({**options, "schemaChange": position}).planned(), start)
        table = stream.batch()
        assert table is not None
        assert table.select(["id", "_op"]).to_pylist() == [{"id": 8, "_op": "insert"}, {"id": 9, "_op": "update"}]
        stream.close()
