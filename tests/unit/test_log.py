"""The local log alone: appending, offsets, slices, reading, also while the table is rewritten."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from delivered.connectors.log import CONNECTOR, LogOptions, append
from delivered.connectors.log import table as reading
from delivered.connectors.log.source import LogSource
from delivered.contract.source import Slice
from delivered.model.errors import DeliveredError, InvariantBroken, UsageError

parse = LogOptions.parse


def records(first: int, count: int, **columns: Any) -> pa.Table:
    ids = range(first, first + count)
    return pa.table({"key": [f"k{i % 7}".encode() for i in ids], "value": [f"v{i}".encode() for i in ids], **columns})


def source_at(path: Path, **options: str) -> LogSource:
    return CONNECTOR.source({"path": str(path), **options})  # type: ignore[return-value]


def read(source: LogSource, pieces: Any) -> pa.Table:
    batches = [b for piece in pieces for b in source.read(pickle.loads(pickle.dumps(piece)))]
    return pa.Table.from_batches(batches, schema=source.schema())


def ranges(pieces: Any) -> list[tuple[int, int, int]]:
    return [(p.data["partition"], p.data["start"], p.data["end"]) for p in pieces]


def read_all(source: LogSource) -> pa.Table:
    driver = source.driver()
    return read(source, driver.slices(*driver.batch()))


def rewrite(path: Path, how: str) -> None:
    """Move every record to another file, and delete the old files."""
    table = DeltaTable(str(path))
    table.optimize.compact() if how == "compact" else table.optimize.z_order(["value"])
    DeltaTable(str(path)).vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "events"


def test_columns_are_those_of_a_kafka_source(log: Path) -> None:
    headers = pa.array(
        [[{"key": "h", "value": b"1"}], None, []], pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    )
    at = pa.array([1_000_000, None, 3], pa.timestamp("us", "UTC"))
    given = pa.table(
        {
            "key": [b"a", None, b""],
            "value": [b"x", None, "ü".encode()],
            "headers": headers,
            "timestamp": at,
            "partition": pa.array([0, 0, 3]),
        }
    )
    done = append(str(log), given)
    assert dict(done.offsets) == {0: (0, 1), 3: (0, 0)}
    found = read_all(source_at(log, includeHeaders="true"))
    assert found.schema == source_at(log, includeHeaders="true").schema()
    assert found.drop_columns(["timestamp", "headers"]).to_pylist() == [
        {"key": b"a", "value": b"x", "topic": "events", "partition": 0, "offset": 0, "timestampType": 0},
        {"key": None, "value": None, "topic": "events", "partition": 0, "offset": 1, "timestampType": 0},
        {"key": b"", "value": "ü".encode(), "topic": "events", "partition": 3, "offset": 0, "timestampType": 0},
    ]
    assert found.column("headers").to_pylist() == headers.to_pylist()
    assert found.column("timestamp").to_pylist() == at.to_pylist()
    assert "headers" not in source_at(log).schema().names


def test_offsets_are_contiguous_over_appends_and_partitions(log: Path) -> None:
    for i in range(3):
        append(str(log), records(i * 100, 100), partition_by=4)
    found = read_all(source_at(log)).to_pandas()
    for _, rows in found.groupby("partition"):
        assert list(rows.offset) == list(range(len(rows)))
    assert sorted(found.value) == sorted(records(0, 300).column("value").to_pylist())
    assert (found.groupby("key").partition.nunique() == 1).all()  # a key stays in its partition


def test_stream_admits_freezes_and_finds_new_partitions(log: Path) -> None:
    append(str(log), records(0, 100))
    source = source_at(log, maxOffsetsPerTrigger="30")
    assert source.rows_per_batch_max == 30
    driver = source.driver()
    start = driver.initial()
    first = driver.latest(start, 30)
    assert first["offsets"] == {"0": 30}
    driver.freeze()
    append(str(log), records(100, 10, partition=pa.array([1] * 10)))
    assert driver.latest(first, None)["offsets"] == {"0": 100}
    fresh = source.driver()
    assert fresh.latest(first, None)["offsets"] == {"0": 100, "1": 10}
    assert ranges(fresh.slices(first, fresh.latest(first, None))) == [(0, 30, 100), (1, 0, 10)]
    newest = fresh.newest()
    assert newest is not None
    assert newest["offsets"] == {"0": 100, "1": 10}


def test_a_limit_below_the_number_of_partitions_starves_none(log: Path) -> None:
    append(str(log), records(0, 300, partition=pa.array([0] * 200 + [1] * 99 + [2])))
    driver = source_at(log).driver()
    end = driver.latest(driver.initial(), 2)
    assert all(at >= 1 for at in end["offsets"].values()), end


def test_p17_no_news_is_no_batch_and_an_empty_range_no_slice(log: Path) -> None:
    """P17; and a compaction makes a new version of the table, but no batch."""
    append(str(log), records(0, 10))
    append(str(log), records(10, 10))
    driver = source_at(log).driver()
    end = driver.latest(driver.initial(), None)
    assert driver.latest(end, None) == end
    assert driver.slices(end, end) == []
    rewrite(log, "compact")
    assert driver.latest(end, 5) == end


@pytest.mark.parametrize("how", ["compact", "sort", "append"])
def test_a_slice_gives_the_same_records_whatever_happens_to_the_table(log: Path, how: str) -> None:
    for i in range(4):
        append(str(log), records(i * 500, 500), partition_by=2)
    source = source_at(log)
    driver = source.driver()
    start = driver.latest(driver.initial(), 700)
    end = driver.latest(start, 800)
    pieces = driver.slices(start, end)
    before = read(source, pieces)
    assert before.num_rows == 800
    append(str(log), records(2000, 100), partition_by=2) if how == "append" else rewrite(log, how)
    assert read(source, pieces).equals(before)  # the file names in the slice may be gone
    again = source.driver().slices(start, end)  # as in another process after a crash
    assert ranges(again) == ranges(pieces)
    assert read(source, again).equals(before)


def test_only_the_files_and_row_groups_of_the_range_are_read(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(5):
        append(str(log), records(i * 200_000, 200_000))
    source = source_at(log)
    driver = source.driver()
    opened: list[tuple[int, int]] = []
    original = reading._groups

    def spy(file: Any, start: int, end: int) -> Any:
        found = original(file, start, end)
        opened.append((len(found), file.metadata.num_row_groups))
        return found

    monkeypatch.setattr(reading, "_groups", spy)
    pieces = driver.slices({"offsets": {"0": 450_000}}, {"offsets": {"0": 450_010}})
    assert len(pieces[0].data["files"]) == 1
    assert read(source, pieces).column("offset").to_pylist() == list(range(450_000, 450_010))
    assert opened == [(1, 4)]  # one file, one of its four row groups


def test_append_is_idempotent_by_application_id(log: Path) -> None:
    assert append(str(log), records(0, 5), idempotence=("shop", 1)).offsets == {0: (0, 4)}
    assert append(str(log), records(0, 5), idempotence=("shop", 1)).repeated
    assert append(str(log), records(0, 5), idempotence=("other", 1)).offsets == {0: (5, 9)}
    assert append(str(log), records(5, 5), idempotence=("shop", 2)).offsets == {0: (10, 14)}
    assert append(str(log), records(0, 5), idempotence=("shop", 1)).repeated
    assert read_all(source_at(log)).num_rows == 15


def test_many_producers_at_once_give_every_offset_once(log: Path) -> None:
    errors: list[BaseException] = []

    def produce(i: int) -> None:
        try:
            for j in range(5):
                append(str(log), records(1000 * i + 10 * j, 10), partition_by=2, idempotence=(f"p{i}", j))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=produce, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    found = read_all(source_at(log))  # gaps and duplicates raise here
    assert sorted(found.column("value").to_pylist()) == sorted(
        v for i in range(4) for j in range(5) for v in records(1000 * i + 10 * j, 10).column("value").to_pylist()
    )


KILLED = """
    import os, signal, sys
    import pyarrow as pa
    from delivered.connectors.log import append, produce
    path, when = sys.argv[1:]
    kill, commit = lambda: os.kill(os.getpid(), signal.SIGKILL), produce.commit
    def dies(*arguments):
        if when == "before": kill()
        commit(*arguments)
        kill()
    if when != "never": produce.commit = dies
    done = append(path, pa.table({"value": [b"a", b"b"]}), idempotence=("shop", 1))
    print(done.repeated)
