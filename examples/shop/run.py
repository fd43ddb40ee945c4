"""The shop from its first request to the judge, with kills at random in between."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import yaml
from examples.demo.killing import JVM
from examples.shop.judge import CENTS, MAILS, ORDERS, Verdict, judge
from examples.shop.program import Program

from delivered.patterns import inbox, outbox, saga
from delivered_lab import brokers
from delivered_lab.brokers import Broker
from delivered_lab.brokers.kafka import make_topics
from delivered_lab.brokers.servers import free_ports

ORDERS_PER_S = 5
CUSTOMERS = 100
PAUSES_S = (1.0, 4.0)
"""Between two kills: at least, at most."""
PIPELINES = ("relay", "enrich")
"""Killed only if they have committed a batch since their start: else a slow machine would see none of them at work."""
OFTEN = {"application": 3, "worker": 3, "mailer": 3, "payments": 3, "relay": 6, "enrich": 6, "postgres": 2, "kafka": 1}
"""Weights of the kills."""
OUTAGE_S_MAX = 1.0
"""How long a killed server is away, beside its start."""
FIRST_ORDERS = 20
"""They have to become mails before the first kill: whoever is killed then is at work."""
START_S = 3.0
"""Until the first of them is due."""
SETTLE_TIMEOUT_S = 300.0
"""After the last kill, until all is done; a quiet machine takes half a minute."""
_LOOK_S = 2.0
_ROOT = Path(__file__).parents[2]
_TABLES = """
CREATE TABLE orders (id TEXT PRIMARY KEY, n INTEGER, customer TEXT, item TEXT, quantity INTEGER);
CREATE TABLE enriched (id TEXT, customer TEXT, item TEXT, quantity INTEGER, cents BIGINT);
CREATE TABLE reservations (order_id TEXT PRIMARY KEY, item TEXT, quantity INTEGER);
CREATE TABLE shipments (order_id TEXT PRIMARY KEY, customer TEXT);
CREATE TABLE mail_file (length BIGINT);
INSERT INTO mail_file VALUES (0);
"""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Result:
    """
    Attributes:
        kills: name of a program or server -> how often it was killed.
        arrived: orders whose sagas came to rest between the first kill and the last.
        audit: the verdict of `delivered audit --chain`.
    """

    verdict: Verdict
    kills: dict[str, int]
    arrived: int
    audit: str

    @property
    def clean(self) -> bool:
        return self.verdict.clean and self.audit == "held"


def run(folder: Path, seconds: float, without: str, seed: int, say: Say) -> Result:
    """With servers of its own, which are gone when this returns.

    Args:
        folder: empty.
        seconds: during which everything is killed.
        without: "inbox", or the idempotency "keys" of payments: to see what they are for; empty: nothing is missing.
    """
    chance = random.Random(seed)
    with ExitStack() as stack:
        servers = {
            kind: stack.enter_context(brokers.start(kind, folder / kind, dies_with_parent=True, say=say))
            for kind in ("postgres", "kafka")
        }
        database, kafka = servers["postgres"].url, servers["kafka"].bootstrap
        _prepare(database, kafka)
        files = _pipeline_files(folder, database, kafka)
        requests = folder / "requests.jsonl"
        wanted = _requests(chance, FIRST_ORDERS + int(seconds * ORDERS_PER_S))
        _ask(requests, wanted[:FIRST_ORDERS])
        (port,) = free_ports(1)
        environment = {
            "SHOP_DATABASE": database,
            "SHOP_PAYMENTS": f"http://127.0.0.1:{port}",
            "SHOP_WITHOUT": without,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")])),
        }
        mails, payments = folder / "mails.txt", folder / "payments.db"
        commands = {
            "payments": ["examples.shop.payments", str(payments), str(port)],
            "relay": ["delivered.cli.main", "run", str(files[0])],
            "enrich": ["delivered.cli.main", "run", str(files[1])],
            "application": ["examples.shop.application", str(requests)],
            "worker": ["examples.shop.worker"],
            "mailer": ["examples.shop.mailer", kafka, str(mails)],
        }
        programs: dict[str, Program] = {}

        def start(name: str) -> None:
            command = [sys.executable, "-m", *commands[name]]
            commits = folder / "checkpoints" / name / "commits"
            batches = (lambda: len(list(commits.glob("[0-9]*")))) if name in PIPELINES else None
            programs[name] = Program(command, folder / f"{name}.log", environment, batches)
            stack.callback(programs[name].end)

        for name in commands:
            start(name)

        def look() -> Verdict:
            return judge(requests, database, kafka, folder / "lake", payments, mails)

        _settle(programs, look, say)
        before = look()
        if before.under_way:
            raise RuntimeError(f"the first orders did not arrive, before any kill: {before}; see {folder}/*.log")
        say(f"{before.orders} orders are done; from now on everything is killed")
        _ask(requests, wanted)
        start("application")
        killed = _storm(programs, servers, seconds, chance, say)
        meanwhile = look()
        arrived = meanwhile.paid + meanwhile.compensated + meanwhile.stuck - before.orders
        say(f"no more kills; {arrived} orders were paid or compensated meanwhile")
        _settle(programs, look, say)
        for program in programs.values():
            program.stop()
        say("delivered audit --chain")
        return Result(look(), killed, arrived, _audit(files))


def _storm(
    programs: Mapping[str, Program], servers: Mapping[str, Broker], seconds: float, chance: random.Random, say: Say
) -> dict[str, int]:
    """Kill one at random, again and again; at the end all at once."""
    kills: Counter[str] = Counter()

    def kill(name: str) -> None:
        if name in servers:
            servers[name].kill()
            time.sleep(chance.uniform(0, OUTAGE_S_MAX))
            servers[name].restart()
        elif not programs[name].kill():
            return
        kills[name] += 1
        say(f"SIGKILL {kills.total()}: {name}")

    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(chance.uniform(*PAUSES_S))
        for program in programs.values():
            program.keep()
        able = [name for name in OFTEN if name in servers or programs[name].is_at_work]
        kill(*chance.choices(able, [OFTEN[name] for name in able]))
    for name in (*programs, *servers):
        kill(name)
    return dict(kills)


def _settle(programs: Mapping[str, Program], look: Callable[[], Verdict], say: Say) -> None:
    """Wait until all is done; or until it is no use: the verdict says what is missing."""
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    told = 0.0
    while (left := look().under_way) and time.monotonic() < deadline:
        for program in programs.values():
            program.keep()
        if time.monotonic() - told > 10.0:
            say(f"under way: {', '.join(f'{count} {name}' for name, count in left.items())}")
            told = time.monotonic()
        time.sleep(_LOOK_S)


def _audit(files: Sequence[Path]) -> str:
    command = [sys.executable, "-m", "delivered.cli.main", "audit", "--chain", *map(str, files), "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        return str(json.loads(done.stdout)["verdict"])
    except ValueError:
        raise RuntimeError(f"the audit ended with {done.returncode}: {done.stderr[-3_000:]}") from None


def _prepare(database: str, kafka: str) -> None:
    """Tables and topics, as a deployment makes them."""
    with psycopg.connect(database) as connection:
        for statement in (_TABLES, outbox.ddl("postgres"), inbox.ddl("postgres"), *saga.ddl("postgres")):
            connection.execute(statement)
    make_topics(kafka, [ORDERS, MAILS], 2)


def _requests(chance: random.Random, count: int) -> list[dict[str, Any]]:
    """What customers will ask for, with ids that they made beforehand."""
    return [
        {
            "n": n, "id": f"order-{n}", "message": str(outbox.new_id()),
            "customer": f"customer-{chance.randrange(CUSTOMERS)}", "item": chance.choice(list(CENTS)),
            "quantity": chance.randint(1, 9),
        }
        for n in range(count)
    ]  # fmt: skip


def _ask(file: Path, requests: Sequence[Mapping[str, Any]]) -> None:
    """Those after the first ones are due one by one, until after the last kill."""
    began = time.time() + START_S
    lines = [json.dumps({**r, "due": began + (r["n"] - FIRST_ORDERS) / ORDERS_PER_S}) for r in requests]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _pipeline_files(folder: Path, database: str, kafka: str) -> tuple[Path, ...]:
    """What a user would write, with the addresses and folders of this run."""
    spark = JVM | {"spark.ui.enabled": False}
    here: Mapping[str, Mapping[Sequence[Any], Any]] = {
        "relay": {("source", "url"): database, ("sinks", 0, "kafka.bootstrap.servers"): kafka},
        "enrich": {
            ("source", "kafka.bootstrap.servers"): kafka,
            ("sinks", 0, "url"): database,
            ("sinks", 1, "path"): str(folder / "lake"),
        },
    }
    files = []
    for name, values in here.items():
        pipeline = yaml.safe_load(Path(__file__).with_name(f"{name}.yaml").read_text(encoding="utf-8"))
        pipeline |= {"checkpoint": str(folder / "checkpoints" / name), "master": "local[2]", "spark": spark}
        pipeline["trigger"] = "500 milliseconds"
        for (*path, last), value in values.items():
            target = pipeline
            for part in path:
                target = target[part]
            target[last] = value
        files.append(folder / f"{name}.yaml")
        files[-1].write_text(yaml.safe_dump(pipeline, sort_keys=False), encoding="utf-8")
    return tuple(files)
