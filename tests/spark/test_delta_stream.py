"""A stream through Spark into a Delta table, killed with its JVM and all its workers, and started again."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from delivered.connectors.log import append
from delivered_lab import supervisor

RECORDS = 4_000
APP = Path(__file__).parent / "apps" / "to_delta.py"
PIPELINE = """
pipeline: to-delta
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
  - format: delta
    path: {folder}/events
    partitionBy: part
audit:
  id: id
"""


@pytest.mark.matrix
def test_killed_after_the_decision_and_started_again(tmp_path: Path) -> None:
    rows = pa.table({"key": [f"id-{i}".encode() for i in range(RECORDS)], "value": [b"v"] * RECORDS})
    append(str(tmp_path / "log"), rows, partition_by=2)
    file, verdict = tmp_path / "to-delta.yaml", tmp_path / "verdict"
    file.write_text(PIPELINE.format(folder=tmp_path))
    with (tmp_path / "output").open("wb") as output:
        done = supervisor.run(
            [sys.executable, str(APP), str(file), str(verdict)],
            "commit.decide:after@batch=0",  # decided and visible; Spark did not log it
            tmp_path / "hits",
            timeout_s=300,
            output=output,
        )
    assert done.exit_code == 0, (tmp_path / "output").read_text()[-4000:]
    assert len(done.kills) == 1
    table = DeltaTable(str(tmp_path / "events"))
    found = Counter(pa.table(table.to_pyarrow_table())["id"].to_pylist())
    assert found == Counter(f"id-{i}" for i in range(RECORDS))
    assert table.metadata().partition_columns == ["part"]
    incarnation = json.loads((tmp_path / "checkpoint" / "metadata").read_text())["id"]
    assert table.transaction_version(f"delivered/to-delta/events/batch/{incarnation}") == 1
    assert verdict.read_text().startswith("held\n"), verdict.read_text()
