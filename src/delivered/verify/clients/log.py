"""A durable log: read with deltalake, written as every producer writes it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from delivered.verify.clients.base import Row
from delivered.verify.workloads import PARTITIONS, Record


class Log:
    """
    Args:
        extra: more options of the source in the pipeline file.
    """

    system = "log"

    def __init__(self, path: Path | str, partitions: int = PARTITIONS, extra: dict[str, Any] | None = None) -> None:
        self.path = Path(path)
        self.partitions = partitions
        self._extra = extra or {}

    def create(self) -> None:
        """The first record makes it."""

    def options(self) -> dict[str, Any]:
        return {"format": "log", "path": str(self.path), **self._extra}

    def send(self, records: Sequence[Record]) -> None:
        import pyarrow as pa

        from delivered.connectors.log import append

        append(
            str(self.path),
            pa.table(
                {
                    "key": pa.array([None if r.key is None else r.key.encode() for r in records], pa.binary()),
                    "value": pa.array([r.value.encode() for r in records], pa.binary()),
                    "partition": pa.array([r.partition % self.partitions for r in records], pa.int32()),
                }
            ),
        )

    def read(self) -> list[Row]:
        from deltalake import DeltaTable

        if not (self.path / "_delta_log").exists():
            return []
        table = DeltaTable(str(self.path)).to_pyarrow_table(columns=["partition", "offset", "key", "value"])
        rows = table.sort_by([("partition", "ascending"), ("offset", "ascending")]).to_pylist()
        return [Row(str(r["partition"]), r["offset"], _text(r["key"]), _text(r["value"]) or "") for r in rows]

    def offsets(self, logged: Any) -> dict[str, int]:
        return {p: int(at) for p, at in logged["offsets"].items()}

    def address(self) -> dict[str, Any]:
        return {"system": "log", "path": str(self.path), "partitions": self.partitions}


def _text(value: bytes | str | None) -> str | None:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
