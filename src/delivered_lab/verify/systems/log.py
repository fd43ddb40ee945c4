"""A durable log: read with deltalake, written as any producer does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from delivered_lab.verify.systems.base import Row, SourceClient, SourceKind, System, as_text
from delivered_lab.verify.workloads import PARTITIONS, Record


@dataclass
class Log(SourceClient):
    """
    Attributes:
        path: its folder.
    """

    system = "log"
    path: Path | str
    partitions: int = PARTITIONS

    def create(self) -> None:
        """Created by the first record."""

    def options(self) -> dict[str, Any]:
        return {"format": "log", "path": str(self.path)}

    def send(self, records: Sequence[Record]) -> None:
        import pyarrow as pa

        from delivered.connectors.log import append

        keys = pa.array([None if r.key is None else r.key.encode() for r in records], pa.binary())
        values = pa.array([r.value.encode() for r in records], pa.binary())
        partitions = pa.array([r.partition % self.partitions for r in records], pa.int32())
        append(str(self.path), pa.table({"key": keys, "value": values, "partition": partitions}))

    def read(self) -> list[Row]:
        from deltalake import DeltaTable

        if not (Path(self.path) / "_delta_log").exists():
            return []
        table = DeltaTable(str(self.path)).to_pyarrow_table(columns=["partition", "offset", "key", "value"])
        rows = table.sort_by([("partition", "ascending"), ("offset", "ascending")]).to_pylist()
        return [Row(str(r["partition"]), r["offset"], as_text(r["key"]), as_text(r["value"]) or "") for r in rows]

    def offsets(self, logged: Any) -> dict[str, int]:
        return {p: int(at) for p, at in logged["offsets"].items()}


SYSTEM = System(sources=(SourceKind("log", Log, lambda place: Log(place.log)),))
