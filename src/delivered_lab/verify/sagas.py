"""Sagas: the worker that runs them and is killed at given points, and the shop that it calls, a real HTTP service.

python -m delivered_lab.verify.sagas SPEC     DELIVERED_CRASH names the points; the shop kills by process id
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import signal
import sqlite3
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

from delivered.crash import install_from_environment
from delivered.patterns import saga
from delivered.patterns.saga import Call, Done, Http, Saga, Step, definition

STEPS = ("reserve", "pay", "ship", "mail", "confirm")


def checkout(url: str) -> Saga:
    """Steps of each kind: takes the key; the same over HTTP; can be asked; neither; nothing to undo."""
    headers = {"X-Pid": str(os.getpid())}

    def http(step: str, verb: str) -> Http:
        return Http(f"{url}/{step}/{verb}/{{id}}", headers=headers, timeout_s=10)

    def callable_(step: str, verb: str) -> Any:
        send = http(step, verb)
        return lambda call: send(call)  # the worker sees no key here

    def ask(call: Call) -> Done | None:
        found = http("ship", "ask")(call)
        return Done(found["result"]) if found["done"] else None

    quick: dict[str, Any] = {"backoff_s": 0.01, "timeout_s": 1.0, "attempts_max": 5}
    return Saga(
        "checkout",
        [
            Step("reserve", callable_("reserve", "do"), undo=callable_("reserve", "undo"), takes_key=True, **quick),
            Step("pay", http("pay", "do"), undo=http("pay", "undo"), **quick),
            Step("ship", callable_("ship", "do"), undo=callable_("ship", "undo"), ask=ask, **quick),
            Step("mail", callable_("mail", "do"), undo=callable_("mail", "undo"), **quick),
            Step("confirm", http("confirm", "do"), undo=saga.NO_UNDO, **quick),
        ],
    )


def _broken(variant: str, saga_: Saga) -> Saga:
    """Args: variant: "module:name", broken on purpose for tests of the judge; empty: nothing is."""
    if not variant:
        return saga_
    module, _, name = variant.partition(":")
    broken: Saga = importlib.import_module(module).break_it(name, saga_)
    return broken


def sqlite(path: str) -> sqlite3.Connection:
    """The system keeps what a killed process wrote: without power loss, no sync is needed."""
    connection = sqlite3.connect(path, timeout=30, check_same_thread=False)
    connection.execute("PRAGMA synchronous=OFF")
    return connection


def connect(dialect: str, url: str) -> saga.Log:
    if dialect == "sqlite":
        return saga.Log(partial(sqlite, url))
    return saga.Log(f"mysql://delivered@{url}/dev" if dialect == "mysql" else url)


definition._http_client = cache(lambda _: httpx.Client(verify=False))  # noqa: S501 - certificates take longer to load than a saga to run


def work(spec: dict[str, Any]) -> None:
    install_from_environment()
    done = saga.run(connect(spec["dialect"], spec["log"]), _broken(spec["variant"], checkout(spec["shop"])))
    sys.stdout.write(json.dumps({"rested": done}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    spec = json.loads(sys.argv[1])
    logging.basicConfig()
    definition.LEASE_MARGIN_S = spec.get("margin_s", 0.2)
    for killed in range(spec.get("kills", 0)):  # forked: the imports take longer than a run
        child = os.fork()
        if child == 0:
            work(spec)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code != -signal.SIGKILL:
            sys.stdout.write(json.dumps({"killed": killed}) + "\n")
            sys.exit(code)
    work(spec)


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
                with suppress(OSError):  # the caller was killed
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
