"""Input of this folder's pipelines."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from tests.crash.killed import PARTITIONS, RECORDS

from delivered.connectors.log import append


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,000 records with distinct ids in two partitions, appended in three commits."""
    path = tmp_path_factory.mktemp("log") / "events"
    for first in (0, 300, 600):
        ids = range(first, min(first + 400, RECORDS) if first == 600 else first + 300)
        rows = pa.table({"key": [f"id-{i}".encode() for i in ids], "value": [b"v" * (i % 7) for i in ids]})
        append(str(path), rows, partition_by=PARTITIONS)
    return path
