"""The naive writers of PostgreSQL, Delta and folders that people write by hand: append what the batch holds.

`appends_*` looks up whether a batch is in, `forgets_*` does not: it adds a batch that is run again once more.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import pyarrow as pa
from broken_sinks import BrokenSink, Put, Row

from delivered.connectors.sqlite import SqliteOptions
from delivered.contract.connector import Connector, Factory
from delivered.ledger import Ledgers
from delivered.model.options import Option, Options, option, several


class NaiveOptions(Options, owner="naive sink"):
    state: str = option("state", "SQLite file of the ledger.")
    target: dict[str, str] = several(
        lambda owner, values: {k: v for k, v in values.items() if k != "state"},
        *(Option(name, "As the sink that it stands for has it.") for name in ("url", "dbtable", "path", "fileFormat")),
    )


def to_postgres(url: str, table: str, rows: Sequence[Row]) -> None:
    import psycopg

    with psycopg.connect(url) as connection, connection.cursor() as cursor:
        cursor.executemany(f"INSERT INTO {table} (key, value) VALUES (%s, %s)", rows)


def to_delta(path: str, rows: Sequence[Row]) -> None:
    from deltalake import write_deltalake

    write_deltalake(path, as_table(rows), mode="append")


def to_files(path: str, rows: Sequence[Row]) -> None:
    import pyarrow.parquet as pq

    draft = Path(path) / "_drafts" / uuid.uuid4().hex
    draft.mkdir(parents=True)
    pq.write_table(as_table(rows), draft / "0.parquet")
    draft.rename(Path(path) / f"batch={time.time_ns()}")


def as_table(rows: Sequence[Row]) -> pa.Table:
    keys, values = zip(*rows, strict=True)
    return pa.table({"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())})


def put(system: str, given: Mapping[str, str]) -> Put:
    if system == "postgres":
        return partial(to_postgres, given["url"], given["dbtable"])
    return partial({"delta": to_delta, "files": to_files}[system], given["path"])


class NaiveConnector(Connector):
    """Named for its flaw and for the system that it writes to: "forgets_delta"."""

    def sink(self, options: Mapping[str, str], ledgers: Ledgers | None = None) -> BrokenSink:
        flaw, _, system = self.name.partition("_")
        given = NaiveOptions.parse(options)
        state = SqliteOptions.parse({"path": given.state, "table": "effects"})
        return BrokenSink(state, "forgets_batches" if flaw == "forgets" else "", put(system, given.target))


_SINKS = Factory(NaiveOptions, "broken_sinks:BrokenSink")
SYSTEMS = ("postgres", "delta", "files")
APPENDS = {s: NaiveConnector(f"appends_{s}", "", sinks=_SINKS) for s in SYSTEMS}
FORGETS = {s: NaiveConnector(f"forgets_{s}", "", sinks=_SINKS) for s in SYSTEMS}
APPENDS_POSTGRES, APPENDS_DELTA, APPENDS_FILES = APPENDS.values()
FORGETS_POSTGRES, FORGETS_DELTA, FORGETS_FILES = FORGETS.values()
