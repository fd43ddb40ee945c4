"""A stream through Spark into PostgreSQL, killed with its JVM and all its workers, and started again."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from delivered.connectors.log import append
from delivered.model.work import Ok
from delivered_lab import supervisor

if TYPE_CHECKING:
    from tests.support.servers import Postgres

APP = Path(__file__).parent / "apps" / "to_postgres.py"
RECORDS = 4_000
KILLS = {
    # Decided, not applied; and a task that promised, of a batch nobody decided.
    "two_phase": "commit.apply:before@batch=0,write.prepare:after@batch=1@shard=1",
    # Rows of one shard are in the open transaction; and a staged shard of a batch nobody decided.
    "one_transaction": "commit.apply:after@batch=0@shard=0,write.prepare:after@batch=1@shard=1",
}


@pytest.mark.matrix
@pytest.mark.parametrize("mechanism", list(KILLS))
def test_killed_with_everything_and_started_again(postgres: Postgres, tmp_path: Path, mechanism: str) -> None:
    log, table = str(tmp_path / "events"), postgres.table(None)
    rows = pa.table({"key": [f"id-{i}".encode() for i in range(RECORDS)], "value": [b"v"] * RECORDS})
    append(log, rows, partition_by=2)
    arguments = {"log": log, "url": postgres.url, "table": table, "mechanism": mechanism}
    arguments["checkpoint"] = str(tmp_path / "checkpoint")
    command = [sys.executable, str(APP), *(part for k, v in arguments.items() for part in (f"--{k}", v))]
    with (tmp_path / "output").open("wb") as output:
        done = supervisor.run(command, KILLS[mechanism], tmp_path / "hits", timeout_s=550, output=output)
    assert done.exit_code == 0, (tmp_path / "output").read_text()[-4000:]
    assert len(done.kills) == 2
    found = Counter(name for (name,) in postgres.execute(f"SELECT id FROM {table}"))
    assert found == Counter(f"id-{i}" for i in range(RECORDS))
    [(columns,)] = postgres.execute(
        "SELECT string_agg(column_name || ' ' || data_type, ', ' ORDER BY ordinal_position) "
        "FROM information_schema.columns WHERE table_name = %s",
        table,
    )
    assert columns == "id text, payload bytea, position bigint, at timestamp with time zone"
    from delivered.model.identity import Scope

    sink = postgres.sink(table)
    committer = sink.committer(Scope("to-postgres", sink.name, "judge"))
    assert committer.abort_orphans(()) == Ok(0)
    committer.close()
