"""Duplicates in the source, dropped by Spark's state: admitted records, the audit's verdict, detected damage."""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
import yaml

import delivered
from delivered.audit.evidence import Counts, DedupCounts, Verdict
from delivered.connectors.log import append
from delivered_lab import supervisor

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WAIT_S = 120.0
BEGAN = datetime(2024, 1, 1, tzinfo=UTC)
ID = "get_json_object(CAST(value AS STRING), '$.id')"
PARSED = f"SELECT {ID} AS id, get_json_object(CAST(value AS STRING), '$.n') AS n FROM source"
Record = tuple[int | None, str, int]
"""Id, content, time in minutes."""


def produce(path: Path, records: Iterable[Record], partitions: int = 1) -> int:
    given = list(records)
    rows = {
        "value": [json.dumps({"n": n} if i is None else {"id": i, "n": n}).encode() for i, n, _ in given],
        "timestamp": pa.array([BEGAN + timedelta(minutes=m) for _, _, m in given], pa.timestamp("us", tz="UTC")),
        "partition": pa.array([at % partitions for at in range(len(given))], pa.int32()),
    }
    append(str(path), pa.table(rows))
    return len(given)


def pipeline(folder: Path, rows: int, within: str, **changes: Any) -> delivered.Pipeline:
    settings: dict[str, Any] = {
        "guarantee": "exactly_once",
        "dedup": delivered.dedup(ID, within=within, late="drop"),
        "transform": PARSED,
        "audit": {"id": "id"},
        **changes,
    }
    return delivered.Pipeline(
        name="once",
        checkpoint=folder / "checkpoint",
        source=delivered.log(str(folder / "log"), maxOffsetsPerTrigger=rows),
        sinks=[delivered.sqlite(str(folder / "sink.db"), "rows")],
        trigger="available_now",
        **settings,
    )


def sink(folder: Path) -> Counter[tuple[str | None, str]]:
    with closing(sqlite3.connect(folder / "sink.db")) as connection:
        return Counter(connection.execute("SELECT id, n FROM rows").fetchall())


def change(folder: Path, *statements: str) -> None:
    with closing(sqlite3.connect(folder / "sink.db")) as connection, connection:
        for statement in statements:
            assert connection.execute(statement).rowcount == 1, statement


WITHIN = "30 minutes"
FAR, LATE = 3, 900


def told() -> list[Record]:
    """One record a minute, thirty in a batch; and what repeats them."""
    records: list[Record] = [(i, "first", i) for i in range(120)]
    records.insert(6, (5, "first", 6))  # in the same batch
    records.insert(36, (10, "first", 35))  # in the next one
    records.insert(22, (20, "other", 21))  # in the same batch with another content: which of them is first?
    records[52:52] = [(None, "no id", 50), (None, "no id", 51)]
    records.insert(105, (FAR, "again", 100))  # 97 minutes after the first
    records.insert(110, (LATE, "late", 2))  # nobody's repeat
    return records


