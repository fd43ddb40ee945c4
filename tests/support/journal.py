"""A receiver's log, and messages to append to it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from delivered.connectors.log import produce
from delivered.connectors.log.produce import LogJournal
from delivered.contract.source import MessageBatch


def messages(*ids: str | None, key: bytes = b"k") -> MessageBatch:
    values = [f"value of {i}".encode(errors="backslashreplace") for i in ids]
    count = len(ids)
    return MessageBatch(list(ids), [key] * count, values, [[("h", b"1")]] * count, [None] * count, list(range(count)))


def open_log(path: Path, window: int = 100, **options: Any) -> LogJournal:
    return LogJournal(str(path), {}, window, **options)


def race(monkeypatch: pytest.MonkeyPatch, other: Callable[[], Any]) -> None:
    """Run `other` once between the next append's window check and its commit."""
    sync, done = produce.sync_data, False

    def first(*arguments: Any) -> None:
        nonlocal done
        if not done:
            done = True
            other()
        sync(*arguments)

    monkeypatch.setattr(produce, "sync_data", first)
