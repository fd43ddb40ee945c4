"""A receiver in a separate process, on a queue in a SQLite file that deletes acknowledged messages.

python -m tests.crash.receiver_process SPOOL LOG [--ack-first] [--quarantine] [--window=SIZE,FOR_MS]
"""

from __future__ import annotations

import os
import sqlite3
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from delivered.connectors.log.produce import LogJournal
from delivered.contract.source import MessageBatch, Receiver
from delivered.crash import install_from_environment
from delivered.model.work import Ok, Outcome
from delivered.receiver import ReceiveLimits, ReceiveLoop

PER_APPEND = 40
POISON = b"poison"
"""Messages whose body starts with this have a time that no log can store."""


class Spool:
    """Messages in order. A taken message is held until acknowledged; a dead process's messages are redelivered."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._open() as database:
            database.execute(
                "CREATE TABLE IF NOT EXISTS m (seq INTEGER PRIMARY KEY, id TEXT, body BLOB, holder TEXT,"
                " handed INTEGER DEFAULT 0)"
            )

    def _open(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path, timeout=30, isolation_level=None)

    def send(self, messages: Sequence[tuple[str | None, bytes]]) -> None:
        with self._open() as database:
            database.execute("BEGIN IMMEDIATE")
            database.executemany("INSERT INTO m (id, body) VALUES (?, ?)", messages)
            database.execute("COMMIT")

    def left(self) -> int:
        return int(self._open().execute("SELECT count(*) FROM m").fetchone()[0])

    def held(self) -> int:
        return int(self._open().execute("SELECT count(*) FROM m WHERE holder IS NOT NULL").fetchone()[0])

    def handed(self) -> int:
        return int(self._open().execute("SELECT coalesce(max(handed), 0) FROM m").fetchone()[0])


class SpoolReceiver(Receiver):
    def __init__(self, spool: Spool) -> None:
        self._database = spool._open()
        own = psutil.Process()
        self._me = f"{own.pid}:{own.create_time()}"

    def receive(self, count_max: int, wait_s: float) -> MessageBatch:
        self._release_dead()
        batch = MessageBatch()
        database = self._database
        database.execute("BEGIN IMMEDIATE")
        found = database.execute(
            "UPDATE m SET holder = ?, handed = handed + 1 WHERE seq IN"
            " (SELECT seq FROM m WHERE holder IS NULL ORDER BY seq LIMIT ?) RETURNING seq, id, body",
            (self._me, count_max),
        ).fetchall()
        database.execute("COMMIT")
        for seq, message_id, body in sorted(found):
            batch.ids.append(message_id)
            batch.keys.append(None)
            batch.values.append(body)
            batch.headers.append([])
            batch.times_us.append(1 << 80 if body.startswith(POISON) else None)
            batch.handles.append(seq)
        if not found:
            time.sleep(min(wait_s, 0.02))
        return batch

    def acknowledge(self, handles: Sequence[Any]) -> Outcome[int]:
        self._database.execute("BEGIN IMMEDIATE")
        self._database.executemany("DELETE FROM m WHERE seq = ? AND holder = ?", [(h, self._me) for h in handles])
        self._database.execute("COMMIT")
        return Ok(len(handles))

    def give_back(self, handles: Sequence[Any]) -> None:
        self._database.executemany("UPDATE m SET holder = NULL WHERE seq = ?", [(h,) for h in handles])

    def close(self) -> None:
        self._database.execute("UPDATE m SET holder = NULL WHERE holder = ?", (self._me,))

    def _release_dead(self) -> None:
        for (holder,) in self._database.execute("SELECT DISTINCT holder FROM m WHERE holder IS NOT NULL").fetchall():
            pid, started = holder.split(":")
            try:
                process = psutil.Process(int(pid))
                alive = abs(process.create_time() - float(started)) < 1 and process.status() != psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:
                alive = False
            if not alive:
                self._database.execute("UPDATE m SET holder = NULL WHERE holder = ?", (holder,))


class AckFirst(Receiver):
    """The bug this receiver exists to avoid: acknowledge on arrival."""

    def __init__(self, inner: Receiver) -> None:
        self._inner = inner

    def receive(self, count_max: int, wait_s: float) -> MessageBatch:
        batch = self._inner.receive(count_max, wait_s)
        if len(batch):
            self._inner.acknowledge(batch.handles)
        return batch

    def acknowledge(self, handles: Sequence[Any]) -> Outcome[int]:
        return Ok(len(handles))

    def give_back(self, handles: Sequence[Any]) -> None:
        self._inner.give_back(handles)

    def close(self) -> None:
        self._inner.close()


def main() -> None:
    install_from_environment()
    spool = Spool(Path(sys.argv[1]))
    limits = ReceiveLimits(PER_APPEND, 1 << 20, 0.0, 1 << 20)

    def connect() -> Receiver:
        receiver: Receiver = SpoolReceiver(spool)
        return AckFirst(receiver) if "--ack-first" in sys.argv else receiver

    given = next((a.partition("=")[2] for a in sys.argv if a.startswith("--window=")), "10000,0")
    size, for_ms = map(int, given.split(","))
    quarantine = LogJournal(sys.argv[2] + ".bad", {}, 10_000) if "--quarantine" in sys.argv else None
    loop = ReceiveLoop(connect, LogJournal(sys.argv[2], {}, size, dedup_for_ms=for_ms), limits, quarantine)
    loop.run(lambda: spool.left() == 0 or os.getppid() == 1)


if __name__ == "__main__":
    main()
