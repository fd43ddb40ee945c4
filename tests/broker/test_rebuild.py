"""A table of PostgreSQL made anew, and swapped under kills. Every step: tests/crash/test_rebuild.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.support.sweeps import sweep

from delivered.checkpoint import sidecar
from delivered.connectors.log import append
from delivered.entry import Pipeline
from delivered.model.errors import DeliveredError, Refused
from delivered.operate.transactions import end_transaction, open_transactions
from delivered_lab.verify.loop import Loop

SWAP = """
import sys
from delivered.entry import Pipeline
from delivered.crash import install_from_environment

install_from_environment()
Pipeline.from_file(sys.argv[1]).rebuild(sys.argv[2]).swap()
"""


def ran(postgres: Any, folder: Path, mechanism: str, **sink: Any) -> tuple[Path, str]:
    """A pipeline that ran and stopped, and its table, in a schema of its own."""
    append(str(folder / "log"), pa.table({"key": [b"1", b"2"], "value": [b"a", b"b"]}))
    table = f"s{postgres.table(None)}.orders"
    postgres.execute(f"CREATE SCHEMA {table.split('.', maxsplit=1)[0]}")
    pipeline: dict[str, Any] = {
        "pipeline": "shop", "guarantee": "exactly_once", "checkpoint": str(folder / "checkpoint"),
        "source": {"format": "log", "path": str(folder / "log")}, "transform": {"select": ["key", "value"]},
        "sinks": [{"format": "postgres", "url": postgres.url, "dbtable": table, "ifNotExists": True}],
    }  # fmt: skip
    pipeline["sinks"][0] |= {"mechanism": mechanism, **sink}
    file = folder / "shop.yaml"
    file.write_text(json.dumps(pipeline))
    loop = Loop(file)
    sidecar.keep_first(loop.pipeline.checkpoint, loop.batches.source.driver().initial)  # as Spark's reader does
    loop.run(takeover=False)
    return file, table


@pytest.mark.parametrize("mechanism", sweep(["one_transaction", "two_phase"], lambda m: m == "one_transaction"))
def test_a_swap_is_killed_and_goes_on(postgres: Any, tmp_path: Path, mechanism: str) -> None:
    file, table = ran(postgres, tmp_path, mechanism)
    schema = table.split(".")[0]
    made = Pipeline.from_file(file).rebuild("fresh")
    Loop(made.pipeline).run(takeover=False)
    assert made.compare().equal
    postgres.execute(f"INSERT INTO {schema}.fresh VALUES ('new', 'new')")
    for point, swapped in (("commit.apply:after", False), ("commit.decide:after", True)):
        hits = tmp_path / point.replace(":", "-")
        hits.mkdir()
        env = {**os.environ, "DELIVERED_CRASH": f"{point}!kill", "DELIVERED_CRASH_DIR": str(hits)}
        done = subprocess.run([sys.executable, "-c", SWAP, str(file), "fresh"], env=env, timeout=60, check=False)
        assert done.returncode == -signal.SIGKILL
        assert postgres.execute(f"SELECT count(*) FROM {table}") == [(3 if swapped else 2,)]
        assert Pipeline.from_file(file).rebuild("fresh").done is swapped
    assert postgres.execute(f"SELECT count(*) FROM {schema}.{made.kept}") == [(2,)]
    append(str(tmp_path / "log"), pa.table({"key": [b"3"], "value": [b"c"]}))
    Loop(file).run(takeover=False)  # goes on in the new table
    assert postgres.execute(f"SELECT count(*) FROM {table}") == [(4,)]


FILL = SWAP.replace(
    "Pipeline.from_file(sys.argv[1]).rebuild(sys.argv[2]).swap()",
    """
from delivered_lab.verify.loop import Loop
p = Pipeline.from_file(sys.argv[1])
Loop(p.rebuild("fresh").pipeline if sys.argv[2] == "rebuild" else p.replay("earliest", "latest", sys.argv[2])).run(
    takeover=False)""",
)


@pytest.mark.parametrize("what", ["rebuild", "replay"])
def test_open_transactions_of_a_killed_one_are_listed_and_ended_by_hand(
    postgres: Any, tmp_path: Path, what: str
) -> None:
    file, table = ran(postgres, tmp_path, "two_phase")
    argument = what if what == "rebuild" else f"{table}_again"
    env = {**os.environ, "DELIVERED_CRASH": "write.prepare:after!kill", "DELIVERED_CRASH_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", FILL, str(file), argument], env=env, timeout=60, check=False)
    own = Pipeline.from_file(file)
    (left,) = open_transactions(own)
    assert not left.decided
    end_transaction(own, left.id, commit=False)
    assert open_transactions(own) == []
    subprocess.run([sys.executable, "-c", FILL, str(file), argument], timeout=60, check=True)
    new = f"{table.split('.')[0]}.fresh" if what == "rebuild" else argument
    assert postgres.execute(f"SELECT count(*) FROM {new}") == [(2,)]
    assert open_transactions(own) == []


def test_retries_of_dead_letters_do_not_stay_with_the_old_table(postgres: Any, tmp_path: Path) -> None:
    file, table = ran(postgres, tmp_path, "two_phase", onConstraint="dead_letter")
    schema = table.split(".")[0]
    postgres.execute(f"ALTER TABLE {table} ADD CONSTRAINT one UNIQUE (key)")
    append(str(tmp_path / "log"), pa.table({"key": [b"1"], "value": [b"again"]}))
    Loop(file).run(takeover=False)
    postgres.execute(f"CREATE TABLE {schema}.fresh (LIKE {table} INCLUDING ALL)")
    postgres.execute(f"ALTER TABLE {table} DROP CONSTRAINT one")
    made = Pipeline.from_file(file).rebuild("fresh")
    Loop(made.pipeline).run(takeover=False)
    assert made.compare().equal
    command = [sys.executable, "-m", "delivered.cli.main", "dead-letters", "retry", str(file), "--all"]
    killed = {**os.environ, "DELIVERED_CRASH": "write.prepare:after!kill", "DELIVERED_CRASH_DIR": str(tmp_path)}
    subprocess.run(command, env=killed, check=False)
    with pytest.raises(Refused, match="REBUILD_UNFINISHED"):
        made.swap()
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.startswith("1 retried")
    with pytest.raises(DeliveredError, match="REBUILD_RETRIED"):
        made.swap()
    assert postgres.execute(f"SELECT count(*) FROM {table}") == [(3,)]


def test_a_table_that_a_view_reads_is_refused(postgres: Any, tmp_path: Path) -> None:
    file, table = ran(postgres, tmp_path, "one_transaction")
    postgres.execute(f"CREATE VIEW {table}_seen AS SELECT * FROM {table}")
    with pytest.raises(Refused, match=r"REBUILD_TARGET.*orders_seen"):
        Pipeline.from_file(file).rebuild("fresh")