"""


@pytest.mark.parametrize(("when", "rows"), [("before", 0), ("after", 2)])
def test_killed_producer_appends_again_without_loss_or_double(log: Path, when: str, rows: int) -> None:
    """F1: it dies before its commit, or after it but before it learns the outcome; then it is restarted."""
    append(str(log), records(0, 1))
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(log)]
    assert subprocess.run([*command, when], check=False).returncode == -signal.SIGKILL
    assert read_all(source_at(log)).num_rows == 1 + rows
    again = subprocess.run([*command, "never"], capture_output=True, text=True, check=True)
    assert again.stdout.strip() == str(rows > 0)
    assert read_all(source_at(log)).column("value").to_pylist() == [b"v0", b"a", b"b"]


def test_append_is_on_the_disk_when_it_returns(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F4: data files and folders are synced before the commit is visible, the commit and its folder afterwards."""
    append(str(log), records(0, 1))
    commit_file = log / "_delta_log" / f"{2:020d}.json"
    synced: list[tuple[Path, bool]] = []
    fsync = os.fsync

    def spy(descriptor: int) -> None:
        synced.append((Path(f"/proc/self/fd/{descriptor}").readlink(), commit_file.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", spy)
    append(str(log), records(0, 10), partition_by=2)
    before = {path for path, committed in synced if not committed}
    after = {path for path, committed in synced if committed}
    files = {log / name for name in DeltaTable(str(log)).get_add_actions(flatten=True).column("path").to_pylist()}
    new = {f for f in files if f in before}
    assert len(new) == 2
    assert {f.parent for f in new} | {log} <= before
    assert {commit_file, log / "_delta_log"} <= after
    synced.clear()
    source_at(log).driver().newest()  # a reader syncs what it reports: the producer may have died in between
    assert {commit_file, log / "_delta_log"} <= {path for path, _ in synced}


def test_deleted_records_are_an_error_not_a_gap(log: Path) -> None:
    for i in range(3):
        append(str(log), records(i * 10, 10))
    source = source_at(log)
    driver = source.driver()
    start, end = driver.batch()
    DeltaTable(str(log)).delete("offset >= 12 AND offset < 15")
    with pytest.raises(InvariantBroken, match="expected offset 12, found offset 15"):
        read(source, source.driver().slices(start, {**end, "version": -1}))
    DeltaTable(str(log)).delete("offset < 10")
    with pytest.raises(InvariantBroken, match="LOG_RECORDS_MISSING"):
        source.driver().slices(start, {**end, "version": -1})
    assert source.driver().initial()["offsets"] == {"0": 10}


def test_offsets_know_their_log_again(log: Path) -> None:
    """Offsets logged by an earlier version have no id. A batch planned before is not read from another log either."""
    append(str(log), records(0, 10))
    driver = source_at(log).driver()
    start, end = driver.initial(), driver.latest(driver.initial(), None)
    log.rename(log.with_name("away"))
    append(str(log), records(0, 30))
    for read in (lambda: source_at(log).driver().latest(end, None), lambda: source_at(log).driver().slices(start, end)):
        with pytest.raises(InvariantBroken, match=r"DATA_LOST.*deleted and recreated"):
            read()
    plain = {k: v for k, v in end.items() if k in ("version", "offsets")}
    assert source_at(log).driver().latest(plain, None)["offsets"] == {"0": 30}


def test_log_put_back_to_an_older_copy_is_an_error(log: Path) -> None:
    append(str(log), records(0, 10))
    with pytest.raises(InvariantBroken, match="LOG_BEHIND"):
        source_at(log).driver().latest({"version": 9, "offsets": {"0": 11}}, None)


@pytest.mark.parametrize("how", ["copy", "version"])
def test_a_log_put_back_to_an_older_state_that_grew_past_the_position(log: Path, how: str) -> None:
    """P29: it is the same table, and offsets do not show it. The commit does, as long as Delta keeps it; the record
    does after Delta's RESTORE, too, which keeps the commits that it undoes."""
    append(str(log), records(0, 10))
    shutil.copytree(log, log.with_name("copy"))
    earlier = DeltaTable(str(log)).version()
    append(str(log), records(10, 10))
    driver = source_at(log).driver()
    end = driver.latest(driver.initial(), None)
    known = driver.landmarks(end)
    source_at(log).driver().check_landmarks(end, known)
    if how == "copy":
        log.rename(log.with_name("away"))
        log.with_name("copy").rename(log)
    else:
        DeltaTable(str(log)).restore(earlier)
    append(str(log), records(20, 30))
    again = source_at(log).driver()
    assert again.latest(end, None)["offsets"] == {"0": 40}
    for one in (again, driver):
        with pytest.raises(InvariantBroken, match=r"DATA_LOST.*older copy"):
            one.check_landmarks(end, known)


@pytest.mark.parametrize("how", ["compact", "z_order"])
def test_landmarks_of_a_log_outlive_its_files_and_what_readers_no_longer_need(log: Path, how: str) -> None:
    for first in (0, 10):
        append(str(log), records(first, 10))
    driver = source_at(log).driver()
    end = driver.latest(driver.initial(), None)
    known = driver.landmarks(end)
    assert known.keys() == {"version", "0"}
    rewrite(log, how)
    append(str(log), records(20, 10))
    assert driver.landmarks(end) == known
    driver.check_landmarks(end, {"version": known["version"]})  # of an earlier release
    DeltaTable(str(log)).delete("offset < 20")
    rewrite(log, how)
    assert driver.landmarks(end).keys() == {"version"}
    driver.check_landmarks(end, known)


def test_a_log_that_vanishes_while_it_is_read(log: Path) -> None:
    """To an incremental update, a folder that is gone is one without a new version."""
    append(str(log), records(0, 10))
    driver = source_at(log).driver()
    start, end = driver.initial(), driver.latest(driver.initial(), None)
    log.rename(log.with_name("away"))
    with pytest.raises(UsageError, match=r"LOG_MISSING.*restore the folder"):
        driver.latest(end, None)
    log.with_name("away").rename(log)
    assert driver.latest(start, None) == end
    log.rename(log.with_name("away"))
    append(str(log), records(0, 30))
    with pytest.raises(InvariantBroken, match=r"DATA_LOST.*deleted and recreated"):
        driver.latest(end, None)


@pytest.mark.parametrize(
    ("starting", "ending", "expected"),
    [
        ("earliest", "latest", list(range(30))),
        ('{"0": 12}', "latest", list(range(12, 30))),
        ('{"0": -2}', '{"0": 3}', [0, 1, 2]),
        ('{"version": 1, "offsets": {"0": 29}}', '{"0": -1}', [29]),
        ("latest", "latest", []),
    ],
)
def test_starting_and_ending_offsets(log: Path, starting: str, ending: str, expected: list[int]) -> None:
    append(str(log), records(0, 30))
    source = source_at(log, startingOffsets=starting, endingOffsets=ending)
    assert read_all(source).column("offset").to_pylist() == expected


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({}, "OPTION_MISSING"),
        ({"path": "x", "startingOfsets": "latest"}, "OPTION_UNKNOWN"),
        ({"path": "x", "startingOffsets": "soon"}, "OPTION_VALUE"),
        ({"path": "x", "startingOffsets": '{"0": -3}'}, "OPTION_VALUE"),
        ({"path": "x", "startingOffsets": "[1]"}, "OPTION_VALUE"),
        ({"path": "x", "endingOffsets": "earliest"}, "OPTION_VALUE"),
        ({"path": "x", "maxOffsetsPerTrigger": "0"}, "OPTION_VALUE"),
    ],
)
def test_bad_options(options: dict[str, str], code: str) -> None:
    with pytest.raises(UsageError, match=f"DELIVERED_{code}"):
        CONNECTOR.source(options)


