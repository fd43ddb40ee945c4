"""A whole pipeline without Spark, for a separate process: a log, the engine, a sink, a checkpoint in Spark's format.

`main` takes {"log": ..., "database": ..., "checkpoint": ..., "guarantee": ..., "owner": ...}. Before a batch its
offsets are written, after it a file in `commits/`. Crash points come from DELIVERED_CRASH. With "outbox", the options
of its source, it reads an outbox instead of a log. With "dedup" (microseconds) it drops repeats of a key by a table;
"without" names columns that an earlier transform of changes lacks. With "stop_at" the process stops itself (SIGSTOP) at
that point, once: a zombie to be.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import traceback
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from tests.support.toy import TOYS

from delivered.connectors.delta import CONNECTOR as DELTA
from delivered.connectors.files import CONNECTOR as FILES
from delivered.connectors.iceberg import CONNECTOR as ICEBERG
from delivered.connectors.log import CONNECTOR as LOG
from delivered.connectors.outbox import CONNECTOR as OUTBOX
from delivered.connectors.sqlite import CONNECTOR as SQLITE
from delivered.contract.sink import Sink
from delivered.crash import install_from_environment
from delivered.engine import Columns, Sinks
from delivered.engine.context import Context
from delivered.engine.decide import commit_batch
from delivered.engine.recover import plan_batch
from delivered.engine.shard import write_shard
from delivered.model.capability import Guarantee
from delivered.model.errors import DeliveredError
from delivered.model.identity import Scope
from delivered.model.rows import Rows
from delivered.model.step import Moment, StepId, install, reach
from delivered.model.work import CheckpointView, Owner
from delivered.pipeline.registry import find_sink

ROWS_PER_BATCH = 400
TABLE = "events"
PIPELINE = "embedded"
MESSAGE = Columns((("key", "id"), ("value", "payload")))
ROUTES = {"kafka": MESSAGE, "pulsar": MESSAGE, "rocketmq": Columns((("value", "id"),))}
"""Of several sinks, those that get only some columns."""


def transform(batch: pa.RecordBatch) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [
            batch.column("key").cast(pa.string()),
            batch.column("value"),
            batch.column("offset"),
            batch.column("timestamp"),
        ],
        names=["id", "payload", "position", "at"],
    )


def messages(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Of an outbox: the id is in a header."""
    ids = [h[0]["value"].decode() for h in batch.column("headers").to_pylist()]
    return pa.RecordBatch.from_arrays([pa.array(ids, pa.string()), batch.column("value")], names=["id", "payload"])


def changes(batch: pa.RecordBatch) -> pa.RecordBatch:
    """For mode upsert: the value is the version; every fifth one deletes."""
    version = batch.column("value").cast(pa.string()).cast(pa.int64())
    fifth = pc.equal(pc.subtract(version, pc.multiply(pc.divide(version, 5), 5)), 0)
    expected = pa.array([was(v) for v in version.to_pylist()], pa.int64())
    columns = [batch.column("key").cast(pa.string()), version, pc.cast(version, pa.string()), fifth, expected]
    return pa.RecordBatch.from_arrays(columns, names=["id", "version", "text", "gone", "was"])


def was(version: int) -> int | None:
    """The version that a change expects: its key's previous one; for some changes, wrongly, no row."""
    return None if version < 97 or version % 13 == 0 else version - 97


