"""Values that Spark and Arrow have and others have not: written exactly, or a bad row that names its column."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyiceberg.expressions import EqualTo
from tests.support.iceberg import sink_at, theirs
from tests.support.memory import CONNECTOR as MEMORY
from tests.support.memory.world import make_world
from tests.support.scans import scanned_table
from tests.support.sinks import Rig

from delivered.connectors.delta import CONNECTOR as DELTA
from delivered.connectors.files import CONNECTOR as FILES
from delivered.connectors.sqlite import CONNECTOR as SQLITE
from delivered.contract.sink import Sink
from delivered.engine import Sinks
from delivered.model.errors import BadRecord, DeliveredError, UsageError
from delivered.model.rows import OnBadRow

DAY_US = 86_400_000_000
LEAST, GREATEST = -(1 << 63), (1 << 63) - 1
YEAR_1, YEAR_10000, YEAR_20000 = -719_162, 2_932_897, 6_585_322
JULIAN_0 = -2_440_588
TIMES = {
    "year 1": YEAR_1 * DAY_US, "9999": YEAR_10000 * DAY_US - 1, "before 1970": -1, "null": None,
    "year 0": (YEAR_1 - 366) * DAY_US, "before year 1": YEAR_1 * DAY_US - 1, "year 10000": YEAR_10000 * DAY_US,
    "year 20000": YEAR_20000 * DAY_US, "Julian 0": JULIAN_0 * DAY_US, "greatest": GREATEST,
    "before Julian 0": JULIAN_0 * DAY_US - 1, "least": LEAST,
}  # fmt: skip
DAYS = {
    "year 1": YEAR_1, "9999": YEAR_10000 - 1, "before 1970": -1, "null": None, "year 0": YEAR_1 - 366,
    "before year 1": YEAR_1 - 1, "year 10000": YEAR_10000, "year 20000": YEAR_20000, "Julian 0": JULIAN_0,
    "greatest": (1 << 31) - 1, "before Julian 0": JULIAN_0 - 1, "least": -(1 << 31),
}  # fmt: skip
OF_TEXT = frozenset(("year 1", "9999", "before 1970", "null"))
"""What a text form of four digits holds."""


@dataclass
class System:
    """
    Attributes:
        rejects: rows that it cannot store, in columns t and z, and in d.
        theirs: what its own client reads: id, and each column as the number that Arrow stores.
    """

    make: Callable[[str], Sink]
    theirs: Callable[[str], list[tuple[Any, ...]]]
    rejects: tuple[frozenset[str], frozenset[str]]


TEXT_FORM = (frozenset(TIMES) - OF_TEXT,) * 2
NOTHING = (frozenset[str](),) * 2


def numbers(table: Any) -> list[tuple[Any, ...]]:
    kinds = {"id": pa.int64(), "t": pa.int64(), "z": pa.int64(), "d": pa.int32()}
    columns = [pa.table(table)[name].combine_chunks().cast(kind).to_pylist() for name, kind in kinds.items()]
    return sorted(zip(*columns, strict=True))


def _local(path: Path, system: str) -> System:
    def one(name: str) -> Path:
        return path / name

    def files(name: str, suffix: str) -> list[Path]:
        found = one(name).rglob(f"*.{suffix}")
        return sorted(p for p in found if not any(n.startswith("_") for n in p.relative_to(path).parts))

    def parquet(name: str) -> list[tuple[Any, ...]]:
        return numbers(pa.concat_tables([pq.read_table(p) for p in files(name, "parquet")]))

    def lines(name: str) -> list[tuple[Any, ...]]:
        rows = [json.loads(line) for p in files(name, "json") for line in p.read_text().splitlines()]
        kinds = [("t", pa.timestamp("us")), ("z", pa.timestamp("us", "UTC")), ("d", pa.date32())]
        columns = {n: pa.array([r[n] for r in rows], pa.string()).cast(k) for n, k in kinds}
        return numbers({"id": [r["id"] for r in rows], **columns})

    def csv(name: str) -> list[tuple[Any, ...]]:
        kinds = {"id": pa.int64(), "t": pa.timestamp("us"), "z": pa.timestamp("us", "UTC"), "d": pa.date32()}
        typed = pyarrow.csv.ConvertOptions(column_types=kinds)
        return numbers(pa.concat_tables([pyarrow.csv.read_csv(p, convert_options=typed) for p in files(name, "csv")]))

    def sqlite(name: str) -> list[tuple[Any, ...]]:
        rows = sqlite3.connect(one(name)).execute("SELECT id, t, rtrim(z, 'Z'), d FROM v").fetchall()
        kinds = [pa.int64(), pa.timestamp("us"), pa.timestamp("us"), pa.date32()]
        columns = [
            pa.array(c, k) if i == 0 else pa.array(c, pa.string()).cast(k)
            for i, (c, k) in enumerate(zip(zip(*rows, strict=True), kinds, strict=True))
        ]
        return numbers(dict(zip(("id", "t", "z", "d"), columns, strict=True)))

    match system:
        case "delta":
            return System(
                lambda n: DELTA.sink({"path": str(one(n))}),
                lambda n: numbers(DeltaTable(str(one(n))).to_pyarrow_table()),
                NOTHING,
            )
        case "iceberg":
            return System(lambda n: sink_at(one(n)), lambda n: numbers(theirs(one(n)).scan().to_arrow()), NOTHING)
        case "sqlite":
            return System(lambda n: SQLITE.sink({"path": str(one(n)), "table": "v"}), sqlite, TEXT_FORM)
    read = {"parquet": parquet, "json": lines, "csv": csv}[system]
    rejects = NOTHING if system == "parquet" else TEXT_FORM
    return System(lambda n: FILES.sink({"path": str(one(n)), "fileFormat": system}), read, rejects)


def _server(request: pytest.FixtureRequest, system: str) -> System:
    server: Any = request.getfixturevalue(system)
    made: dict[str, str] = {}

    def sink(name: str) -> Sink:
        made[name] = made.get(name) or server.table(None)
        given: Sink = server.sink(made[name], ifNotExists="true")
        return given

    def micros(name: str) -> str:
        if system == "postgres":
            at = f"({name} AT TIME ZONE 'UTC')" if name == "z" else name
            return f"({at}::date - date '1970-01-01')::numeric * 86400000000 + extract(epoch FROM {at}::time) * 1000000"
        return f"timestampdiff(MICROSECOND, '1970-01-01', {name})"

    day = "d - date '1970-01-01'" if system == "postgres" else "datediff(d, '1970-01-01')"

    def read(name: str) -> list[tuple[Any, ...]]:
        rows = server.execute(f"SELECT id, {micros('t')}, {micros('z')}, {day} FROM {made[name]}")
        return sorted(tuple(None if v is None else int(v) for v in row) for row in rows)

    own = (frozenset(("before Julian 0", "least")), frozenset(("before Julian 0", "least", "greatest")))
    return System(sink, read, own if system == "postgres" else TEXT_FORM)


SYSTEMS = ["delta", "iceberg", "parquet", "json", "csv", "sqlite", "postgres", "mysql"]


@pytest.fixture
def system(request: pytest.FixtureRequest, tmp_path: Path) -> System:
    name = request.param
    return _server(request, name) if name in ("postgres", "mysql") else _local(tmp_path, name)


def rows() -> pa.RecordBatch:
    """One row for each time and day; the other columns of it are null."""
    n = len(TIMES)
    times, dates, none = list(TIMES.values()), list(DAYS.values()), [None] * n
    columns = [
        pa.array(range(3 * n), pa.int64()),
        pa.array(times + none + none, pa.int64()).cast(pa.timestamp("us")),
        pa.array(none + times + none, pa.int64()).cast(pa.timestamp("us", "UTC")),
        pa.array(none + none + dates, pa.int32()).cast(pa.date32()),
    ]
    return pa.record_batch(columns, names=["id", "t", "z", "d"])


def expected(system: System) -> list[str | None]:
    """For each row, the column that makes it a bad one."""
    times, dates = system.rejects
    return (
        ["'t'" if n in times else None for n in TIMES]
        + ["'z'" if n in times else None for n in TIMES]
        + ["'d'" if n in dates else None for n in DAYS]
    )


@pytest.mark.parametrize("system", SYSTEMS, indirect=True)
def test_every_moment_is_written_exactly_or_is_a_bad_row(system: System) -> None:
    sink, batch, bad = system.make("v"), rows(), expected(system)
    assert sink.capability().validates
    reasons = sink.invalid_rows(batch)
    told = [None] * batch.num_rows if reasons is None else reasons.to_pylist()
    assert [r and r.split()[1].rstrip(":") for r in told] == bad
    good = batch.filter(pa.array([b is None for b in bad]))
    Rig(sink).run_rows(0, [good])
    assert system.theirs("v") == numbers(pa.Table.from_batches([good]))
    assert numbers(scanned_table(sink)) == numbers(pa.Table.from_batches([good]))
    if any(bad):
        first = next(at for at, b in enumerate(bad) if b)
        with pytest.raises(BadRecord, match=rf"VALUE_UNSTORABLE.*column {bad[first]}"):
            Rig(system.make("v")).run_rows(0, [batch.slice(first, 1)])


def test_a_bad_row_goes_to_the_dead_letters_with_the_number_that_it_holds(tmp_path: Path) -> None:
    world = make_world(str(tmp_path))
    letters = MEMORY.sink({"world": str(tmp_path), "commit": "two_phase"})
    files = FILES.sink({"path": str(tmp_path / "v"), "fileFormat": "csv"})
    group = Sinks.of([("files", files, None)], OnBadRow.DEAD_LETTER, ("letters", letters))
    Rig(group).run_rows(0, [rows()])  # type: ignore[arg-type]
    assert scanned_table(files).num_rows == 3 * len(OF_TEXT)
    batches = [batch for work, batch in world.visible if work.scope.sink == "letters"]
    visible = [json.loads(value) for batch in batches for value in batch["value"].to_pylist()]
    found = {json.loads(letter["record"])["id"]: letter for letter in visible}
    assert len(found) == 3 * (len(TIMES) - len(OF_TEXT))
    late = list(TIMES).index("year 20000")
    assert json.loads(found[late]["record"])["t"] == TIMES["year 20000"]
    assert found[late]["reason"] == "column 't': a timestamp outside the years 1 to 9999"


def append(sink: Sink, values: pa.Array, name: str = "v") -> None:
    Rig(sink).run_rows(0, [pa.record_batch([pa.array(range(len(values)), pa.int64()), values], names=["id", name])])


def equals(text: str) -> Any:
    return EqualTo("v", text)  # type: ignore[call-arg, arg-type]


@pytest.mark.parametrize("text", ["a" * 15 + "\ud7ff" + "b", "\U0010ffff" * 20, "\ud7ff" * 20])
def test_a_text_that_the_iceberg_client_cannot_bound_is_written(tmp_path: Path, text: str) -> None:
    """Its upper bound would end with a surrogate."""
    append(sink_at(tmp_path), pa.array([text, "a"]))
    assert sorted(theirs(tmp_path).scan(row_filter=equals(text)).to_arrow()["v"].to_pylist()) == [text]


@pytest.mark.parametrize("system", ["delta", "iceberg"])
def test_bounds_cover_row_groups_without_any(tmp_path: Path, system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parquet has none for a text of more than 4,096 bytes; of such a file, a reader must skip nothing."""
    monkeypatch.setattr("delivered.kits.table.shard.GROUP_ROWS", 1)
    values = pa.array(["m", "z" * 5_000, "a" * 5_000])
    sink = sink_at(tmp_path) if system == "iceberg" else DELTA.sink({"path": str(tmp_path / "t")})
    Rig(sink).run_rows(0, [pa.record_batch([pa.array([0, 1, 2]), values], names=["id", "v"])])
    for n, value in enumerate(values.to_pylist()):
        if system == "iceberg":
            found = theirs(tmp_path).scan(row_filter=equals(value)).to_arrow()
        else:
            found = DeltaTable(str(tmp_path / "t")).to_pyarrow_table(filters=[("v", "=", value)])
        assert pa.table(found)["id"].to_pylist() == [n]


