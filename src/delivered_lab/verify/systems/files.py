"""A folder of Parquet files, listed with the standard library and read with pyarrow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from typing import Any

from delivered_lab.verify.systems.base import Row, SinkKind, System
from delivered_lab.verify.systems.tables import FileTable, on_disk

_PATTERN = "batch=*/*.parquet"
"""The pattern that the sink's documentation gives to readers."""


class Files(FileTable):
    def place(self) -> dict[str, Any]:
        return {"path": str(self.path), "fileFormat": "parquet"}

    def commits(self, known: Set[Any]) -> Iterator[tuple[Set[Any], list[str]]]:
        """New files in one listing."""
        new = [name for name in self._listed() if name not in known]
        yield set(new), new

    def scan(self) -> list[Row] | None:
        return None

    def pinned(self) -> Callable[[], Any]:
        listed = self._listed()
        return lambda: [(name, len(self._rows(name))) for name in listed]

    def _listed(self) -> list[str]:
        return sorted(str(p.relative_to(self.path)) for p in self.path.glob(_PATTERN))


_ABSENT = {"F2": "a local folder: no network, no other writers"}
SYSTEM = System((SinkKind("files", "files", on_disk(Files), absent=_ABSENT, own=True),))
