"""Clocks that are set, where no decision is ordered (those: tests/crash/test_clock.py)."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from pathlib import Path

import psutil
import pytest

from delivered.connectors.sqlite import CONNECTOR as SQLITE
from delivered.engine.context import is_running, is_start_of, new_owner, open_ledger, started_ms
from delivered.model.identity import Scope
from delivered.model.work import Owner


@pytest.mark.skipif(not psutil.LINUX, reason="elsewhere, a process keeps the time it started at")
@pytest.mark.parametrize("jump_s", [3600, -3600])
def test_p30_a_process_is_known_after_the_clock_was_set(jump_s: int, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, boot = new_owner(psutil.Process()), psutil.boot_time()
    monkeypatch.setattr(psutil._psplatform, "boot_time", lambda: boot + jump_s)
    assert psutil.Process().create_time() == pytest.approx(boot + jump_s + owner.started_ms / 1000, abs=1)
    assert is_running(owner)
    own = psutil.Process(os.getpid())
    assert not is_start_of(own, owner.started_ms + 60_000), "another process of the same number"


def test_owner_of_an_earlier_release_is_known() -> None:
    own = psutil.Process(os.getpid())
    assert is_start_of(own, int(own.create_time() * 1000))
    assert is_start_of(own, started_ms(own))


def test_p30_dedup_forgets_the_oldest_checkpoint_not_that_of_the_latest_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, now = tmp_path / "sink.db", time.time()
    sink = SQLITE.sink({"path": str(path), "table": "orders"})
    for number, ahead_s in enumerate((7200, 0, 3600, 0)):
        monkeypatch.setattr(time, "time", lambda ahead_s=ahead_s: now + ahead_s)
        ledger = open_ledger(sink, Scope("p", "s", f"i{number}"))
        ledger.claim(Owner(f"d{number}"))
        ledger.close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        kept = [i for (i,) in connection.execute("SELECT incarnation FROM _delivered_memory ORDER BY made_ms")]
    assert kept == ["i1", "i2", "i3"]
