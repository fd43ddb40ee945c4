"""A stream through Spark into an Iceberg table, killed with its JVM and all its workers, and started again."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog

from delivered.connectors.log import append
from delivered_lab import supervisor

RECORDS = 4_000
APP = Path(__file__).parent / "apps" / "to_delta.py"
PIPELINE = """
pipeline: to-iceberg
guarantee: exactly_once
checkpoint: {folder}/checkpoint
trigger: available_now
source:
  format: log
  path: {folder}/log
  maxOffsetsPerTrigger: 2000
transform:
  sql: SELECT CAST(key AS STRING) AS id, value AS payload, `partition` AS part, timestamp AS at FROM source
  deterministic: true
sinks:
  - format: iceberg
    table: shop.events
    warehouse: {folder}/lake
    partitionBy: part, days(at)
audit:
  id: id
"""


@pytest.mark.matrix
def test_killed_after_the_decision_and_started_again(tmp_path: Path) -> None:
    rows = pa.table({"key": [f"id-{i}".encode() for i in range(RECORDS)], "value": [b"v"] * RECORDS})
    append(str(tmp_path / "log"), rows, partition_by=2)
    file, verdict = tmp_path / "to-iceberg.yaml", tmp_path / "verdict"
    file.write_text(PIPELINE.format(folder=tmp_path))
    with (tmp_path / "output").open("wb") as output:
        done = supervisor.run(
            [sys.executable, str(APP), str(file), str(verdict)],
            "commit.decide:after@batch=0",  # decided and visible; Spark did not log it
            tmp_path / "hits",
            timeout_s=900,
            output=output,
        )
    assert done.exit_code == 0, (tmp_path / "output").read_text()[-4000:]
    assert len(done.kills) == 1
    lake = tmp_path / "lake"
    table = SqlCatalog("default", uri=f"sqlite:///{lake}/catalog.db", warehouse=f"file://{lake}").load_table(
        "shop.events"
    )
    found = Counter(table.scan().to_arrow()["id"].to_pylist())
    assert found == Counter(f"id-{i}" for i in range(RECORDS))
    assert [f.name for f in table.spec().fields] == ["part", "at_day"]
    assert len([s for s in table.snapshots() if "delivered.decision" in s.summary.additional_properties]) == 2
    assert verdict.read_text().startswith("held\n"), verdict.read_text()
