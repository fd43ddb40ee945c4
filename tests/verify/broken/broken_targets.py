"""The naive writers of PostgreSQL, Delta and folders that people write by hand: append what the batch holds.

`appends_*` looks up whether a batch is in, `forgets_*` does not: it adds a batch that is run again once more.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa
from broken_sinks import BrokenSink, Put, Row

from delivered.connectors.sqlite.options import parse
from delivered.contract.source import Source
from delivered.model.options import Option, OptionTable

_OPTIONS = OptionTable(
    "naive sink",
    (
        Option("state", "SQLite file of the ledger.", required=True),
        *(Option(name, "As the sink that it stands for has it.") for name in ("url", "dbtable", "path", "fileFormat")),
    ),
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


@dataclass(frozen=True)
class NaiveConnector:
    name: str
    system: str
    flaw: str
    extra: str = ""
    source_options: OptionTable | None = None
    sink_options: OptionTable | None = _OPTIONS

    def source(self, options: Mapping[str, str]) -> Source:
        raise NotImplementedError(dict(options))

    def sink(self, options: Mapping[str, str]) -> BrokenSink:
        given = _OPTIONS.restore(options)
        return BrokenSink(parse({"path": given["state"], "table": "effects"}), self.flaw, put(self.system, given))


APPENDS = {s: NaiveConnector(f"appends_{s}", s, "") for s in ("postgres", "delta", "files")}
FORGETS = {s: NaiveConnector(f"forgets_{s}", s, "forgets_batches") for s in ("postgres", "delta", "files")}
APPENDS_POSTGRES, APPENDS_DELTA, APPENDS_FILES = APPENDS.values()
FORGETS_POSTGRES, FORGETS_DELTA, FORGETS_FILES = FORGETS.values()
