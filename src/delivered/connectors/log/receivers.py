"""Reports of a log's receivers, a file each in a folder next to the table's data."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from delivered.connectors.log import table as layout
from delivered.contract.queue import ReceiverReport

_FOLDER = "_receivers"


class Receivers:
    """
    Args:
        path: of the log, absolute, or a URL.

    Attributes:
        local: the reports are on a local disk.
    """

    def __init__(self, path: str, storage: Mapping[str, str]) -> None:
        self._path, self._storage = path, storage
        self.local = layout.is_local(path)

    def read(self) -> list[ReceiverReport]:
        """Oldest first. One that is being replaced or removed may be absent."""
        from pyarrow import fs as arrow_fs

        fs, found = layout.filesystem(self._path, self._storage), list[ReceiverReport]()
        for info in fs.get_file_info(arrow_fs.FileSelector(_FOLDER, allow_not_found=True)):
            if not info.base_name.endswith(".json"):
                continue
            with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
                found.append(ReceiverReport.from_json(fs.open_input_stream(info.path).readall()))
        return sorted(found, key=lambda r: r.at_ms)

    def write(self, report: ReceiverReport) -> None:
        layout.put(self._path, self._storage, _FOLDER, report.name, report.to_json())

    def remove(self, report: ReceiverReport) -> None:
        with contextlib.suppress(FileNotFoundError):
            layout.filesystem(self._path, self._storage).delete_file(f"{_FOLDER}/{report.name}.json")