def test_storage_options_travel_as_references(monkeypatch: pytest.MonkeyPatch) -> None:
    options = parse({"path": "s3://bucket/events", "storage.AWS_SECRET_ACCESS_KEY": "env:LOG_SECRET"})
    assert options.path == "s3://bucket/events"
    assert options.name == "events"
    assert "LOG_SECRET" not in repr(options)
    monkeypatch.setenv("LOG_SECRET", "hidden")
    assert options.storage_resolved() == {"aws_secret_access_key": "hidden"}


def test_missing_log_and_foreign_table_are_refused(log: Path, tmp_path: Path) -> None:
    assert [(f.code, f.refuses) for f in source_at(log).preflight()] == [("LOG_MISSING", True)]
    from deltalake import write_deltalake

    write_deltalake(str(tmp_path / "other"), pa.table({"a": [1]}))
    assert [f.code for f in source_at(tmp_path / "other").preflight()] == ["LOG_FOREIGN"]
    append(str(log), records(0, 1))
    assert source_at(log).preflight() == []


@pytest.mark.parametrize(
    "columns",
    [{"key": [b"a"]}, {"value": [b"a"], "offset": [1]}, {"value": [b"a"], "valeu": [b"b"]}, {"value": [1.5]}],
)
def test_bad_columns_append_nothing(log: Path, columns: dict[str, Any]) -> None:
    append(str(log), records(0, 1))
    with pytest.raises(UsageError, match="DELIVERED_LOG_COLUMNS"):
        append(str(log), pa.table(columns))
    assert read_all(source_at(log)).num_rows == 1
    assert len(list(log.rglob("*.parquet"))) == 1