def moments(*numbers: int, tz: str | None = None) -> pa.Array:
    return pa.array(numbers, pa.int64()).cast(pa.timestamp("us", tz))


def days(*numbers: int | None) -> pa.Array:
    return pa.array(numbers, pa.int32()).cast(pa.date32())


@pytest.mark.parametrize(
    "values",
    [moments(1_700_000_000_123_456, -1, 0), moments(1_700_000_000_123_456, -1, 0, tz="UTC"),
     pa.array(["a=b/c%d e\0\u00e9\U0001f600'\"\\", "__HIVE_DEFAULT_PARTITION__", "\u00e9" * 300, "..", " "]),
     pa.array([LEAST, GREATEST, 0]), pa.array([float("inf"), -0.0, 1e300])],
)  # fmt: skip
def test_partition_values_of_a_delta_table_come_back(tmp_path: Path, values: pa.Array) -> None:
    """A table partitioned by timestamps was committed, and could not be opened again."""
    batch = pa.record_batch([pa.array(range(len(values))), values], names=["id", "v"])
    path = str(tmp_path / "t")
    DeltaTable.create(path, batch.schema, partition_by=["v"])
    sink = DELTA.sink({"path": path, "partitionBy": "v"})
    append(sink, values)
    for table in (pa.table(DeltaTable(path).to_pyarrow_table()), scanned_table(sink)):
        assert repr(table.sort_by("id")["v"].to_pylist()) == repr(values.to_pylist())


