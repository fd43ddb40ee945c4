"""Records of an outbox that no row can hold, killed on the way to the dead letters: each is a row or a letter, once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.broker.outbox_help import Shop, Table, shop
from tests.support.halted import run_loop
from tests.support.sweeps import sweep

from delivered.entry import Pipeline
from delivered.operate.dead_letters import dead_letters

POINTS = ["source.read:after", "write.prepare:after", "commit.decide:after", "commit.apply:after", "log:before"]
SOURCES = ["changes", "postgres-log", "postgres-poll", "mysql-poll", "sqlite-poll"]
CASES = [(source, point) for source in SOURCES for point in POINTS]
RECORDS, BAD = 9, (2, 5)
DECODED = """
import pyarrow as pa

def decoded(rows):
    return pa.record_batch({"n": rows.column("key").cast(pa.string())})

def changed(rows):
    return pa.record_batch({"n": rows.column("id").cast(pa.string())})
"""


def filled(request: pytest.FixtureRequest, tmp_path: Path, source: str) -> tuple[dict[str, str], Shop | None]:
    """Options of the source."""
    if source == "changes":
        table = Table(request.getfixturevalue("postgres_log"), "id int PRIMARY KEY, day date")
        stream = table.stream()
        stream.batch()  # makes the slot
        stream.close()
        for n in range(RECORDS):
            table.execute(f"INSERT INTO {{}} VALUES ({n}, '{'infinity' if n in BAD else '2024-01-01'}')")
        return {"url": table.server.url, "table": table.name}, None
    box = shop(request, tmp_path, source)
    if box.dialect == "mysql":
        box.execute(f"ALTER TABLE {box.table} MODIFY payload longtext")
    elif box.dialect == "postgres":
        box.execute(f"ALTER TABLE {box.table} ALTER payload TYPE text")
    for n in range(RECORDS):
        id_, payload = f"018f0000-0000-7000-8000-00000000000{n}", "[" if n in BAD else "[]"
        box.execute(f"INSERT INTO {box.table} VALUES ('{id_}', 'order', '{n}', 'created', '{payload}')")
    return {"url": box.url, "dbtable": box.table, "method": box.method, "payloadFormat": "json"}, box


@pytest.mark.parametrize(
    ("source", "point"), sweep(CASES, lambda source, point: (source, point) == ("changes", "commit.decide:after"))
)
def test_killed_on_the_way_to_the_dead_letters(
    postgres: Any, request: pytest.FixtureRequest, tmp_path: Path, source: str, point: str
) -> None:
    options, box = filled(request, tmp_path, source)
    (tmp_path / "decode.py").write_text(DECODED)
    tables = [f"{source}_{point}_{name}".replace("-", "_").replace(".", "_").replace(":", "_") for name in ("n", "bad")]
    sink, letters = (
        {"format": "postgres", "url": postgres.url, "dbtable": t, "mechanism": "two_phase", "ifNotExists": True}
        for t in tables
    )
    described = {
        "pipeline": f"rejects-{source}", "guarantee": "exactly_once", "checkpoint": "checkpoint",
        "trigger": "available_now", "source": {"format": "outbox", "maxOffsetsPerTrigger": 4, **options},
        "transform": {"arrow": f"decode:{'changed' if box is None else 'decoded'}"},
        "sinks": [sink], "on_bad_row": "dead_letter", "dead_letter": letters,
    }  # fmt: skip
    file = tmp_path / "rejects.yaml"
    file.write_text(yaml.safe_dump(described))

    assert run_loop(file, f"{point}!kill", wait_s=120) != 0
    assert list((tmp_path / "hits").iterdir()), "the process was killed at the point"
    assert run_loop(file, wait_s=120) == 0

    assert postgres.execute(f"SELECT n FROM {tables[0]} ORDER BY n") == [
        (str(n),) for n in range(RECORDS) if n not in BAD
    ]
    found = dead_letters(Pipeline.from_file(file))
    assert {n.sink for n in found} == {"(source)"}
    kept = [json.loads(n.record) for n in found]
    if box is None:
        assert sorted(k["_change"] for k in kept) == [[["id", str(n)], ["day", "infinity"]] for n in BAD]
    else:
        assert sorted((k["key"], k["value"]) for k in kept) == [(str(n), "[") for n in BAD]
