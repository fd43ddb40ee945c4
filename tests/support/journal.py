"""A receiver's log, and messages to append to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from delivered.connectors.log.journal import LogJournal
from delivered.contract.queue import MessageBatch


def messages(*ids: str | None, key: bytes = b"k") -> MessageBatch:
    values = [f"value of {i}".encode() for i in ids]
    count = len(ids)
    return MessageBatch(list(ids), [key] * count, values, [[("h", b"1")]] * count, [None] * count, list(range(count)))


def open_log(path: Path, window: int = 100, **options: Any) -> LogJournal:
    return LogJournal(str(path), {}, window, **options)
