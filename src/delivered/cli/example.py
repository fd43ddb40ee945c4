"""`delivered init`: a pipeline that runs as it is."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Annotated

import typer

from delivered.cli.command import Output, OutputOption, answer
from delivered.model.errors import MissingExtra, UsageError

RECORDS = 1_000
FILE = "orders.yaml"

_TEXT = """\
# A log of orders into a SQLite table: ready to run, no server needed.
#   delivered plan {file}     its steps, and the assumptions of its guarantee
#   delivered run {file}      kill it at any time, and start it again
#   delivered audit {file}    checks that every order is in the table exactly once
# Paths are relative to this file.

pipeline: orders
guarantee: exactly_once          # or at_least_once, at_most_once
checkpoint: checkpoint
trigger: available_now           # or an interval, "10 seconds": run until stopped

source:
  format: log
  path: orders-log
  maxOffsetsPerTrigger: 250

transform:
  sql: >-
    SELECT CAST(key AS STRING) AS customer,
           get_json_object(CAST(value AS STRING), '$.id') AS id,
           CAST(get_json_object(CAST(value AS STRING), '$.amount') AS DOUBLE) AS amount
    FROM source
  deterministic: true            # the same input gives the same rows

sinks:
  - format: sqlite
    path: orders.db
    table: orders

audit:
  id: id                         # identifies a record
"""


def init(
    folder: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("delivered-example"),
    output: OutputOption = Output.TEXT,
) -> None:
    """Write a ready-to-run example: a log of orders into SQLite, no server needed."""
    file, records = write_example(folder)
    text = (
        f"{file}: a pipeline, and {records} records for it to deliver\n"
        f"Next: delivered plan {file}; delivered run {file}; delivered audit {file}"
    )
    answer(output, {"file": str(file), "records": records}, text)


def write_example(folder: Path) -> tuple[Path, int]:
    """Write file and input into `folder`; return the file and the number of records.

    Raises:
        UsageError: the file already exists.
        MissingExtra: a requirement of the pipeline is not installed; nothing was written.
    """
    import pyarrow as pa

    from delivered.connectors.log.produce import append

    for module in ("pyspark", "deltalake"):
        if importlib.util.find_spec(module) is None:
            raise MissingExtra("spark")

    file = folder / FILE
    if file.exists() or folder.is_file():
        raise UsageError("EXAMPLE_EXISTS", file=str(file if file.exists() else folder))
    folder.mkdir(parents=True, exist_ok=True)
    orders = [{"id": f"order-{i:04}", "amount": (i * 37) % 1000 / 10} for i in range(RECORDS)]
    rows = pa.table(
        {
            "key": pa.array([f"customer-{i % 17}".encode() for i in range(RECORDS)], pa.binary()),
            "value": pa.array([json.dumps(o).encode() for o in orders], pa.binary()),
        }
    )
    append(str(folder / "orders-log"), rows, partition_by=4, idempotence=("delivered-example", 1))
    # Last: a folder with the file is complete.
    file.write_text(_TEXT.format(file=file), encoding="utf-8")
    return file, RECORDS