def test_a_delta_table_partitioned_by_bytes_is_refused(tmp_path: Path) -> None:
    schema = pa.schema([("id", pa.int64()), ("v", pa.binary())])
    DeltaTable.create(str(tmp_path / "t"), schema, partition_by=["v"])
    with pytest.raises(UsageError, match=r"PARTITION_TYPE.*binary"):
        DELTA.sink({"path": str(tmp_path / "t"), "partitionBy": "v"}).ready_target(schema)


@pytest.mark.parametrize("mode", ["append", "upsert"])
@pytest.mark.parametrize(
    ("values", "column"),
    [(pa.array(["", "a", None]), "an empty text"), (days(YEAR_20000, 0, None), "a date")],
)
def test_a_partition_value_that_delta_cannot_hold_is_a_bad_row(
    tmp_path: Path, values: pa.Array, column: str, mode: str
) -> None:
    keyed = {"mode": "upsert", "keyColumns": "id"} if mode == "upsert" else {}
    sink = DELTA.sink({"path": str(tmp_path / "t"), "partitionBy": "v", **keyed})
    batch = pa.record_batch([pa.array([0, 1, 2]), values], names=["id", "v"])
    reasons = sink.invalid_rows(batch).to_pylist()  # type: ignore[attr-defined]
    assert reasons[0].startswith(f"column 'v': {column}")
    assert reasons[1:] == [None, None]
    with pytest.raises(BadRecord, match=rf"VALUE_UNSTORABLE.*column 'v': {column}"):
        Rig(sink).run_rows(0, [batch])
    Rig(sink).run_rows(0, [batch.slice(1)])
    found = pa.table(DeltaTable(str(tmp_path / "t")).to_pyarrow_table()).sort_by("id")["v"].to_pylist()
    assert found == values.slice(1).to_pylist()


