"""A Delta table: its log read according to the format's specification, its rows with pyarrow, and the final state with
deltalake, as any user would."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Set
from typing import Any
from urllib.parse import unquote

from delivered_lab.verify.systems.base import Row, SinkKind, System, as_row
from delivered_lab.verify.systems.tables import PARTITION, FileTable, on_disk


class DeltaTable(FileTable):
    system = "delta"

    def place(self) -> dict[str, Any]:
        return {"path": str(self.path)}

    def commits(self, known: Set[Any]) -> Iterator[tuple[Set[Any], list[str]]]:
        """Files with new rows. A commit that only moves rows into other files is marked: `dataChange` is false."""
        for version in (v for v in self._versions() if v not in known):
            text = (self.path / "_delta_log" / f"{version:020d}.json").read_text(encoding="utf-8")
            actions = [json.loads(line) for line in text.splitlines() if line.strip()]
            yield {version}, [unquote(a["add"]["path"]) for a in actions if a.get("add", {}).get("dataChange")]

    def scan(self, version: int | None = None) -> list[Row] | None:
        if not self._versions():
            return None
        rows = self._open(version).to_pyarrow_table().to_pylist()
        return [as_row(PARTITION, n, r) for n, r in enumerate(rows)]

    def pinned(self) -> Callable[[], Any]:
        version = self._versions()[-1]
        return lambda: len(self.scan(version) or ())

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

    def _versions(self) -> list[int]:
        names = (p.name for p in (self.path / "_delta_log").glob("*.json"))
        return sorted(int(n.removesuffix(".json")) for n in names if n.removesuffix(".json").isdigit())


SYSTEM = System((SinkKind("delta", "delta", on_disk(DeltaTable), shared=True, upserts=True, own=True),))
