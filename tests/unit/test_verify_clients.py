"""The judge's readers of file-based tables, on independently written files: they see rows in commit order, and
removals."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable as Plain
from deltalake import write_deltalake
from pyiceberg.catalog.sql import SqlCatalog

from delivered_lab.verify.systems.base import LongReads, Poll, ReadDisturbed, SharedTable, SinkClient
from delivered_lab.verify.systems.tables import DeltaTable, Files, IcebergTable

Write = Callable[[Path, list[str]], None]


def rows(values: list[str]) -> pa.Table:
    return pa.table({"key": pa.array([b"k"] * len(values)), "value": pa.array([v.encode() for v in values])})


def into_delta(path: Path, values: list[str]) -> None:
    write_deltalake(str(path), rows(values), mode="append")


def into_folder(path: Path, values: list[str]) -> None:
    batch = path / f"batch=i-{len(list(path.glob('batch=*'))):010d}"
    draft = path / "_drafts"
    draft.mkdir(parents=True)
    pq.write_table(rows(values), draft / "00000.parquet")
    draft.rename(batch)


def iceberg(path: Path) -> Any:
    path.mkdir(exist_ok=True)
    return SqlCatalog("default", uri=f"sqlite:///{path}/catalog.db", warehouse=f"file://{path}")


def into_iceberg(path: Path, values: list[str]) -> None:
    catalog = iceberg(path)
    catalog.create_namespace_if_not_exists("judged")
    catalog.create_table_if_not_exists("judged.effects", rows(["a"]).schema).append(rows(values))
    catalog.engine.dispose()


DRAINS: dict[str, tuple[Callable[[Path], SinkClient], Write]] = {
    "delta": (DeltaTable, into_delta),
    "files": (Files, into_folder),
    "iceberg": (IcebergTable, into_iceberg),
}


@pytest.fixture(params=list(DRAINS))
def made(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[SinkClient, Callable[[list[str]], None], Path]:
    drain, write = DRAINS[request.param]
    path = tmp_path / "effects"
    return drain(path), lambda values: write(path, values), path


Made = tuple[SinkClient, Callable[[list[str]], None], Path]


def followed(drain: SinkClient) -> list[Poll]:
    """Everything seen by a reader that is stopped before its first look."""
    looks: list[Poll] = []
    stop = threading.Event()
    stop.set()
    drain.follow(looks.append, stop)
    return looks


def test_nothing_is_there_before_the_first_write(made: Made) -> None:
    drain, _, _ = made
    assert drain.read() == []
    assert followed(drain) == []
    assert drain.open_transactions("p") == []


def test_what_came_first_has_the_lower_place_for_every_reader(made: Made) -> None:
    drain, write, _ = made
    write(["z", "b"])
    seen = [r for look in followed(drain) for r in look.rows]
    write(["a"])
    final = drain.read()
    assert [(r.key, r.value) for r in sorted(final, key=lambda r: r.position)] == [("k", "z"), ("k", "b"), ("k", "a")]
    assert {(r.position, r.value) for r in seen} <= {(r.position, r.value) for r in final}
    # A reader that starts later sees the same, at the same positions.
    later = [(r.position, r.value) for look in followed(drain) for r in look.rows]
    assert later == sorted((r.position, r.value) for r in final)


def test_a_row_that_is_written_twice_is_two_rows(made: Made) -> None:
    drain, write, _ = made
    write(["a"])
    write(["a"])
    assert Counter(r.value for r in drain.read()) == {"a": 2}


def test_a_reader_that_is_left_alone_says_nothing_and_one_whose_files_go_does(made: Made) -> None:
    drain, write, path = made
    write(["a"])
    assert isinstance(drain, LongReads)
    with drain.reading():
        write(["b"])
    with pytest.raises(ReadDisturbed), drain.reading():
        for file in path.rglob("*.parquet"):
            file.unlink()


@pytest.mark.parametrize("made", ["delta", "iceberg"], indirect=True)
def test_every_version_of_a_table_is_looked_at_by_itself(made: Made) -> None:
    """A batch in two commits is torn, however soon the second one follows."""
    drain, write, _ = made
    write(["a"])
    write(["b"])
    assert [[r.value for r in look.rows] for look in followed(drain)] == [["a"], ["b"]]


@pytest.mark.parametrize("made", ["delta", "iceberg"], indirect=True)
def test_rows_that_others_move_into_other_files_stay_where_they_were(made: Made) -> None:
    drain, write, path = made
    for value in ("a", "b"):
        write([value])
    before = drain.read()
    assert isinstance(drain, SharedTable)
    drain.compact()
    drain.append_nothing()
    drain.describe("a table")
    left = (
        Plain(str(path)).file_uris()
        if isinstance(drain, DeltaTable)
        else iceberg(path).load_table("judged.effects").inspect.files()["file_path"].to_pylist()
    )
    assert len(left) == 1
    assert drain.read() == before
    assert len(followed(drain)) == 2


def test_rows_that_somebody_deleted_are_not_found_any_more(tmp_path: Path) -> None:
    """Their files still exist, and an older version of the log references them."""
    drain = DeltaTable(tmp_path / "t")
    into_delta(tmp_path / "t", ["a", "b"])
    first = drain.read()
    Plain(str(tmp_path / "t")).delete()
    into_delta(tmp_path / "t", ["c"])
    (found,) = drain.read()
    assert found.value == "c"
    assert found.position > max(r.position for r in first)


def test_a_row_with_other_columns_is_told_in_full(tmp_path: Path) -> None:
    write_deltalake(str(tmp_path / "t"), pa.table({"id": [1], "name": ["x"]}))
    (found,) = DeltaTable(tmp_path / "t").read()
    assert (found.key, found.value) == (None, '{"id": "1", "name": "x"}')
