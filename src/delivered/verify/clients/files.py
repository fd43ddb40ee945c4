"""A folder of Parquet files, listed with the standard library and read with pyarrow."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from delivered.verify.clients.base import Disturbed, Look, Row
from delivered.verify.clients.folders import Folder, parquet_rows

_POLL_S = 0.05
_PATTERN = "batch=*/*.parquet"
"""What the sink's page tells readers to take."""


class Files(Folder):
    system = "files"

    def options(self) -> dict[str, Any]:
        return {"format": "files", "path": str(self.path), "fileFormat": "parquet", **self._extra}

    def read(self) -> list[Row]:
        return [row for name in self._listed() for row in self._rows(name)]

    def follow(self, seen: Callable[[Look], None], stop: threading.Event) -> None:
        met: set[str] = set()
        while True:
            last = stop.is_set()
            new = [name for name in self._listed() if name not in met]
            met.update(new)
            rows = [row for name in new for row in self._rows(name)]
            if rows:
                seen(Look(rows, whole=True))
            if last:
                return
            stop.wait(_POLL_S)

    @contextmanager
    def reading(self) -> Iterator[None]:
        before = {name: len(self._rows(name)) for name in self._listed()}
        yield
        for name, count in before.items():
            try:
                now = len(self._rows(name))
            except OSError as error:
                raise Disturbed(f"a reader had {name} in its list, and it is gone: {error}") from error
            if now != count:
                raise Disturbed(f"{name} had {count} rows and has {now}")

    def _listed(self) -> list[str]:
        return sorted(str(p.relative_to(self.path)) for p in self.path.glob(_PATTERN))

    def _rows(self, name: str) -> list[Row]:
        return parquet_rows(self.path / name, "files", self._order.number(name))
