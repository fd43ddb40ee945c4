"""A database fails over under `delivered run`: the query goes on, nothing is lost or doubled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
import yaml

from delivered.connectors.log import append
from delivered_lab.supervisor import kill_tree

if TYPE_CHECKING:
    from tests.support.servers import PostgresPair

ROWS = 400


@pytest.mark.matrix
@pytest.mark.parametrize("mechanism", ["one_transaction", "two_phase"])
def test_a_fail_over_does_not_end_the_query(
    new_postgres_pair: Callable[..., PostgresPair], tmp_path: Path, mechanism: str
) -> None:
    pair = new_postgres_pair(synchronous=True)
    table, source, said = pair.primary.table("id bigint"), str(tmp_path / "log"), tmp_path / "said"
    sent = 0

    def send() -> None:
        nonlocal sent
        values = [b"%d" % i for i in range(sent, sent + ROWS)]
        append(source, pa.table({"key": values, "value": values}), partition_by=2)
        sent += ROWS

    def seen() -> int:
        for server in (pair.primary, pair.standby):
            try:
                return int(server.execute(f"SELECT count(*) FROM {table} WHERE NOT pg_is_in_recovery()")[0][0])
            except Exception:
                continue
        return 0

    def until(rows: int) -> None:
        deadline = time.monotonic() + 200
        while seen() < rows:
            assert process.poll() is None, said.read_text()[-3_000:]
            assert time.monotonic() < deadline, said.read_text()[-3_000:]
            time.sleep(0.1)

    send()
    file = tmp_path / "pipeline.yaml"
    sink = {"format": "postgres", "url": pair.url, "dbtable": table, "mechanism": mechanism}
    file.write_text(
        yaml.safe_dump(
            {
                "pipeline": "failover", "guarantee": "exactly_once", "checkpoint": str(tmp_path / "checkpoint"),
                "source": {"format": "log", "path": source, "maxOffsetsPerTrigger": 50},
                "transform": {"sql": "SELECT CAST(CAST(value AS STRING) AS BIGINT) AS id FROM source"},
                "sinks": [sink], "master": "local[2]",
            }
        )
    )  # fmt: skip
    with said.open("wb") as out:
        command = [sys.executable, "-m", "delivered.cli.main", "run", str(file)]
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    try:
        until(100)
        pair.primary.broker.kill()
        time.sleep(8)  # the fail-over itself takes so long
        pair.fail_over()
        send()
        until(sent)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(120) == 0, said.read_text()[-3_000:]
    finally:
        if process.poll() is None:
            kill_tree(process)
            process.wait()
    found = pair.standby.execute(f"SELECT count(*), count(DISTINCT id), min(id), max(id) FROM {table}")
    assert found == [(sent, sent, 0, sent - 1)]
    assert "does not answer, retrying" in said.read_text()