@pytest.fixture(scope="module")
def ran(spark: SparkSession, small_shuffles: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("once")
    produce(folder / "log", told())
    assert pipeline(folder, 30, WITHIN).start(spark).awaitTermination(WAIT_S)
    return folder


@pytest.fixture
def copy(ran: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(ran, tmp_path / "copy"))


def test_repeats_are_dropped_counted_and_not_missed(spark: SparkSession, ran: Path) -> None:
    found = sink(ran)
    ids = Counter(i for i, _ in found.elements())
    assert all(ids[str(i)] == 1 for i in range(120) if i != FAR)
    assert found[(None, "no id")] == 2, "records without an id are no repeats of each other"
    assert ids[str(LATE)] == 0, "late, and lost although nobody's repeat: why `late: drop` must be said"
    report = pipeline(ran, 30, WITHIN).audit(spark)
    assert report.verdict is Verdict.HELD, (report.breaches, report.unknowns)
    judged = 119 + 2  # all but the far one; each record without id by itself
    assert report.dedup == DedupCounts(len(told()), deduplicated=3, judged=judged, unclear=2, late=1, unlike=1)
    assert replace(report.counts, in_progress=0, delivered=0) == Counts(judged)
    assert any("may have been dropped as late" in note for note in report.notes)
    assert report.continuation is not None
    assert (report.continuation.first, report.continuation.seals[-1].first) == (0, 0)
    assert "which records must be in the sink depends on all batches" in report.continuation.reads_all


@pytest.mark.matrix  # the tests before and after it judge with an id
def test_without_an_id_unlike_copies_are_not_judged(spark: SparkSession, ran: Path) -> None:
    report = pipeline(ran, 30, WITHIN, audit=None).audit(spark)
    assert report.verdict is Verdict.HELD, (report.breaches, report.unknowns)
    assert report.dedup is not None
    assert (report.dedup.unclear, report.dedup.unlike) == (3, 0)


@pytest.mark.matrix
def test_a_damaged_sink_is_broken(spark: SparkSession, copy: Path) -> None:
    """A loss, the repeat that was dropped, an alteration, the other one of two unlike copies, a third far one."""
    here = next(n for i, n in sink(copy) if i == "20")
    change(
        copy,
        "DELETE FROM rows WHERE id = '7'",
        "INSERT INTO rows VALUES ('10', 'first')",
        "UPDATE rows SET n = 'x' WHERE id = '8'",
        f"INSERT INTO rows VALUES ('20', '{'first' if here == 'other' else 'other'}')",
        f"INSERT INTO rows VALUES ('{FAR}', 'first')",
        f"INSERT INTO rows VALUES ('{FAR}', 'first')",
        "INSERT INTO rows VALUES ('999', 'first')",
    )
    report = pipeline(copy, 30, WITHIN).audit(spark)
    assert report.verdict is Verdict.BROKEN
    counts = report.counts
    assert (counts.lost, counts.duplicated, counts.altered, counts.unexpected) == (1, 4, 1, 1)
    assert {s.id for s in report.samples} == {"7", "10", "8", "20", str(FAR), "999"}


def test_another_dedup_on_the_same_checkpoint_is_refused_and_changes_nothing(spark: SparkSession, copy: Path) -> None:
    def files() -> dict[str, int]:
        found = (p for p in sorted(copy.rglob("*")) if p.is_file() and p.name != "runs.json")  # tells of the refusal
        return {str(p.relative_to(copy)): p.stat().st_mtime_ns for p in found}

    before = files()
    for other in (None, delivered.dedup("key", within=WITHIN, late="drop"), delivered.dedup(ID, within="1 hour")):
        made = pipeline(copy, 30, WITHIN, dedup=other and replace(other, drops_late=True))
        with pytest.raises(delivered.Refused, match="DEDUP_CHANGED"):
            made.start(spark)
    assert files() == before


@pytest.mark.matrix
def test_a_table_of_keys_loses_no_late_record(spark: SparkSession, tmp_path: Path) -> None:
    """The same records: what is late gets in. The audit knows what was dropped; damage is found; a repeat that comes
    after a restart is known."""
    produce(tmp_path / "log", told())
    dedup = delivered.dedup(ID, within=WITHIN, memory="table")
    made = pipeline(tmp_path, 30, WITHIN, dedup=dedup)
    plan = made.plan(spark)
    assert isinstance(plan, delivered.Plan)
    assert [s.id for s in plan.steps[:2]] == ["source.read", "dedup.note"]
    assert made.start(spark).awaitTermination(WAIT_S)
    ids = Counter(i for i, _ in sink(tmp_path).elements())
    assert ids == Counter({None: 2, **{str(i): 1 for i in range(120)}, str(LATE): 1, str(FAR): 2})
    assert (sink(tmp_path)[("20", "first")], sink(tmp_path)[("20", "other")]) == (1, 0), "the earliest of the copies"
    report = made.audit(spark)
    assert report.verdict is Verdict.HELD, (report.breaches, report.unknowns)
    judged = 119 + 2 + 1
    assert report.dedup == DedupCounts(len(told()), deduplicated=3, judged=judged, unclear=1, late=0, unlike=1)

    produce(tmp_path / "log", [(119, "first", 121), (LATE, "late", 20), (300, "new", 122)])
    assert pipeline(tmp_path, 30, WITHIN, dedup=dedup).start(spark).awaitTermination(WAIT_S)
    later = Counter(i for i, _ in sink(tmp_path).elements())
    assert later - ids == Counter({"300": 1, str(LATE): 1}), "the late one was over when it came, and is forgotten"
    change(tmp_path, "DELETE FROM rows WHERE id = '119'", "INSERT INTO rows VALUES ('10', 'first')")
    report = made.audit(spark)
    assert report.verdict is Verdict.BROKEN
    assert (report.counts.lost, report.counts.duplicated) == (1, 1)
    assert {s.id for s in report.samples} == {"119", "10"}
    with pytest.raises(delivered.Refused, match="DEDUP_CHANGED"):
        pipeline(tmp_path, 30, WITHIN).start(spark)


@pytest.mark.matrix
def test_what_the_audit_is_sure_of_is_so_whatever_the_order(spark: SparkSession, tmp_path: Path) -> None:
    """Hundreds of keys in disorder over two partitions: none is said to be lost or doubled that is not; and of a few
    that are taken out or put in, each is told."""
    rng = random.Random(20)
    records: list[Record] = []
    for at in range(2_400):
        minute = at // 40 + rng.choice((0, 0, 1, 2, -2, -4) if rng.random() < 0.97 else (-12, -25))
        again = rng.random() < 0.4 and records
        i, n = rng.choice(records[-400:])[:2] if again else (at, "a")
        records.append((i, n if rng.random() < 0.9 else "b", minute))
    produce(tmp_path / "log", records, partitions=2)
    made = pipeline(tmp_path, 600, "10 minutes")
    assert made.start(spark).awaitTermination(WAIT_S)
    report = made.audit(spark)
    assert report.verdict is Verdict.HELD, (report.breaches, report.unknowns)
    assert report.dedup is not None
    assert report.dedup.deduplicated > 200
    assert report.dedup.judged > 900, report.dedup
    assert min(report.dedup.late, report.dedup.unclear - report.dedup.late, report.dedup.unlike) > 10, report.dedup
    # Keys whose records are all of one minute and whose batch is the first: nothing about them is unclear.
    sure = [str(i) for i, _, m in records[:300] if sum(r[0] == i for r in records) == 1 and m >= 0][:10]
    change(tmp_path, *[f"DELETE FROM rows WHERE id = '{i}'" for i in sure[:5]])
    change(tmp_path, *[f"INSERT INTO rows SELECT * FROM rows WHERE id = '{i}'" for i in sure[5:]])
    report = made.audit(spark)
    assert (report.counts.lost, report.counts.duplicated) == (5, 5)
    assert {s.id for s in report.samples} == set(sure)


APP = Path(__file__).parent / "apps" / "several_sinks.py"
RECORDS = 9_000


SWEEP = pytest.mark.matrix


@pytest.mark.parametrize(
    ("guarantee", "kills", "memory"),
    [
        # After the decision the batch is not written again, but its state must be there for the next one.
        pytest.param("exactly_once", "commit.decide:after@batch=1", {"late": "drop"}, marks=SWEEP),
        pytest.param("exactly_once", "write.prepare:after@batch=1,log:before@batch=1", {"late": "drop"}, marks=SWEEP),
        pytest.param(
            "at_least_once", "write.flush:after@batch=1,commit.record:after@batch=1", {"late": "drop"}, marks=SWEEP
        ),
        pytest.param(
            "at_most_once", "write.send:after@batch=1,commit.record:after@batch=2", {"late": "drop"}, marks=SWEEP
        ),
        # With a table of keys the kills are met without Spark: tests/broker/test_dedup_kill.py.
        pytest.param(
            "exactly_once", "dedup.note:after@batch=1,dedup.keep:after@batch=1", {"memory": "table"}, marks=SWEEP
        ),
        pytest.param(
            "at_most_once", "dedup.keep:before@batch=1,commit.record:after@batch=2", {"memory": "table"}, marks=SWEEP
        ),
    ],
)
def test_repeats_across_a_crash_are_known(tmp_path: Path, guarantee: str, kills: str, memory: dict[str, str]) -> None:
    """Each batch repeats the ids of the previous one. The transform alone would be a direct stream, bypassing Spark."""
    per_batch = RECORDS // 3
    ids = [i + batch * per_batch // 2 for batch in range(3) for i in range(per_batch)]
    rows = {
        "key": [f"id-{i}".encode() for i in ids],
        "value": [b"v" * 10_000] * RECORDS,  # a task that skips its shard leaves 7 MB unread
        "timestamp": pa.array([BEGAN + timedelta(milliseconds=i) for i in ids], pa.timestamp("us", tz="UTC")),
    }
    append(str(tmp_path / "log"), pa.table(rows))
    said = {
        "pipeline": "once", "guarantee": guarantee, "checkpoint": "checkpoint", "trigger": "available_now",
        "source": {"format": "log", "path": "log", "maxOffsetsPerTrigger": per_batch},
        "dedup": {"by": ["key"], "within": "1 hour", **memory},
        "transform": {"select": ["key", "value"]},
        "sinks": [{"format": "sqlite", "path": "sink.db", "table": "rows"}],
        "audit": {"id": "CAST(key AS STRING)"}, "master": "local[2]",
    }  # fmt: skip
    file, report = tmp_path / "once.yaml", tmp_path / "report.json"
    file.write_text(yaml.safe_dump(said))
    with (tmp_path / "output").open("wb") as output:
        command = [sys.executable, str(APP), str(file), str(report)]
        done = supervisor.run(command, kills, tmp_path / "hits", timeout_s=400, output=output)
    assert done.exit_code == 0, (tmp_path / "output").read_text()[-4000:]
    assert len(done.kills) == len(kills.split(","))
    with closing(sqlite3.connect(tmp_path / "sink.db")) as connection:
        found = Counter(i.decode() for (i,) in connection.execute("SELECT key FROM rows"))
    wanted = {f"id-{i}" for i in ids}
    (told,) = json.loads(report.read_text()).values()
    assert told["verdict"] == "held", told
    assert told["dedup"]["records"] == RECORDS
    assert told["dedup"]["deduplicated"] == RECORDS - len(wanted)
    assert set(found) <= wanted
    if guarantee != "at_most_once":
        assert set(found) == wanted
    if guarantee != "at_least_once":
        assert max(found.values()) == 1
