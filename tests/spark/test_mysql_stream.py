"""A stream through Spark into MySQL, killed with its JVM and all its workers, started again, and audited."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
import yaml

from delivered.connectors.log import append
from delivered_lab import supervisor

if TYPE_CHECKING:
    from tests.support.servers import Mysql

APP = Path(__file__).parent / "apps" / "several_sinks.py"
RECORDS = 3_000


@pytest.mark.matrix
def test_killed_between_two_xa_commits_then_it_audits_clean(mysql: Mysql, tmp_path: Path) -> None:
    """P27: the decision stands and one shard is visible; the next start applies the other."""
    table = mysql.table(None)
    ids = [f"id-{i}".encode() for i in range(RECORDS)]
    append(
        str(tmp_path / "events"),
        pa.table({"key": ids, "value": [b"v" * (i % 5) for i in range(RECORDS)]}),
        partition_by=2,
    )
    sink = {
        "format": "mysql", "url": mysql.url, "dbtable": table, "mechanism": "two_phase", "ifNotExists": "true",
    }  # fmt: skip
    pipeline = {
        "pipeline": "to-mysql", "guarantee": "exactly_once", "checkpoint": "checkpoint", "trigger": "available_now",
        "source": {"format": "log", "path": "events", "maxOffsetsPerTrigger": 2_000},
        "transform": {"sql": "SELECT CAST(key AS STRING) AS id, value, timestamp AS at FROM source"},
        "sinks": [sink], "audit": {"id": "id"}, "master": "local[2]",
    }  # fmt: skip
    file, report = tmp_path / "to_mysql.yaml", tmp_path / "report.json"
    file.write_text(yaml.safe_dump(pipeline))
    with (tmp_path / "output").open("wb") as output:
        command = [sys.executable, str(APP), str(file), str(report)]
        kill = "commit.apply:after@batch=0@shard=0"
        done = supervisor.run(command, kill, tmp_path / "hits", timeout_s=300, output=output)
    assert done.exit_code == 0, (tmp_path / "output").read_text()[-4000:]
    assert len(done.kills) == 1
    [found] = json.loads(report.read_text()).values()
    assert (found["verdict"], found["counts"]["sent"], found["counts"]["lost"]) == ("held", RECORDS, 0)
    seen = Counter(name for (name,) in mysql.execute(f"SELECT id FROM {table}"))
    assert seen == Counter(name.decode() for name in ids)
    assert mysql.execute("SELECT count(*) FROM information_schema.columns WHERE table_name = %s", table) == [(3,)]