class Checkpoint:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("offsets", "commits"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        metadata = folder / "metadata"
        if not metadata.exists():
            write(metadata, str(uuid.uuid4()))
        self.incarnation = metadata.read_text()

    def newest(self, name: str) -> int | None:
        return max((int(p.name) for p in (self.folder / name).iterdir() if p.name.isdigit()), default=None)

    def offsets(self, batch: int) -> dict[str, Any]:
        return json.loads((self.folder / "offsets" / str(batch)).read_text())


def write(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text)
    draft.rename(path)


def _sink(spec: dict[str, Any], upsert: dict[str, str]) -> Sink:
    if "delta" in spec:
        return DELTA.sink({**spec["delta"], **upsert})
    if "iceberg" in spec:
        return ICEBERG.sink({**spec["iceberg"], **upsert})
    if "files" in spec:
        return FILES.sink(spec["files"])
    if "postgres" in spec or "mysql" in spec:
        system = "postgres" if "postgres" in spec else "mysql"
        return find_sink(system, {**spec[system], **upsert})
    if "kafka" in spec:
        return find_sink("kafka", spec["kafka"])
    if "toy" in spec:
        return TOYS[spec["toy"]](Path(spec["folder"]))
    return SQLITE.sink({"path": spec["database"], "table": TABLE, **upsert})


def run(spec: dict[str, Any]) -> None:
    source = OUTBOX.source(spec["outbox"]) if "outbox" in spec else LOG.source({"path": spec["log"]})
    upsert: dict[str, str] = spec.get("upsert", {})
    if "sinks" in spec:
        sinks = Sinks.of(
            [(s["name"], find_sink(s["format"], s["options"]), ROUTES.get(s["format"])) for s in spec["sinks"]]
        )
    else:
        sinks = Sinks.one(_sink(spec, upsert))
    checkpoint = Checkpoint(Path(spec["checkpoint"]))
    scope = Scope(spec.get("pipeline", PIPELINE), sinks.decider.name, checkpoint.incarnation)
    owner, guarantee = Owner(spec["owner"], process=os.getpid()), Guarantee(spec["guarantee"])

    def made(batch: pa.RecordBatch) -> pa.RecordBatch:
        if "outbox" in spec:
            return messages(batch) if "database" in spec else batch
        if not upsert:
            return MESSAGE(transform(batch)) if "toy" in spec else transform(batch)
        unused = [n for n in ("gone", "was") if n not in upsert.values()]
        return changes(batch).drop_columns([*unused, *spec.get("without", ())])

    schema = made(pa.RecordBatch.from_pylist([], schema=source.schema())).schema
    sinks.check_schema(schema)
    sinks.ready_target(schema)
    # As in Spark, one process plans, another commits. Here each has its own ledger and committer.
    planning, committing = (Context.open(sinks, scope, guarantee, owner) for _ in range(2))
    driver = source.driver()
    for turn in itertools.count():
        planned, logged = checkpoint.newest("offsets"), checkpoint.newest("commits")
        if planned is None or planned == logged:
            batch = 0 if planned is None else planned + 1
            start = driver.initial() if planned is None else checkpoint.offsets(planned)["end"]
            end = driver.latest(start, spec.get("rows_per_batch", ROWS_PER_BATCH))
            driver.acknowledge(start)
            if end == start:
                return
            write(checkpoint.folder / "offsets" / str(batch), json.dumps({"start": start, "end": end}))
        else:
            batch, entry = planned, checkpoint.offsets(planned)
            start, end = entry["start"], entry["end"]
        text = json.dumps(end)
        view = CheckpointView(scope.incarnation, batch, text, logged)
        plan = plan_batch(planning, view, first=turn == 0, add_columns=partial(sinks.add_columns, schema))
        pieces = driver.slices(start, end)

        def rows(piece: Any) -> Iterator[pa.RecordBatch]:
            for read in source.read(piece):
                for at in range(0, read.num_rows, 64):
                    yield made(read.slice(at, 64))

        shards = [rows(piece) for piece in pieces]
        if "dedup" in spec:
            shards = _once(
                spec["dedup"],
                sinks.decider.sink,
                scope,
                batch,
                [b for piece in pieces for b in source.read(piece)],
                made,
            )
        prepared = [write_shard(sinks, plan, i, 0, map(Rows, shard), schema) for i, shard in enumerate(shards)]
        commit_batch(committing, batch, text, prepared)
        reach(StepId.LOG, Moment.BEFORE, batch=batch)
        write(checkpoint.folder / "commits" / str(batch), "{}")
        reach(StepId.LOG, Moment.AFTER, batch=batch)


def _once(
    within_us: int, sink: Any, scope: Scope, batch: int, read: list[pa.RecordBatch], made: Any
) -> list[Iterator[pa.RecordBatch]]:
    """Shards without duplicates according to a key table."""
    from tests.support.dedup import by_key, once, with_helpers

    parts: list[list[pa.RecordBatch]] = [[], []]
    for rows in read:
        times = rows.column("timestamp").cast(pa.timestamp("us", "UTC")).cast(pa.int64()).to_pylist()
        for part, mine in zip(parts, by_key(with_helpers(rows, rows.column("key").to_pylist(), times), 2), strict=True):
            part += [mine.slice(at, 64) for at in range(0, mine.num_rows, 64)]
    return [(made(b) for b in once(sink, scope, batch, within_us, part)) for part in parts]


def stop_once(at: str) -> None:
    left = [at]

    def handler(point: str, facts: dict[str, Any]) -> None:
        if left and point == left[0] and facts.get("batch", 0) in (0, 1):
            left.clear()
            os.kill(os.getpid(), signal.SIGSTOP)

    install(handler)


def main(given: dict[str, Any]) -> int:
    if given.get("stop_at"):
        stop_once(given["stop_at"])
    else:
        install_from_environment()
    try:
        run(given)
    except DeliveredError as error:
        print(error, file=sys.stderr)
        return 3
    except Exception:
        traceback.print_exc()
        return 1
    return 0
