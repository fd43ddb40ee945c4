"""python -m examples.shop.payments FILE PORT: a payment service that honours Idempotency-Key, and fails often.

Keeps its books in a SQLite file: `answers` by key, and in `moves` each time that money moved.
"""

from __future__ import annotations

import json
import random
import sqlite3
import sys
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

DECLINED_OF = 10
"""Every so many-th customer has no money."""
FAILS = {"before": 0.12, "after": 0.12, "silent": 0.06}
"""How often a request ends in a 503 before anything was done, in one after it was done, or in no answer after that."""


class Books:
    def __init__(self, file: str) -> None:
        self._connection = sqlite3.connect(file, check_same_thread=False)
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.executescript(
            "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, status INTEGER, body TEXT);"
            "CREATE TABLE IF NOT EXISTS moves (order_id TEXT, kind TEXT, cents INTEGER);"
        )
        self._lock = threading.Lock()

    def serve(self, kind: str, order: str, key: str, data: dict[str, Any]) -> tuple[int, str]:
        """Status and body. The answer to a key, and what it did, are one transaction."""
        with self._lock, self._connection:
            known = self._connection.execute("SELECT status, body FROM answers WHERE key = ?", [key]).fetchone()
            if known is not None:
                return int(known[0]), str(known[1])
            status, body = self._charge(order, data) if kind == "charge" else self._refund(order, key)
            self._connection.execute("INSERT INTO answers VALUES (?, ?, ?)", [key, status, body])
            return status, body

    def _charge(self, order: str, data: dict[str, Any]) -> tuple[int, str]:
        if int(data["customer"].rpartition("-")[2]) % DECLINED_OF == 0:
            return 402, '"declined"'
        self._connection.execute("INSERT INTO moves VALUES (?, 'charge', ?)", [order, data["cents"]])
        return 200, json.dumps({"cents": data["cents"]})

    def _refund(self, order: str, key: str) -> tuple[int, str]:
        """Gives back what the charge with this key took. A charge that arrives after its refund is refused."""
        charge = key.removesuffix("/undo")
        known = self._connection.execute("SELECT status, body FROM answers WHERE key = ?", [charge]).fetchone()
        if known is None:
            self._connection.execute("INSERT INTO answers VALUES (?, 410, '\"refunded\"')", [charge])
        elif known[0] == 200:
            cents = json.loads(known[1])["cents"]
            self._connection.execute("INSERT INTO moves VALUES (?, 'refund', ?)", [order, cents])
        return 200, "null"


def main() -> None:
    books = Books(sys.argv[1])

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            _, kind, order = self.path.split("/")
            fails = random.choices([*FAILS, "never"], [*FAILS.values(), 1 - sum(FAILS.values())])[0]
            answer = (503, '"before"')
            if fails != "before":
                answer = books.serve(kind, order, self.headers["Idempotency-Key"], body["data"])
            if fails == "silent":
                self.close_connection = True
                return
            status, text = (503, '"after"') if fails == "after" else answer
            with suppress(OSError):  # the caller was killed
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

        def log_message(self, *args: Any) -> None:
            """The books say it all."""

    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()


if __name__ == "__main__":
    main()