def test_empty_append_and_partition_bounds(log: Path) -> None:
    assert append(str(log), records(0, 0)).offsets == {}
    for bad in ({"partition_by": 0}, {"idempotence": ("delivered_log", 1)}):
        with pytest.raises(UsageError):
            append(str(log), records(0, 1), **bad)  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        append(str(log), records(0, 1, partition=pa.array([-1])))


def test_failed_stream_of_batches_appends_nothing(log: Path) -> None:
    def broken() -> Any:
        yield from records(0, 10).to_batches()
        raise DeliveredError("TEST", "the producer's own error")

    with pytest.raises(DeliveredError, match="own error"):
        append(str(log), broken())
    assert read_all(source_at(log)).num_rows == 0
    assert list(log.rglob("*.parquet")) == []


def test_p26_reading_a_large_slice_takes_bounded_memory(log: Path) -> None:
    """P26: 1 GB of values in one slice; what a task holds is a few batches."""
    value = b"x" * 4_000
    append(str(log), (pa.record_batch([pa.array([value] * 4_096)], names=["value"]) for _ in range(64)))
    code = """
        import pickle, sys
        from delivered.connectors.log import CONNECTOR
        source = CONNECTOR.source({"path": sys.argv[1]})
        driver = source.driver()
        start, end = driver.batch()
        def peak_mib():
            with open("/proc/self/status") as status:
                return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) // 1024
        few = driver.slices(start, {**end, "offsets": {"0": 4_096}})
        for piece in few: rows = sum(b.num_rows for b in source.read(piece))
        first = peak_mib()
        for piece in driver.slices(start, end): rows = sum(b.num_rows for b in source.read(piece))
        print(rows, peak_mib() - first)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(log)], capture_output=True, text=True)
    assert done.stderr == ""
    rows, more = done.stdout.split()
    assert int(rows) == 262_144
    assert int(more) < 100, more


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_range_of_any_history_reads_as_the_model_says(data: st.DataObject) -> None:
    """Appends, compactions and sorts in any order: a range of offsets always has the same records."""
    model: dict[int, list[bytes]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        count = 0
        for step in data.draw(
            st.lists(st.sampled_from(["append", "append", "compact", "sort"]), min_size=1, max_size=6)
        ):
            if step == "append" or not model:
                partitions = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=40))
                values = [f"{(count + i) * 7919 % 1000:03}-{count + i}".encode() for i in range(len(partitions))]
                count += len(partitions)
                append(str(path), pa.table({"value": values, "partition": pa.array(partitions, pa.int32())}))
                for p, v in zip(partitions, values, strict=True):
                    model.setdefault(p, []).append(v)
            else:
                rewrite(path, step)
        source = source_at(path)
        driver = source.driver()
        start = {p: data.draw(st.integers(0, len(v))) for p, v in model.items()}
        end = {p: data.draw(st.integers(start[p], len(v))) for p, v in model.items()}
        texts = [{"version": -1, "offsets": {str(p): o for p, o in at.items()}} for at in (start, end)]
        found = read(source, driver.slices(*json.loads(json.dumps(texts))))
        expected = [v for p in sorted(model) for v in model[p][start[p] : end[p]]]
        assert found.column("value").to_pylist() == expected


def test_slice_with_vanishing_files_stops_after_a_bound(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append(str(log), records(0, 5))
    for path in log.rglob("*.parquet"):
        path.unlink()  # a faulty vacuum: the table still references them
    piece = Slice({"partition": 0, "start": 0, "end": 5, "files": [("gone.parquet", 0, 4)]})
    with pytest.raises(InvariantBroken, match="LOG_FILES_VANISH"):
        list(source_at(log).read(piece))


def test_connector_imports_no_client_and_no_spark() -> None:
    code = (
        "import sys, pickle; from delivered.connectors.log import CONNECTOR; pickle.dumps(CONNECTOR); "
        "print([m for m in ('deltalake', 'pyspark', 'pyarrow.parquet') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    with pytest.raises(UsageError, match="NOT_A_SINK"):
        CONNECTOR.sink({})