WIDE = pa.decimal128(38, 0)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    ("by", "values"),
    [
        ("v", moments(YEAR_20000 * DAY_US, 0)), ("days(v)", moments(LEAST, 0)), ("hours(v)", moments(GREATEST, 0)),
        ("v", days(YEAR_20000, 0)),
        ("truncate(2, v)", pa.array([Decimal("-" + "9" * 38), Decimal("-" + "9" * 37 + "8")], WIDE)),
    ],
)  # fmt: skip
def test_a_partition_that_the_iceberg_client_cannot_commit_is_a_bad_row(
    tmp_path: Path, by: str, values: pa.Array, known: bool
) -> None:
    """It writes them as text, too, with Python's dates. Without partitionBy, the table says how it is partitioned."""
    sink = sink_at(tmp_path, partitionBy=by)
    batch = pa.record_batch([pa.array([0, 1]), values], names=["id", "v"])
    sink.ready_target(batch.schema)
    if known:
        reasons = sink.invalid_rows(batch)
        assert reasons is not None
        assert [r is None or "'v'" not in r for r in reasons.to_pylist()] == [False, True]
    else:
        sink = sink_at(tmp_path)
    with pytest.raises(BadRecord, match=r"VALUE_UNSTORABLE.*column 'v'"):
        Rig(sink).run_rows(0, [batch])
    Rig(sink).run_rows(0, [batch.slice(1)])
    assert theirs(tmp_path).scan().to_arrow()["id"].to_pylist() == [1]


