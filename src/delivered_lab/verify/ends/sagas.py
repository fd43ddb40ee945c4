"""A worker that runs sagas against a shop that is a real HTTP service, and is killed at given points.

python -m delivered_lab.verify.ends.sagas SPEC     DELIVERED_CRASH names the points; the shop kills by process id
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import signal
import sqlite3
import sys
from functools import cache, partial
from typing import Any

import httpx

from delivered.crash import install_from_environment
from delivered.model.answers import limited
from delivered.patterns import saga
from delivered.patterns.saga import Call, Done, Http, Saga, Step, definition, http

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


def _broken(variant: str, made: Saga) -> Saga:
    """Args: variant: "module:name", broken on purpose for tests of the judge; empty: nothing is."""
    if not variant:
        return made
    module, _, name = variant.partition(":")
    broken: Saga = importlib.import_module(module).break_it(name, made)
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


http._client = cache(lambda _: limited(httpx.Client(verify=False)))  # noqa: S501 - certificates take longer to load than a saga to run


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
