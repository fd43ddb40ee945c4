"""An audit without Spark classifies as `tests/support/reconcile.py` defines, and knows what it cannot do."""

from __future__ import annotations

import json
import random
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.support.reconcile import Seen, as_sides, histories
from tests.support.reconcile import reconcile as definition
from tests.support.without_spark import deliver

from delivered import Pipeline
from delivered.audit import local
from delivered.audit.evidence import NOBODY, Counts, Damage, Places, Verdict
from delivered.audit.local import audit_here, reconcile
from delivered.audit.request import NeedsSpark
from delivered.connectors.log import append


def places() -> Places:
    both = Places()
    both.add(["0", "1"])
    return both


@pytest.mark.parametrize("seed", range(4))
def test_a_history_is_classified_as_defined(seed: int) -> None:
    """Hundreds of them, each alone, with its samples: at most one per id and class, in the order of the source."""
    seen = Counts()
    for number in range(200):
        sent, found = histories(random.Random(f"{seed}-{number}"), count=3)
        expected = definition(sent, found)
        result = reconcile(*as_sides(sent, found), places(), places(), samples_max=1_000)
        total = sum(expected.values(), Counts())
        assert result.counts == total, (sent, found)
        for damage in Damage:
            assert {s.id for s in result.samples if s.damage is damage} == {
                i for i, c in expected.items() if c.of(damage)
            }
        first = {}
        for s in sorted(sent, key=lambda s: (str(s.partition), s.position)):
            first.setdefault(s.id, str(s.partition))
        for line in result.partitions:
            own = (c for i, c in expected.items() if first.get(i, NOBODY) == line.partition)
            assert line.counts == sum(own, Counts())
        seen += total
    assert all(seen.of(d) > 20 for d in Damage), f"the histories hold too little damage to mean anything: {seen}"


def test_hashes_that_collide_in_one_half_are_told_apart() -> None:
    """One 64-bit hash is sorted by; ids that share it differ in the other."""
    sent, _, found = as_sides([Seen("a", 1, position=0), Seen("b", 2, position=1)], [Seen("b", 2, position=0)])
    sent, found = (replace(s, named=np.zeros_like(s.low)) for s in (sent, found))
    result = reconcile(sent, None, found, places(), places())
    assert result.counts == Counts(sent=2, delivered=1, lost=1)
    assert [s.id for s in result.samples] == ["a"]


ROWS = 30
Settings = dict[str, Any]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A pipeline file, and its log of `ROWS` records."""
    values = [b"v%d" % n for n in range(ROWS)]
    append(str(tmp_path / "log"), pa.table({"key": [b"k"] * ROWS, "value": values}))
    settings = {
        "pipeline": "shop", "guarantee": "exactly_once", "checkpoint": str(tmp_path / "checkpoint"),
        "source": {"format": "log", "path": str(tmp_path / "log"), "maxOffsetsPerTrigger": 10},
        "transform": {"select": ["key", "value"]},
        "sinks": [{"format": "sqlite", "path": str(tmp_path / "shop.db"), "table": "orders"}],
    }  # fmt: skip
    path = tmp_path / "shop.yaml"
    path.write_text(json.dumps(settings))
    return path


@pytest.fixture
def delivered_file(file: Path) -> Path:
    assert deliver(Pipeline.from_file(file)) == 3
    return file


AUDIT = """
import sys

class NoSpark:
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in ("pyspark", "py4j", "pandas"):
            raise AssertionError(f"{name} is imported")

sys.meta_path.insert(0, NoSpark())
from delivered.cli.main import app
app(["audit", *sys.argv[1:]])
"""


def run_audit(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", AUDIT, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_needs_no_spark(delivered_file: Path, tmp_path: Path) -> None:
    """In a process that cannot import pyspark and pandas, a loss is found, with its place; `--spark` wants them."""
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection, connection:
        assert connection.execute("DELETE FROM orders WHERE value = X'7637'").rowcount == 1
    broken = run_audit(str(delivered_file))
    assert broken.returncode == 1, broken.stderr
    assert "1 records are lost" in broken.stdout
    assert "log-0 @ 7" in broken.stdout
    assert "auditing without Spark" in broken.stderr
    forced = run_audit(str(delivered_file), "--spark")
    assert "pyspark is imported" in forced.stdout + forced.stderr


REASONS: dict[str, tuple[Settings, str]] = {
    "sql": ({"transform": {"sql": "SELECT key, value FROM source"}}, "SQL"),
    "id": ({"audit": {"id": "upper(value)"}}, "id"),
    "key": ({"audit": {"key": "substr(value, 1)"}}, "key"),
    "own": ({"audit": {"own": "value LIKE 'v%'"}}, "own"),
    "a literal": ({"audit": {"id": "true"}}, "id"),
    "dedup": ({"dedup": {"by": ["key"], "within": "1 hour"}}, "duplicates"),
}


@pytest.mark.parametrize("name", REASONS)
def test_what_there_is_for_spark_to_do_is_said(delivered_file: Path, name: str) -> None:
    changes, why = REASONS[name]
    delivered_file.write_text(json.dumps(json.loads(delivered_file.read_text()) | changes))
    with pytest.raises(NeedsSpark, match=why):
        here(Pipeline.from_file(delivered_file))


def here(pipeline: Pipeline, **changes: Any) -> Any:
    return audit_here(pipeline, None, 20, None, None, **changes)


def test_a_recomputation_is_for_spark(delivered_file: Path) -> None:
    with pytest.raises(NeedsSpark, match="recompute"):
        here(Pipeline.from_file(delivered_file), recompute=True)


@pytest.mark.parametrize("rows_max", [2 * ROWS - 1, 2 * ROWS + ROWS // 2])
def test_more_than_fits_in_memory_is_for_spark(
    delivered_file: Path, tmp_path: Path, rows_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the ledger's count before anything is read; or while it is read, if the sink holds more."""
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection, connection:
        connection.execute("INSERT INTO orders SELECT * FROM orders")
    monkeypatch.setattr(local, "AUDIT_MEMORY_BYTES", rows_max * 64)
    read: list[str] = []
    with pytest.raises(NeedsSpark, match="MiB"):
        audit_here(Pipeline.from_file(delivered_file), None, 20, None, read.append)
    monkeypatch.setattr(local, "AUDIT_MEMORY_BYTES", 5 * ROWS * 64)
    assert here(Pipeline.from_file(delivered_file)).counts.duplicated == ROWS


@pytest.mark.parametrize("settings", [{}, {"id": "VALUE"}, {"id": "`value`", "key": "key"}, {"own": "TRUE"}])
def test_names_of_columns_need_no_spark(delivered_file: Path, settings: dict[str, str]) -> None:
    delivered_file.write_text(json.dumps(json.loads(delivered_file.read_text()) | {"audit": settings}))
    report = here(Pipeline.from_file(delivered_file))
    assert report.verdict is Verdict.HELD, report.unknowns
    assert report.counts == Counts(sent=ROWS, delivered=ROWS)
    assert report.own == settings.get("own", "")
    assert set(report.versions) == {"delivered", "pyarrow"}


def test_what_cannot_be_read_is_unknown(delivered_file: Path, tmp_path: Path) -> None:
    (tmp_path / "shop.db").unlink()
    report = here(Pipeline.from_file(delivered_file))
    assert report.verdict is Verdict.UNKNOWN
    assert report.unknowns
    (tmp_path / "checkpoint" / "offsets").rename(tmp_path / "no batch yet")
    assert "there is nothing to audit" in here(Pipeline.from_file(delivered_file)).unknowns[0]