@pytest.mark.parametrize("by", ["months(v)", "years(v)", "bucket(4, v)"])
def test_other_partitions_of_far_times_are_written(tmp_path: Path, by: str) -> None:
    values = moments(LEAST, YEAR_20000 * DAY_US, GREATEST)
    append(sink_at(tmp_path, partitionBy=by), values)
    found = theirs(tmp_path).scan().to_arrow().sort_by("id")["v"]
    assert found.cast(pa.int64()).to_pylist() == values.cast(pa.int64()).to_pylist()


@pytest.mark.parametrize("system", ["delta", "iceberg", "sqlite"])
def test_far_times_are_keys_and_versions(tmp_path: Path, system: str) -> None:
    options = {"mode": "upsert", "keyColumns": "k", "versionColumn": "at"}
    makes: dict[str, Callable[[], Sink]] = {
        "delta": lambda: DELTA.sink({"path": str(tmp_path / "t"), **options}),
        "iceberg": lambda: sink_at(tmp_path, **options),
        "sqlite": lambda: SQLITE.sink({"path": str(tmp_path / "t"), "table": "t", **options}),
    }
    make = makes[system]
    of_text = [YEAR_1 * DAY_US, 0, YEAR_10000 * DAY_US - 1]
    far = of_text if system == "sqlite" else [LEAST, YEAR_20000 * DAY_US, GREATEST]
    keys = moments(*far)
    for number, ats in enumerate((far, [far[1]] * 3, [far[2]] * 3)):
        batch = pa.record_batch([keys, moments(*ats), pa.array([number] * 3)], names=["k", "at", "n"])
        rig = Rig(make(), pipeline="keyed")
        rig.run_rows(number, [batch])
    found = scanned_table(make()).sort_by("k")
    assert found["k"].cast(pa.int64()).to_pylist() == far
    assert found["n"].to_pylist() == [2, 2, 0]


