"""A worker that runs sagas against a shop that is a real HTTP service, and is killed at given points.

python -m tests.broker.saga_process SPEC        DELIVERED_CRASH names the points; the shop kills by process id
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import sqlite3
import sys
from functools import cache, partial
from typing import Any

import httpx

from delivered import saga
from delivered.saga import Call, Done, Http, Saga, Step, definition, http, log, progress
from delivered.testing.crash import install_from_environment

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


def break_it(variant: str, made: Saga) -> Saga:
    """Broken on purpose; the checker must see each."""
    if variant == "log_after_the_step":
        write = log.OpenLog.append
        held: list[progress.Entry] = []

        def late(self: Any, claim: Any, entries: Any, status: Any, pause_s: float | None = None) -> None:
            started = [e for e in entries if e.event is progress.Event.STARTED]
            if not started:
                write(self, claim, [*held, *entries], status, pause_s)
            elif held:
                write(self, claim, [*held, *entries[:-1]], status, pause_s)
            held[:] = started

        log.OpenLog.append = late  # type: ignore[method-assign]
    elif variant == "key_per_try":
        tries = itertools.count()
        Saga.key = lambda self, *_: f"{os.getpid()}/{next(tries)}"  # type: ignore[method-assign]
    elif variant == "undo_in_order":
        progress.reversed = list  # type: ignore[attr-defined]
    elif variant == "undo_once":
        progress._undo = _undo_once
    elif variant == "repeats_any_step":
        Step.repeatable = property(lambda self: True)  # type: ignore[method-assign]
    elif variant == "rejected_is_not_done":
        fold = progress._forward
        progress._forward = lambda step, entries: _without_doubt(fold(step, entries))
    elif variant == "no_fence":
        execute = log.Caller.execute

        def unfenced(self: Any, statement: str, values: Any = ()) -> Any:
            if statement.startswith("UPDATE delivered_saga SET status") and "AND epoch = ?" in statement:
                statement, values = statement.replace("AND epoch = ?", ""), list(values)[:-1]
            if statement.startswith("INSERT INTO delivered_saga_entry"):
                values = [*values[:2], values[2] + 1000 * values[3], *values[3:]]
            return execute(self, statement, values)

        log.Caller.execute = unfenced  # type: ignore[method-assign]
    else:
        assert not variant, variant
    return made


def _without_doubt(found: Any) -> Any:
    found.doubt = False
    return found


def _undo_once(steps: Any, entries: Any) -> Any:
    """Takes a compensation that was started for one that is done."""
    for step in reversed(steps):
        if step.undo is not saga.NO_UNDO and not any(e.step == step.name and e.verb == "undo" for e in entries):
            return progress.Status.COMPENSATING, progress.Next(step, saga.Verb.UNDO)
    return progress.Status.COMPENSATED, None


def sqlite(path: str) -> sqlite3.Connection:
    """The system keeps what a killed process wrote: without power loss, no sync is needed."""
    connection = sqlite3.connect(path, timeout=30, check_same_thread=False)
    connection.execute("PRAGMA synchronous=OFF")
    return connection


def connect(dialect: str, url: str) -> saga.Log:
    if dialect == "sqlite":
        return saga.Log(partial(sqlite, url))
    return saga.Log(f"mysql://delivered@{url}/dev" if dialect == "mysql" else url)


http._client = cache(lambda _: httpx.Client(verify=False))  # certificates take longer to load than a saga to run


def work(spec: dict[str, Any]) -> None:
    install_from_environment()
    done = saga.run(connect(spec["dialect"], spec["log"]), break_it(spec["variant"], checkout(spec["shop"])))
    print(json.dumps({"rested": done}), flush=True)


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
            print(json.dumps({"killed": killed}))
            sys.exit(code)
    work(spec)
