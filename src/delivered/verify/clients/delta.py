"""A Delta table: its log read as the format's specification says, its rows with pyarrow, and what is there at the end
with deltalake, as anybody would."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote

from delivered.verify.clients.base import Disturbed, Look, Row, as_row
from delivered.verify.clients.folders import ROWS_MAX, Folder, parquet_rows

_POLL_S = 0.05
_PARTITION = "table"


class DeltaTable(Folder):
    system = "delta"

    def options(self) -> dict[str, Any]:
        return {"format": "delta", "path": str(self.path), **self._extra}

    def read(self) -> list[Row]:
        """What a scan with deltalake finds, each row at the place where its file came into the log.

        A row that the scan finds, and the files that the log added do not hold, has a place behind all others.
        """
        if not self._versions():
            return []
        scanned = self._scan()
        left = Counter((r.key, r.value) for r in scanned)
        found = []
        for version in self._versions():
            for name in self._added(version):
                for row in self._rows(name):
                    if left[row.key, row.value] > 0:
                        left[row.key, row.value] -= 1
                        found.append(row)
        behind = self._order.number("not in the log") * ROWS_MAX
        foreign = [Row(_PARTITION, behind + n, *what) for n, what in enumerate(left.elements())]
        return found + foreign

    def follow(self, seen: Callable[[Look], None], stop: threading.Event) -> None:
        """Version by version, so that no state that a reader could meet is left out."""
        newest = -1
        while True:
            last = stop.is_set()
            for version in (v for v in self._versions() if v > newest):
                newest = version
                rows = [row for name in self._added(version) for row in self._rows(name)]
                if rows:
                    seen(Look(rows, whole=True))
            if last:
                return
            stop.wait(_POLL_S)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A reader that has looked at the log, and reads the files a while later."""
        version = self._versions()[-1]
        before = len(self._scan(version))
        yield
        try:
            now = len(self._scan(version))
        except Exception as error:
            raise Disturbed(f"version {version} could be read, and cannot any more: {error}") from error
        if now != before:
            raise Disturbed(f"version {version} had {before} rows and has {now}")

    def append_nothing(self) -> None:
        import pyarrow as pa
        from deltalake import write_deltalake

        table = self._open()
        write_deltalake(str(self.path), pa.schema(table.schema().to_arrow()).empty_table(), mode="append")

    def compact(self) -> None:
        self._open().optimize.compact()

    def describe(self, text: str) -> None:
        self._open().alter.set_table_description(text)

    def _open(self, version: int | None = None) -> Any:
        import deltalake

        return deltalake.DeltaTable(str(self.path), version=version)

    def _scan(self, version: int | None = None) -> list[Row]:
        rows = self._open(version).to_pyarrow_table().to_pylist()
        return [as_row(_PARTITION, n, r) for n, r in enumerate(rows)]

    def _versions(self) -> list[int]:
        names = (p.name for p in (self.path / "_delta_log").glob("*.json"))
        return sorted(int(n.removesuffix(".json")) for n in names if n.removesuffix(".json").isdigit())

    def _added(self, version: int) -> list[str]:
        """Files with new rows. What only puts rows into other files says so: `dataChange` is false."""
        text = (self.path / "_delta_log" / f"{version:020d}.json").read_text(encoding="utf-8")
        actions = [json.loads(line) for line in text.splitlines() if line.strip()]
        return [unquote(a["add"]["path"]) for a in actions if a.get("add", {}).get("dataChange")]

    def _rows(self, name: str) -> list[Row]:
        return parquet_rows(self.path / name, _PARTITION, self._order.number(name))
