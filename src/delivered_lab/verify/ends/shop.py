"""The shop that sagas call: a real HTTP service, which keeps what it was asked for and what took effect."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TAKES_KEY = ("reserve", "pay", "confirm")


class Shop:
    """
    Attributes:
        kills: (id, "pay.do", "in" or "lost"): SIGKILL the caller, after the effect or before it; once each.
        pauses: (id, "pay.do"): SIGSTOP the caller after the effect; once each.
        faults: (id, "pay.do") -> what happens after the effect; once each.
        calls: every request in order: (id, "pay.do", process).
        effects: what took effect, in order: (id, "pay.do").
    """

    def __init__(self) -> None:
        self.kills: set[tuple[str, str, str]] = set()
        self.pauses: set[tuple[str, str]] = set()
        self.paused: list[int] = []
        self.faults: dict[tuple[str, str], Callable[[], None]] = {}
        self.calls: list[tuple[str, str, int]] = []
        self.effects: list[tuple[str, str]] = []
        self._answers: dict[str, tuple[int, Any]] = {}
        self._lock = threading.Lock()
        shop = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                _, step, verb, id_ = self.path.split("/")
                with suppress(OSError):  # the caller is gone
                    answer = shop.serve(id_, step, verb, self.headers["Idempotency-Key"], body, self.headers["X-Pid"])
                    if answer is None:
                        self.close_connection = True
                        return
                    text = json.dumps(answer[1]).encode()
                    self.send_response(answer[0])
                    self.send_header("Content-Length", str(len(text)))
                    self.end_headers()
                    self.wfile.write(text)

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def serve(self, id_: str, step: str, verb: str, key: str, body: Any, pid: str) -> tuple[int, Any] | None:
        """Status and reply; None: no reply."""
        call = f"{step}.{verb}"
        with self._lock:
            first = not any(c[:2] == (id_, call) for c in self.calls)
            self.calls.append((id_, call, int(pid)))
            if (id_, call, "lost") in self.kills:
                self.kills.remove((id_, call, "lost"))
                os.kill(int(pid), signal.SIGKILL)
                return None
            answer = self._answer(id_, step, verb, key, body["data"], first)
            if (id_, call, "in") in self.kills:
                self.kills.remove((id_, call, "in"))
                os.kill(int(pid), signal.SIGKILL)
                return None
            self.faults.pop((id_, call), lambda: None)()
            if (id_, call) in self.pauses:
                self.pauses.remove((id_, call))
                os.kill(int(pid), signal.SIGSTOP)
                self.paused.append(int(pid))
            return answer

    def _answer(self, id_: str, step: str, verb: str, key: str, data: Any, first: bool) -> tuple[int, Any] | None:
        if verb == "ask":
            return 200, {"done": (id_, f"{step}.do") in self.effects, "result": f"{step} of {id_}"}
        if data.get("fail") == step and verb == "do":
            return 422, "out of stock"
        if data.get("undo_fails") == step and verb == "undo" and not data.get("mended"):
            return 500, "no"
        if data.get("denies") == step and verb == "do" and not first:
            return 403, "the token has expired"  # says nothing about the first request
        if key in self._answers and (verb == "undo" or step in TAKES_KEY):
            return self._answers[key]
        if verb == "do" or (id_, f"{step}.do") in self.effects:
            self.effects.append((id_, f"{step}.{verb}"))
        self._answers[key] = 200, f"{step} of {id_}"
        if first and step in data.get("flaky", ()) and verb == "do":
            return None if data.get("silent") else (503, "try again")  # after the effect
        return self._answers[key]


def disagreements(shop: Shop, statuses: Mapping[str, str]) -> Iterator[str]:
    """What a checker says that knows only the shop and how each saga ended."""
    for id_, status in statuses.items():
        own = [call for i, call in shop.effects if i == id_]
        counts = Counter(own)
        doubled = sorted(c for c, n in counts.items() if n > 1)
        if doubled:
            yield f"{id_} ({status}): twice {doubled}"
        done = {c.removesuffix(".do") for c in counts if c.endswith(".do")}
        undone = {c.removesuffix(".undo") for c in counts if c.endswith(".undo")}
        match status:
            case "complete":
                if done != {"reserve", "pay", "ship", "mail", "confirm"} or undone:
                    yield f"{id_}: complete, but done {sorted(done)}, undone {sorted(undone)}"
            case "compensated":
                if done - {"confirm"} - undone:
                    yield f"{id_}: compensated, but {sorted(done - undone)} stands"
                first = {c.removesuffix(".undo"): at for at, (i, c, _) in reversed(list(enumerate(shop.calls)))
                         if i == id_ and c.endswith(".undo")}  # fmt: skip
                if sorted(first, key=first.__getitem__) != [
                    s for s in ("mail", "ship", "pay", "reserve") if s in first
                ]:
                    yield f"{id_}: compensated in the order {sorted(first, key=first.__getitem__)}"
            case _:
                yield f"{id_}: at rest as {status!r}"
