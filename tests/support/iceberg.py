"""An Iceberg sink for tests, and its table through another client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from tests.support.tables import ROWS, staged

from delivered.connectors.iceberg import CONNECTOR
from delivered.connectors.iceberg.sink import IcebergSink

NAME = "shop.t"


def sink_at(path: Path, **given: str) -> IcebergSink:
    sink = CONNECTOR.sink({"warehouse": str(path), "table": NAME, **given})
    assert isinstance(sink, IcebergSink)
    return sink


def others(path: Path) -> SqlCatalog:
    """The catalog through another client."""
    return SqlCatalog("default", uri=f"sqlite:///{path}/catalog.db", warehouse=f"file://{path}")


def theirs(path: Path) -> Any:
    return others(path).load_table(NAME)


def seen(path: Path) -> pa.Table:
    return theirs(path).scan().to_arrow()


def strays(path: Path) -> set[str]:
    """This package's manifests that no snapshot references."""
    table = theirs(path)
    there = {f"file://{p}" for p in (path / "shop").rglob("metadata/delivered/**/*.avro")}
    lists = {s.manifest_list for s in table.snapshots()}
    return there - lists - {m.manifest_path for s in table.snapshots() for m in s.manifests(table.io)}


@pytest.fixture
def before_commit(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """`before_commit(do)`: what happens at the moment when the next commit is asked for; `do(ask)` may ask itself."""
    real = SqlCatalog.commit_table

    def at_next(do: Callable[[Callable[[], Any]], Any]) -> None:
        def instead(self: SqlCatalog, *given: Any) -> Any:
            monkeypatch.setattr(SqlCatalog, "commit_table", real)
            return do(lambda: real(self, *given))

        monkeypatch.setattr(SqlCatalog, "commit_table", instead)

    yield at_next
    assert SqlCatalog.commit_table is real


def staged_in(sink: IcebergSink, rows: pa.Table = ROWS, *given: Any, **more: Any) -> Any:
    """Tasks read the table, so it must exist first."""
    sink.ready_target(rows.schema)
    return staged(sink, rows, *given, **more)  # type: ignore[arg-type]