@pytest.mark.parametrize(
    ("kind", "value"),
    [("timestamp", "infinity"), ("timestamptz", "-infinity"), ("date", "infinity"), ("timestamp", "294276-12-31 23:59"),
     ("numeric(10, 2)", "NaN")],
)  # fmt: skip
def test_what_others_store_in_postgres_is_read_exactly_or_named(postgres: Any, kind: str, value: str) -> None:
    types = {"timestamp": pa.timestamp("us"), "timestamptz": pa.timestamp("us", "UTC"), "date": pa.date32()}
    name = postgres.table(f"id bigint, v {kind}")
    sink = postgres.sink(name)
    append(sink, pa.nulls(1, types.get(kind, pa.decimal128(10, 2))))
    assert scanned_table(sink).num_rows == 1
    postgres.execute(f"INSERT INTO {name} VALUES (1, '{value}')")
    with pytest.raises(BadRecord, match=r"VALUE_UNREADABLE.*Column 'v'"):
        scanned_table(sink)


def test_zero_dates_of_mysql_are_not_null(mysql: Any) -> None:
    for kind, column in (("date", days(0)), ("datetime(6)", moments(0))):
        name = mysql.table(f"id bigint, v {kind}")
        sink = mysql.sink(name)
        append(sink, column)
        assert scanned_table(sink).num_rows == 1
        with mysql.connect(sql_mode="") as connection, connection.cursor() as cursor:
            cursor.execute(f"INSERT INTO {name} VALUES (1, '0000-00-00')")
        with pytest.raises(BadRecord, match=r"VALUE_UNREADABLE.*Column 'v'.*0000-00-00"):
            scanned_table(sink)


def test_what_others_store_in_sqlite_is_read_exactly_or_named(tmp_path: Path) -> None:
    for n, value in enumerate(("'tomorrow'", "'20000-01-01 00:00:00'", "7", "x'00'")):
        sink = SQLITE.sink({"path": str(tmp_path / f"t{n}"), "table": "t"})
        append(sink, moments(0))
        connection = sqlite3.connect(tmp_path / f"t{n}")
        connection.execute(f"INSERT INTO t VALUES (1, {value})")
        connection.commit()
        connection.close()
        with pytest.raises(BadRecord, match=r"VALUE_UNREADABLE.*Column 'v'"):
            scanned_table(sink)


@pytest.mark.parametrize("mechanism", ["one_transaction", "two_phase"])
def test_a_conflict_of_a_far_time_goes_to_the_dead_letters_of_postgres(postgres: Any, mechanism: str) -> None:
    options = {"mode": "insert", "keyColumns": "id", "onConflict": "dead_letter", "mechanism": mechanism}
    name = postgres.table("id bigint PRIMARY KEY, v timestamptz, d date")
    rig = Rig(postgres.sink(name, **options))
    far = [YEAR_20000 * DAY_US, JULIAN_0 * DAY_US, 0]
    columns = [moments(*far, tz="UTC"), days(YEAR_20000, JULIAN_0, 0)]
    batch = pa.record_batch([pa.array([0, 1, 2]), *columns], names=["id", "v", "d"])
    for number in (0, 1):
        rig.run_rows(number, [batch])
    committer = rig.sink.committer(rig.scope)
    found = [json.loads(letter.record) for letter in committer.dead_letters()]
    committer.close()
    found.sort(key=lambda row: row["id"])
    assert [row["v"] for row in found] == [*far[:2], "1970-01-01 00:00:00+00:00"]
    assert [row["d"] for row in found] == [YEAR_20000, JULIAN_0, "1970-01-01"]


@pytest.mark.parametrize("system", ["delta", "iceberg"])
def test_a_far_key_in_two_shards_is_named_as_a_number(tmp_path: Path, system: str) -> None:
    options = {"mode": "upsert", "keyColumns": "k"}
    sink = sink_at(tmp_path, **options) if system == "iceberg" else DELTA.sink({"path": str(tmp_path / "t"), **options})
    batch = pa.record_batch([moments(LEAST), pa.array([1])], names=["k", "n"])
    with pytest.raises(DeliveredError, match=rf"KEY_IN_TWO_SHARDS.*{LEAST}"):
        Rig(sink).run_rows(0, [batch, batch])
