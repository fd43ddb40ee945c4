"""P4: what a ledger keeps does not grow with the batches that it saw. Elsewhere such a table grew to 600 MB.

The safe horizon: a ledger forgets a batch when `LEDGER_HISTORY_BATCHES` (1,000) later ones are decided. Spark can run
again no batch older than the 100 that its checkpoint keeps; tests/unit/test_limits.py holds the two together. Markers
are forgotten with the next decision, before which every shard of the batch was applied.
"""

from __future__ import annotations

import sqlite3
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from delivered.connectors.postgres.client import ledger_dialect
from delivered.connectors.postgres.target import migrate
from delivered.connectors.sqlite import CONNECTOR
from delivered.connectors.sqlite.client import DIALECT
from delivered.engine.context import open_ledger
from delivered.kits.sql.ledger import Records
from delivered.model.capability import Guarantee
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Scope
from delivered.model.limits import LEDGER_HISTORY_BATCHES, LEDGER_INCARNATIONS, OWNERS_REMEMBERED
from delivered.model.work import Decision, Owner, Prepared

if TYPE_CHECKING:
    from tests.support.servers import Postgres

SHARDS = 4
SECONDS_MAX = 60


def text_of(scope: Scope) -> str:
    """A decision of four shards; the batch's number is written over its place."""
    prepared = tuple(
        Prepared(i, 0, Fingerprint(1_000, 1 << 60, 1 << 60), {"path": "x" * 60}, sink="t") for i in range(SHARDS)
    )
    made = Decision(scope, "owner", Guarantee.EXACTLY_ONCE, 987_654_321, "{}", prepared, {}, 1)
    return made.to_json()


@pytest.mark.matrix
def test_a_million_batches_and_two_thousand_restarts_in_sqlite(tmp_path: Path) -> None:
    batches, restarts, checkpoints = 1_000_000, 2_000, 400
    path = tmp_path / "sink.db"
    sink = CONNECTOR.sink({"path": str(path), "table": "t"})
    began = time.monotonic()
    sizes: list[int] = []
    per_restart = batches // restarts
    with sqlite3.connect(path, isolation_level=None) as connection:
        connection.execute("PRAGMA synchronous=OFF")  # how fast is no question here
        for restart in range(restarts):
            # Every fifth restart begins a new checkpoint, whose batches count from 0.
            scope = Scope("p", "t", f"checkpoint-{restart * checkpoints // restarts}")
            ledger = open_ledger(sink, scope)
            if restart == 0:
                ledger.claim(Owner("owner-0"))
            connection.execute("BEGIN IMMEDIATE")
            records = Records(connection, DIALECT, scope)
            records.claim(partial(ledger._successor, Owner(f"owner-{restart}"), batch=None))  # type: ignore[attr-defined]
            text = text_of(scope)
            first = restart % (restarts // checkpoints) * per_restart
            for batch in range(first, first + per_restart):
                records.record(batch, text.replace("987654321", str(batch)))
            connection.execute("COMMIT")
            ledger.close()
            if restart % 100 == 99:
                sizes.append(path.stat().st_size)
        [(kept, incarnations)] = connection.execute(
            "SELECT count(*), count(DISTINCT incarnation) FROM _delivered_decision"
        )
        owners = connection.execute("SELECT length(superseded) FROM _delivered_owner").fetchall()
    took = time.monotonic() - began
    print(f"{batches:,} batches in {took:.0f} s; {kept} decisions kept; {sizes[0]:,} to {sizes[-1]:,} bytes")
    assert incarnations == LEDGER_INCARNATIONS + 1
    assert kept == LEDGER_HISTORY_BATCHES + LEDGER_INCARNATIONS
    assert len(owners) == 1
    assert owners[0][0] < 20 * OWNERS_REMEMBERED
    assert sizes[-1] <= sizes[4] * 1.1 < 4_000_000
    assert took < SECONDS_MAX


@pytest.mark.matrix
def test_markers_and_decisions_of_many_batches_in_postgres(postgres: Postgres) -> None:
    import psycopg

    schema, scope, batches = "horizon", Scope("p", "t", "i"), 20_000
    text = text_of(scope)
    began = time.monotonic()
    sizes: list[int] = []
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        migrate(connection, schema)
        records = Records(connection, ledger_dialect(schema), scope)
        for first in range(0, batches, 1_000):
            with connection.transaction(), connection.pipeline():
                for batch in range(first, first + 1_000):
                    connection.cursor().executemany(
                        f"INSERT INTO {schema}.marker VALUES ('p', 't', 'i', %s, %s, 'g', 'f')",
                        [(batch, shard) for shard in range(SHARDS)],
                    )
                    records.record(batch, text)
            connection.execute(f"VACUUM {schema}.marker, {schema}.decision")
            [(size,)] = postgres.execute(
                f"SELECT pg_total_relation_size('{schema}.decision') + pg_total_relation_size('{schema}.marker')"
            )
            sizes.append(size)
    took = time.monotonic() - began
    print(f"{batches:,} batches in {took:.0f} s; {sizes[9]:,} to {sizes[-1]:,} bytes")
    [(kept, oldest)] = postgres.execute(f"SELECT count(*), min(batch) FROM {schema}.decision")
    assert (kept, oldest) == (LEDGER_HISTORY_BATCHES, batches - LEDGER_HISTORY_BATCHES)
    assert postgres.execute(f"SELECT count(*), min(batch) FROM {schema}.marker") == [(SHARDS, batches - 1)]
    assert sizes[-1] <= sizes[9] * 1.1 < 4_000_000
    assert took < SECONDS_MAX
